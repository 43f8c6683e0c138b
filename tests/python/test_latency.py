"""The latency path through the public verbs: the reference's bits, one launch each, mixed with the other path."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from examples import Example, check, examples, expected, make_inputs, same
from hypothesis import given, settings
from world import ProcessWorld

from hybrid_ep import DeadlineError, HybridEPBuffer, functional, tuning
from hybrid_ep.runtime import session
from hybrid_ep.testing import VirtualWorld

TOKENS = 48  # latency_tokens of most buffers here
_worlds: dict = {}


def buffers_of(num_ranks: int, num_local_experts: int, executor: str = "host", num_nodes: int = 1, **options):
    """The buffers of a virtual world, of so many ranks a node, kept: later examples find the slabs and steps of earlier
    ones."""
    key = (num_nodes, num_ranks, executor, tuple(options.items()))
    if key not in _worlds:
        world = VirtualWorld(num_nodes, num_ranks)
        options = {"latency_tokens": TOKENS, "timeout_s": 20, **options}
        _worlds[key] = world, world.buffers(16, 1, num_local_experts, executor=executor, **options)
    return _worlds[key]


class ByLines:
    """A buffer whose routed permuted dispatches ask for the latency path; what follows them takes it unasked."""

    def __init__(self, buffer: HybridEPBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str):
        return getattr(self._buffer, name)

    def dispatch_with_permute(self, **arguments):
        path = {} if "handle" in arguments else {"path": "latency"}
        return self._buffer.dispatch_with_permute(**arguments, **path)


def launches(buffer: HybridEPBuffer, call):
    before = buffer._session.num_launches()
    result = call()
    return result, buffer._session.num_launches() - before


def by_lines(buffer: HybridEPBuffer, lines: int, call):
    """(result, whether its rows went by lines, that many each): the other path stores fewer bytes a row, and no
    multiple of a line. None where this rank sent no rows."""
    before = buffer.traffic()
    result = call()
    sent = {name: n - before[name] for name, n in buffer.traffic().items()}
    rows, sent_bytes = sent["node_rows"] + sent["self_rows"], sent["node_bytes"] + sent["self_bytes"]
    return result, sent_bytes == 128 * lines * rows if rows else None


def routed(ex: Example, rank: int, **rest):
    mine = make_inputs(ex, rank)
    return {
        "hidden": mine.hidden,
        "num_of_experts_per_rank": ex.num_local_experts,
        "num_permuted_tokens": ex.budget,
        "non_blocking": True,
        **mine.routing(),
        **rest,
    }


@pytest.mark.parametrize("num_nodes, num_ranks", [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (3, 2)])
def test_bits_of_the_reference(num_nodes, num_ranks):
    @given(ex=examples(num_nodes, num_ranks, budget=True))
    def run(ex):
        world, buffers = buffers_of(num_ranks, ex.num_local_experts, num_nodes=num_nodes)
        world.poison(buffers)
        want = expected(ex)
        world.run(lambda rank, _: check(ByLines(buffers[rank]), rank, ex, want))

    run()


@pytest.mark.parametrize("num_nodes, num_ranks", [(1, 3), (2, 2)])
@pytest.mark.parametrize("executor", ["host_checked", "host_checked_lanes4", "host_checked_lanes32"])
def test_bits_on_checking_executors(executor, num_nodes, num_ranks):
    @settings(max_examples=5)
    @given(ex=examples(num_nodes, num_ranks, max_tokens=10, budget=True))
    def run(ex):
        world, buffers = buffers_of(num_ranks, ex.num_local_experts, executor, num_nodes)
        want = expected(ex)
        world.run(lambda rank, _: check(ByLines(buffers[rank]), rank, ex, want))

    run()


@pytest.mark.parametrize("topk, scale_columns", [(8, 0), (16, 3)])
def test_warps_share_a_row_behind_metadata_of_more_than_a_line(topk, scale_columns):
    """Few rows of many lines, which warps of a GPU's width have parts of: nobody stores behind its share."""
    ex = Example(1, 2, 8, (2, 1), topk, 2064, scale_columns=scale_columns, budget=64, seed=15)
    world, buffers = buffers_of(2, 8, "host_checked_lanes32")
    want = expected(ex)
    world.run(lambda rank, _: check(ByLines(buffers[rank]), rank, ex, want))


def test_a_wrong_reference_is_noticed():
    ex = Example(1, 2, 2, (5, 3), budget=12, seed=3)
    world, buffers = buffers_of(2, 2)
    want = expected(ex)
    wrong = dataclasses.replace(want, combined=[(x.flip(0), p) for x, p in want.combined])
    errors = world.run(lambda rank, _: check(ByLines(buffers[rank]), rank, ex, wrong), return_errors=True)
    assert all("combined rows" in str(error) for error in errors)


EX = Example(1, 3, 2, (7, 0, 30), 3, 48, budget=160, seed=11)


A_MESSAGE, A_PARTIAL = 2, 1  # lines, of EX


def went(lines: bool | None, by: bool, rank: int) -> bool:
    """Whether what by_lines() found is as wanted; rank 1 of EX has no tokens, and so may have sent nothing."""
    return lines is by or (lines is None and rank == 1)


def check_either_way(buffer: HybridEPBuffer, rank: int, ex: Example, want) -> None:
    """Handles of either path, combined and dispatched on either: the same bits. One launch each where lines are taken,
    and lines where they are asked for, and nowhere else."""
    for made_by, num_launches in (("latency", 1), ("throughput", 2)):
        arguments = routed(ex, rank, path=made_by)
        (result, lines), n = launches(
            buffer, lambda a=arguments: by_lines(buffer, A_MESSAGE, lambda: buffer.dispatch_with_permute(**a))
        )
        assert n == num_launches and went(lines, made_by == "latency", rank)
        same(f"rows by {made_by}", result[0], want.permuted[rank][0])
        for path in ("latency", "throughput", "auto"):
            wanted = (made_by if path == "auto" else path) == "latency"
            back = {
                "hidden": want.returned[rank],
                "probs": want.returned_probs[rank],
                "handle": result[-1],
                "path": path,
            }
            ((out, probs), lines), n = launches(
                buffer, lambda a=back: by_lines(buffer, A_PARTIAL, lambda: buffer.combine_with_unpermute(**a))
            )
            assert n == 1 and went(lines, wanted, rank), f"{path} combine of {made_by}"
            same(f"{path} combine of {made_by}", out, want.combined[rank][0])
            same(f"probs of {path} combine of {made_by}", probs, want.combined[rank][1])
            hidden = make_inputs(ex, rank).hidden
            again = {"hidden": hidden, "handle": result[-1], "num_permuted_tokens": ex.budget, "path": path}
            (rows, *_), lines = by_lines(buffer, A_MESSAGE, lambda a=again: buffer.dispatch_with_permute(**a))
            assert went(lines, wanted, rank), f"{path} dispatch of {made_by}"
            same(f"{path} dispatch of {made_by}", rows, want.permuted[rank][0])


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_plans_serve_both_paths(num_nodes):
    ex = dataclasses.replace(EX, num_nodes=num_nodes, num_local_ranks=3 // num_nodes)
    world, buffers = buffers_of(3 // num_nodes, EX.num_local_experts, num_nodes=num_nodes)
    want = expected(ex)
    for _ in range(3):
        world.run(lambda rank, _: check_either_way(buffers[rank], rank, ex, want))


def test_lines_go_over_all_blocks(monkeypatch):
    """Those that would feed links and those for local work, for lines have no such parts. The other path keeps them."""
    ex, seen, launch_shape = Example(1, 1, 2, (7,), 2, 16, budget=32, seed=2), [], session._launch_shape

    def noted(num_blocks, local_blocks, *others):
        seen.append((num_blocks, local_blocks))
        return launch_shape(num_blocks, local_blocks, *others)

    monkeypatch.setattr(session, "_launch_shape", noted)
    (buffer,) = VirtualWorld(1, 1).buffers(
        16, 8, 2, latency_tokens=8, num_sms_dispatch_api=2, num_sms_combine_api=1, num_blocks_permute=3,
        num_blocks_unpermute=4,
    )  # fmt: skip
    for path, wanted in (("latency", [(5, None), (5, None), (5, None)]), ("throughput", [(2, 3), (2, 3), (1, 4)])):
        rows, *_, handle = buffer.dispatch_with_permute(**routed(ex, 0, path=path))
        buffer.dispatch_with_permute(
            hidden=make_inputs(ex, 0).hidden, handle=handle, num_permuted_tokens=ex.budget, path=path
        )
        out, _ = buffer.combine_with_unpermute(hidden=expected(ex).returned[0], handle=handle, path=path)
        same("rows", rows, expected(ex).permuted[0][0])
        same("sums", out, expected(ex).combined[0][0])
        assert seen == wanted
        seen.clear()


def _processes(ctx, ex):
    if "buffer" not in ctx.kept:
        ctx.kept["buffer"] = HybridEPBuffer(
            ctx.group(ex.num_nodes * ex.num_local_ranks),
            48,
            32,
            ex.num_local_experts,
            num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks,
            latency_tokens=32,
            timeout_s=60,
        )
    check_either_way(ctx.kept["buffer"], ctx.rank, ex, expected(ex))
    check(ByLines(ctx.kept["buffer"]), ctx.rank, ex)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_processes(num_nodes):
    ex = EX if num_nodes == 1 else Example(2, 2, 2, (7, 0, 30, 5), 3, 48, budget=160, seed=11)
    with ProcessWorld(num_nodes * ex.num_local_ranks) as world:
        for seed in range(4):
            world.run(_processes, dataclasses.replace(ex, seed=seed))


@pytest.mark.parametrize(
    "most, non_blocking, lines",
    [(30, True, True), (48, True, True), (np.int64(48), True, True), (49, True, False), (None, True, False)]
    + [(30, False, False)],
)
def test_auto_goes_by_what_all_ranks_know(most, non_blocking, lines):
    """Not by the tokens of a rank, which are 7, 0 and 30. Operations on the handle go as its dispatch did."""
    world, buffers = buffers_of(3, EX.num_local_experts)

    def run(rank, _):
        buffer, want = buffers[rank], expected(EX)
        arguments = routed(EX, rank, num_of_tokens_per_rank=most, non_blocking=non_blocking)
        result, found = by_lines(buffer, A_MESSAGE, lambda: buffer.dispatch_with_permute(**arguments))
        assert went(found, lines, rank)
        same("rows", result[0], want.permuted[rank][0])
        back = {"hidden": want.returned[rank], "handle": result[-1]}
        (out, _), found = by_lines(buffer, A_PARTIAL, lambda: buffer.combine_with_unpermute(**back))
        assert went(found, lines, rank)
        same("sums", out, want.combined[rank][0])

    world.run(run)


def test_a_path_is_any_string_that_names_one():
    world, buffers = buffers_of(3, EX.num_local_experts)

    def run(rank, _):
        result, found = by_lines(
            buffers[rank],
            A_MESSAGE,
            lambda: buffers[rank].dispatch_with_permute(**routed(EX, rank, path=np.str_("latency"))),
        )
        assert went(found, True, rank)
        back = {"hidden": expected(EX).returned[rank], "handle": result[-1]}
        for path in (np.array("latency"), np.str_("fast"), b"latency"):
            with pytest.raises(ValueError, match=r"path=.* must be one of"):
                buffers[rank].combine_with_unpermute(**back, path=path)
        _, found = by_lines(
            buffers[rank], A_PARTIAL, lambda: buffers[rank].combine_with_unpermute(**back, path=np.str_("throughput"))
        )
        assert went(found, False, rank)

    world.run(run)


@pytest.mark.parametrize("said", [None, 0, 30, TOKENS, 2 * TOKENS])
def test_auto_goes_by_the_crossover_of_a_tuning_file(tmp_path, said):
    """None: a file that says nothing of it. Who names the path gets it, up to latency_tokens."""
    key, device = tuning.Key(3, 3, EX.hidden, 3 * EX.num_local_experts), tuning.cpu_model()
    document = {
        "schema": tuning.SCHEMA,
        "entries": [tuning.Entry(device, key, TOKENS, 3, "bf16", tuning.Settings(1, 1, 8, 8)).to_json()],
    }
    if said is not None:
        document["crossovers"] = [tuning.Crossover(device, key, 3, "bf16", said).to_json()]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    world = VirtualWorld(1, 3)
    buffers = world.buffers(EX.hidden, 1, EX.num_local_experts, latency_tokens=TOKENS, timeout_s=20, tuning=str(path))

    def run(rank, _):
        for tokens, name, lines in (
            (30, "auto", said is None or said >= 30),
            (31, "auto", said is None or said >= 31),
            (TOKENS + 1, "auto", False),
            (30, "latency", True),
        ):
            call = routed(EX, rank, path=name, num_of_tokens_per_rank=tokens)
            _, found = by_lines(buffers[rank], A_MESSAGE, lambda c=call: buffers[rank].dispatch_with_permute(**c))
            assert went(found, lines, rank), (tokens, name)

    world.run(run)


@pytest.mark.parametrize("most", [1, TOKENS, 2 * TOKENS])
def test_a_buffer_takes_as_many_tokens_as_its_latency_path(most):
    """A first call by lines with latency_tokens tokens, whatever max_num_of_tokens_per_rank says: it cannot grow."""
    ex = Example(1, 2, 2, (TOKENS, 3), 2, 16, budget=2 * TOKENS * 2, seed=5)
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, most, 2, latency_tokens=TOKENS, timeout_s=60)
    want = expected(ex)
    assert [buffer.config.max_num_of_tokens_per_rank for buffer in buffers] == [max(most, TOKENS)] * 2
    world.run(lambda rank, _: check(ByLines(buffers[rank]), rank, ex, want))


def test_a_training_step_by_lines():
    """Four launches, two of them the backwards; gradients of the other path's bits."""
    world, buffers = buffers_of(3, EX.num_local_experts)

    def step(rank, most):
        buffer, mine = buffers[rank], make_inputs(EX, rank)
        x, w = mine.hidden.clone().requires_grad_(), mine.topk_weights.clone().requires_grad_()
        rows, probs, _, _, handle = functional.dispatch_with_permute(
            buffer,
            x,
            topk_idx=mine.topk_idx,
            topk_weights=w,
            num_of_experts_per_rank=EX.num_local_experts,
            num_permuted_tokens=EX.budget,
            non_blocking=True,
            num_of_tokens_per_rank=most,
        )
        out, _ = functional.combine_with_unpermute(buffer, rows * probs[:, None].to(rows.dtype), handle)
        out.backward(torch.ones_like(out))
        return out.detach(), x.grad, w.grad

    def run(rank, _):
        by_lines, n = launches(buffers[rank], lambda: step(rank, 30))
        assert n == 4
        for what, got, want in zip(("sums", "gradient", "weights"), by_lines, step(rank, None), strict=True):
            same(what, got, want)

    world.run(run)


def test_what_is_refused_leaves_the_buffer_usable():
    world, buffers = buffers_of(3, EX.num_local_experts)

    def run(rank, _):
        buffer, arguments = buffers[rank], routed(EX, rank)

        def refused(words, **change):
            with pytest.raises(ValueError, match=words):
                buffer.dispatch_with_permute(**{**arguments, **change})

        refused("path='fast' must be one of", path="fast")
        refused("non_blocking=True and num_permuted_tokens", path="latency", non_blocking=False)
        too_many = {"hidden": torch.zeros(TOKENS + 1, 48, dtype=torch.bfloat16)}
        too_many["topk_idx"] = torch.zeros(TOKENS + 1, 3, dtype=torch.int64)
        too_many["topk_weights"] = torch.zeros(TOKENS + 1, 3)
        refused(f"latency_tokens={TOKENS}", path="latency", **too_many)
        route = {k: v for k, v in arguments.items() if k not in ("hidden", "num_of_experts_per_rank")}
        plan = buffer.route(arguments["hidden"], permute=True, num_of_experts=6, **route)
        with pytest.raises(ValueError, match="first dispatch of what route"):
            buffer.dispatch_with_permute(
                hidden=arguments["hidden"], handle=plan, num_permuted_tokens=EX.budget, path="latency"
            )
        result = buffer.dispatch_with_permute(**arguments, path="latency")
        same("rows", result[0], expected(EX).permuted[rank][0])
        with pytest.raises(ValueError, match="path=None"):
            buffer.combine_with_unpermute(hidden=expected(EX).returned[rank], handle=result[-1], path=None)
        out, _ = buffer.combine_with_unpermute(hidden=expected(EX).returned[rank], handle=result[-1])
        same("sums", out, expected(EX).combined[rank][0])

    world.run(run)


def test_a_buffer_without_it_says_so():
    world = VirtualWorld(1, 1)
    (buffer,) = world.buffers(16, 8, 2)
    assert buffer.memory_report().regions["latency_slabs"] == 0
    with pytest.raises(ValueError, match="needs a buffer with latency_tokens"):
        buffer.dispatch_with_permute(
            hidden=torch.zeros(2, 16, dtype=torch.bfloat16),
            topk_idx=torch.zeros(2, 1, dtype=torch.int64),
            num_permuted_tokens=4,
            non_blocking=True,
            path="latency",
        )
    with pytest.raises(ValueError, match="latency_tokens=-1"):
        world.buffers(16, 8, 2, latency_tokens=-1)


def test_registered_bytes():
    """Two parities of a slab for each rank: a header of the count vector, and slots for the largest message."""
    world = VirtualWorld(1, 2)
    buffer = world.buffers(1024, 64, 4, latency_tokens=32)[0]
    message = 16 + 8 * 2 + 8 * 8 + 4 * 8 + 2 * 1024  # record of 8 pairs on 2 ranks, weights, payload
    header = -(-4 * (16 + 2 + 1 + 8) // 64) * 64
    lines = -(-header // 120) + 32 * -(-message // 120)
    assert buffer.memory_report().regions["latency_slabs"] == 2 * 2 * lines * 128


def test_registered_bytes_for_the_rail():
    """Two parities for each rail peer, to send from and to receive into: the count vector, and a place a
    token, which holds what the lines of a slot do."""
    world = VirtualWorld(3, 2)
    regions = world.buffers(1024, 64, 4, latency_tokens=32)[0].memory_report().regions
    message = 16 + 8 * 2 + 8 * 8 + 4 * 8 + 2 * 1024
    header, token = -(-4 * (16 + 6 + 3 + 24) // 128) * 128, -(-(-(-message // 120) * 120) // 128) * 128
    assert regions["latency_rail_send"] == regions["latency_rail_receive"] == 2 * 2 * (header + 32 * token)
    assert regions["latency_rail_signals"] == 2 * 2 * (1 + 32) * 8
    assert regions["latency_slabs"] == 2 * 6 * (-(-256 // 120) + 32 * -(-message // 120)) * 128


@pytest.mark.parametrize("case", ["dispatch by handle", "dispatch", "fp32_partials", "dtype"])
def test_ranks_in_different_calls_have_a_deadline_and_no_result(case):
    """Rank 0 combines, rank 1 does something else in the same step: what it sends is not to be taken for sums."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(256, 32, 2, latency_tokens=32, timeout_s=0.5)  # room for fp32 rows: nothing grows
    ex = Example(1, 2, 2, (4, 4), 2, 48, budget=32)
    want = expected(ex)

    def body(rank, _):
        handle = buffers[rank].dispatch_with_permute(**routed(ex, rank), path="latency")[-1]
        rows = want.returned[rank]
        options = {}
        if rank == 1:
            if case == "dispatch":
                return buffers[rank].dispatch_with_permute(**routed(ex, rank), path="latency")
            if case == "dispatch by handle":
                hidden = make_inputs(ex, rank).hidden
                return buffers[rank].dispatch_with_permute(
                    hidden=hidden, handle=handle, num_permuted_tokens=ex.budget, path="latency"
                )
            rows = rows.half() if case == "dtype" else rows
            options = {"fp32_partials": case == "fp32_partials"}
        return buffers[rank].combine_with_unpermute(hidden=rows, handle=handle, path="latency", **options)

    errors = world.run(body, return_errors=True)
    assert all(isinstance(error, DeadlineError) for error in errors), errors


@pytest.mark.parametrize("tokens", [1 << 31, (1 << 32) + 8, -1, 2.5])
def test_latency_tokens_that_cannot_be_are_named(tokens):
    with pytest.raises(ValueError, match="latency_tokens="):
        VirtualWorld(1, 1).buffers(64, 8, 2, latency_tokens=tokens)


def test_ranks_on_different_paths_have_a_deadline():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(48, 32, 2, latency_tokens=32, timeout_s=0.5)
    ex = Example(1, 2, 2, (4, 4), 2, 48, budget=32)
    errors = world.run(
        lambda rank, _: buffers[rank].dispatch_with_permute(**routed(ex, rank), path=("latency", "throughput")[rank]),
        return_errors=True,
    )
    assert isinstance(errors[0], DeadlineError) and "latency_header from rank 1" in str(errors[0])
    assert isinstance(errors[1], DeadlineError)
    assert not buffers[0].is_usable
