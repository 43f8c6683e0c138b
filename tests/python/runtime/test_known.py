"""Calls known by their signature: which calls are alike, and that a known call is right, refuses and recovers as the
first of its kind does; with torch's table of C functions and as with a torch that has none."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import _core
from hybrid_ep.runtime import verbs
from hybrid_ep.testing import VirtualWorld

HIDDEN, TOKENS, TOPK, EXPERTS = 16, 6, 3, 2
SHAPE = (2, 2)
RANKS = SHAPE[0] * SHAPE[1]
pytestmark = pytest.mark.skipif(not _core.exchanges_tensors(), reason="torch has no __dlpack_c_exchange_api__")


@pytest.fixture
def without_exchange():
    _core.exchange_tensors(False)
    yield
    _core.exchange_tensors(True)


@pytest.fixture
def first_calls(monkeypatch):
    """Routings that were worked out anew, one entry each."""
    seen, real = [], verbs.routing_of_call

    def watched(*args, **keywords):
        seen.append(args)
        return real(*args, **keywords)

    monkeypatch.setattr(verbs, "routing_of_call", watched)
    return seen


def arguments(rank: int, seed: int, **changed) -> dict:
    made = torch.Generator().manual_seed(10 * seed + rank)
    idx = torch.stack([torch.randperm(RANKS * EXPERTS, generator=made)[:TOPK] for _ in range(TOKENS)])
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=made).bfloat16(),
        "topk_idx": idx,
        "topk_weights": torch.rand(TOKENS, TOPK, generator=made),
        "num_of_experts": RANKS * EXPERTS,
    } | changed


def made(beside: bool = False, **options):
    world = VirtualWorld(*SHAPE)
    buffers = world.buffers(HIDDEN, TOKENS, EXPERTS, timeout_s=30, **options)
    for buffer in buffers:
        buffer._session.runs_beside = beside
    return world, buffers


def there_and_back(buffer, call: dict) -> list[torch.Tensor]:
    rows, weights, _, padded, handle = buffer.dispatch_with_permute(**call)
    again = buffer.dispatch_with_permute(hidden=call["hidden"], handle=handle)[0]
    sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    return [rows, weights, padded, again, sums, handle.tokens_per_expert, handle.overflow_flag]


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


KINDS = {
    "waits": (False, {}),
    "waits, kernels beside": (True, {}),
    "waits for nothing": (True, {"non_blocking": True, "num_permuted_tokens": 80, "pad_multiple": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_known_calls_are_what_first_calls_are(kind, first_calls):
    beside, options = KINDS[kind]
    world, buffers = made(beside)
    for seed in range(4):
        got = world.run(lambda rank, _, seed=seed: there_and_back(buffers[rank], arguments(rank, seed, **options)))
        assert len(first_calls) == RANKS  # of the first round
        fresh_world, fresh = made(beside)
        _core.exchange_tensors(False)
        try:
            want = fresh_world.run(
                lambda rank, _, seed=seed, to=fresh: there_and_back(to[rank], arguments(rank, seed, **options))
            )
        finally:
            _core.exchange_tensors(True)
            del first_calls[RANKS:]
        for a, b in zip(got, want, strict=True):
            same(a, b)


def test_without_the_table_every_call_is_worked_out(without_exchange, first_calls):
    assert not _core.exchanges_tensors()
    world, buffers = made()
    for seed in range(2):
        world.run(lambda rank, _, seed=seed: there_and_back(buffers[rank], arguments(rank, seed)))
    assert len(first_calls) == 2 * RANKS


@pytest.mark.parametrize("beside", [False, True])
def test_a_rank_that_refuses_alone_leaves_the_buffers_usable(beside):
    world, buffers = made(beside)

    def call(rank, seed, **changed):
        return buffers[rank].dispatch_with_permute(**arguments(rank, seed, **changed))

    world.run(lambda rank, _: call(rank, 0))
    bad = [{"hidden": torch.empty(TOKENS + 1, HIDDEN, dtype=torch.bfloat16)}, {"topk_weights": torch.ones(TOKENS, 2)}]
    if not beside:  # only there does anybody look
        bad.append({"topk_idx": torch.full((TOKENS, TOPK), RANKS * EXPERTS)})
    spoilt = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    spoilt.untyped_storage().resize_(0)
    for changed in [*bad, {"hidden": spoilt}]:
        with pytest.raises(ValueError):
            call(1, 1, **changed)
    assert all(buffer.is_usable for buffer in buffers)
    got = world.run(lambda rank, _: there_and_back(buffers[rank], arguments(rank, 2)))
    fresh_world, fresh = made(beside)
    want = fresh_world.run(lambda rank, _: there_and_back(fresh[rank], arguments(rank, 2)))
    for a, b in zip(got, want, strict=True):
        same(a, b)


def test_ranks_that_know_and_ranks_that_do_not_raise_alike_and_go_on():
    world, buffers = made()
    world.run(lambda rank, _: buffers[rank].dispatch_with_permute(**arguments(rank, 0)))
    other = lambda rank: {"pad_multiple": 8} if rank == 3 else {}  # noqa: E731
    errors = world.run(
        lambda rank, _: buffers[rank].dispatch_with_permute(**arguments(rank, 1, **other(rank))), return_errors=True
    )
    assert all(isinstance(error, ValueError) and "pad_multiple" in str(error) for error in errors)
    # One rank has more tokens than there is room for: all grow, and what was known is forgotten.
    wide = lambda rank: torch.randn(TOKENS + 5, HIDDEN).bfloat16()  # noqa: E731

    def grown(rank, _):
        call = arguments(rank, 2)
        if rank == 2:
            idx = torch.zeros(TOKENS + 5, 1, dtype=torch.int64).expand(-1, TOPK) + torch.arange(TOPK)
            call |= {"hidden": wide(rank), "topk_idx": idx, "topk_weights": torch.ones(TOKENS + 5, TOPK)}
        return buffers[rank].dispatch_with_permute(**call)

    before = buffers[0]._session.shape.max_tokens
    world.run(grown)
    assert [buffer._session.shape.max_tokens for buffer in buffers] == [TOKENS + 5] * RANKS and before == TOKENS
    world.run(lambda rank, _: there_and_back(buffers[rank], arguments(rank, 3)))


def test_what_a_configuration_asks_for_is_part_of_the_signature(first_calls):
    world, buffers = made()
    for seed, tokens in enumerate((None, TOKENS + 3, None)):
        for buffer in buffers:
            buffer.update_template_config(num_of_tokens_per_rank=tokens)
        world.run(lambda rank, _, seed=seed: buffers[rank].dispatch_with_permute(**arguments(rank, seed)))
    assert len(first_calls) == 2 * RANKS
    assert buffers[0]._session.shape.max_tokens == TOKENS + 3


class Sub(torch.Tensor):
    pass


def test_signatures():
    x = torch.zeros(4, 8)
    key = _core.signature
    assert key(x, 1) == key(torch.ones(4, 8), 1) == key(x.clone().requires_grad_(), 1)
    assert key(x) == key(torch.nn.Parameter(x.clone()))
    different = [
        key(x), key(x, 1), key(x, True), key(x, None), key(x, 0), key(x, False), key(None, x), key(x.view(8, 4)),
        key(x.view(32)), key(x.int()), key(x.double()), key(x.bfloat16()), key(x.half()), key(x.to(torch.int16)), key(),
        key(x.to(torch.float8_e4m3fn)), key(x.to(torch.float8_e5m2)), key(x.to(torch.uint8)), key(x.bool()), key(1, x),
    ]  # fmt: skip
    assert None not in different and len(set(different)) == len(different)
    shrunk = torch.zeros(4, 8)
    shrunk.untyped_storage().resize_(64)
    freed = torch.zeros(4, 8)
    freed.untyped_storage().resize_(0)
    for unusual in (
        x.t(), x[:, ::2], x.view(-1)[1:29], x.as_subclass(Sub), torch._neg_view(x), shrunk, freed, x.to("meta"),
        torch._efficientzerotensor((4, 8)), x.cfloat(), 1.0, "1", 2**70, [x], x.to_sparse(),
    ):  # fmt: skip
        assert key(unusual) is None
    assert key(torch.zeros(0, 8)) is not None and key(torch.zeros(1, 8)[:, :].expand(1, 8)) is not None


def test_tensors_over_memory_of_the_core():
    block = _core.host_words(1000)
    assert block.dtype == torch.int64 and block.shape == (1000,) and block.data_ptr() % 128 == 0
    view = block[10:20].fill_(7)
    del block
    assert view.tolist() == [7] * 10
    assert _core.host_words(0).numel() == 0
    _, buffers = made()
    engine = buffers[0]._session.engine
    code = _core.TensorView.elements["bfloat16"]
    lent = engine.lend(3, 8, code)
    assert lent.dtype == torch.bfloat16 and lent.shape == (3, 8) and engine.arena_bytes_lent == 128
    part = lent[1:]
    del lent
    assert engine.arena_bytes_lent == 128
    del part
    assert engine.arena_bytes_lent == 0
    assert engine.lend(1 << 20, 1 << 10, code) is None
    with pytest.raises(ValueError, match="give at least 1"):
        engine.lend(0, 8, code)
