"""Chunks of an operation change nothing but speed, and tuning files are found by device and shape or refused."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_ep import _core, tuning
from hybrid_ep.config import DEFAULT_CHUNK_TOKENS
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED
from hybrid_ep.perf.shape import Shape
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.tuning import Crossover, Entry, Key, Settings

HIDDEN, EXPERTS, TOPK, TOKENS = 64, 8, 3, 70


TUNED, HERE = Settings(3, 2, 5, 17), Key(4, 2, HIDDEN, EXPERTS)


def entry(device=None, settings=TUNED, tokens=TOKENS, key=HERE) -> Entry:
    return Entry(device or tuning.cpu_model(), key, tokens, TOPK, "bf16", settings)


def write(path, *entries: Entry, crossovers: tuple[Crossover, ...] = ()) -> str:
    found = {"entries": [e.to_json() for e in entries], "crossovers": [c.to_json() for c in crossovers]}
    path.write_text(json.dumps({"schema": tuning.SCHEMA, **found}))
    return str(path)


def make(world, **options):
    return world.buffers(HIDDEN, TOKENS, EXPERTS // world.size, timeout_s=20, **options)


def exchange(world, buffers, configure=lambda rank, buffer: None):
    """Rows and sums of every rank after one dispatch and combine, bytes as integers."""

    def work(rank, _):
        configure(rank, buffers[rank])
        g = torch.Generator().manual_seed(rank)
        tokens = TOKENS - 9 * rank
        x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
        idx = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK]
        rows, *_, handle = buffers[rank].dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=EXPERTS)
        out, _ = buffers[rank].combine_with_unpermute(hidden=rows, handle=handle)
        return rows.view(torch.int16), out.view(torch.int16)

    return world.run(work)


@pytest.mark.parametrize(("nodes", "slots"), [(1, 64), (2, 64), (3, 32), (4, 32), (5, 16), (64, 16)])
def test_the_default_ring_is_the_layout_s(nodes, slots):
    shape = _core.BufferShape(num_nodes=nodes, num_local_ranks=1, num_experts=nodes)
    assert shape.chunk_tokens == DEFAULT_CHUNK_TOKENS == HYBRID_EP.chunk
    asked = Shape(ranks=nodes, ranks_per_node=1, tokens=1, hidden=8, topk=1, experts=nodes)
    assert shape.rail_slots == HYBRID_EP.rail_slots(asked) == slots
    assert PUBLISHED.rail_slots(asked) == 0
    assert _core.BufferShape(num_nodes=nodes, num_local_ranks=1, num_experts=nodes, rail_slots=3).rail_slots == 3


def test_any_chunks_give_the_same_bits_in_one_buffer():
    world = VirtualWorld(2, 2)
    buffers = make(world)
    want, before = exchange(world, buffers), buffers[0].memory_report().total_bytes
    rows = buffers[0].traffic()["rail_rows"]
    assert rows > 0
    for count, (dispatch, combine) in enumerate([(1, 1), (7, 32), (200, 3), (3, 64), (32, 32)], start=2):
        got = exchange(
            world,
            buffers,
            lambda _, b, d=dispatch, c=combine: b.update_template_config(
                num_of_tokens_per_chunk_dispatch_api=d, num_of_tokens_per_chunk_combine_api=c
            ),
        )
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        assert buffers[0].traffic()["rail_rows"] == count * rows
    # the ring's slots hold the largest chunk there was
    assert buffers[0].memory_report().total_bytes > before


def test_ranks_that_differ_in_their_chunks_are_told():
    world = VirtualWorld(2, 1)
    buffers = make(world)
    with pytest.raises(ValueError, match="chunk_combine"):
        exchange(world, buffers, lambda rank, b: b.update_template_config(num_of_tokens_per_chunk_combine_api=8 + rank))
    with pytest.raises(ValueError, match="num_of_tokens_per_chunk_dispatch_api"):
        buffers[0].update_template_config(num_of_tokens_per_chunk_dispatch_api=0)


def test_a_chunk_beyond_the_ring_s_slots_is_refused_by_the_engine():
    world = VirtualWorld(1, 1)
    (buffer,) = make(world)
    buffer._session.chunks["dispatch"] = DEFAULT_CHUNK_TOKENS + 1
    routing = {"topk_idx": torch.zeros(1, 1, dtype=torch.int64), "num_of_experts": EXPERTS}
    _, _, _, handle = buffer.dispatch(hidden=torch.zeros(1, HIDDEN).bfloat16(), **routing)  # a routed call settles it
    buffer._session.chunks["combine"] = DEFAULT_CHUNK_TOKENS + 1
    with pytest.raises(ValueError, match="chunk_tokens: is 17; a ring slot holds 16"):
        buffer.combine(hidden=torch.zeros(1, HIDDEN).bfloat16(), handle=handle)


def test_a_buffer_takes_its_settings_from_the_file(tmp_path, monkeypatch):
    path = write(tmp_path / "t.json", entry("H100"), entry(settings=Settings(9, 9, 9, 9), tokens=2 * TOKENS), entry())
    world = VirtualWorld(2, 2)
    buffers = make(world, tuning=path)
    c = buffers[0].config
    assert (c.num_of_blocks_dispatch_api, c.num_of_blocks_combine_api) == (3, 2)
    assert (c.chunk("dispatch"), c.chunk("combine")) == (5, 17) == tuple(buffers[1]._session.chunks.values())
    plain = exchange(world, make(world))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(exchange(world, buffers), plain, strict=True))
    # an argument wins over the file, the file over the default; the environment names a file too
    monkeypatch.setenv("HYBRID_EP_TUNING", path)
    c = make(world, num_sms_combine_api=4)[0].config
    assert (c.num_of_blocks_dispatch_api, c.num_of_blocks_combine_api, c.chunk("combine")) == (3, 4, 17)
    c = make(world, tuning="")[0].config
    assert (c.num_of_blocks_dispatch_api, c.chunk("combine")) == (1, DEFAULT_CHUNK_TOKENS)


def test_of_several_crossovers_the_least_counts(tmp_path):
    def found(tokens, device="cpu", key=HERE, topk=TOPK, dtype="bf16"):
        return Crossover(device, key, topk, dtype, tokens)

    path = write(
        tmp_path / "t.json",
        crossovers=(found(9), found(7, topk=1), found(8, dtype="fp8"), found(1, "H100"), found(2, key=Key(2, 2, 8, 8))),
    )
    table = tuning.load(path, "cpu")
    assert table.crossover(HERE) == 7 and table.crossover(Key(2, 2, 8, 8)) == 2
    assert tuning.load(path, "other").crossover(HERE) is None
    assert tuning.load(write(tmp_path / "u.json", entry()), "cpu").crossover(HERE) is None


@pytest.mark.parametrize("tokens", [-1, 1.5, True, None, "8"])
def test_a_damaged_crossover_is_refused(tmp_path, tokens):
    path = write(tmp_path / "t.json", entry(), crossovers=(Crossover("cpu", HERE, TOPK, "bf16", tokens),))
    with pytest.raises(ValueError, match="damaged.*at least 0"):
        tuning.load(path, "cpu")


@pytest.mark.parametrize(
    "other",
    [
        entry("H100"),
        entry(key=Key(4, 4, HIDDEN, EXPERTS)),
        entry(key=Key(4, 2, HIDDEN + 8, EXPERTS)),
        entry(key=Key(4, 2, HIDDEN, 2 * EXPERTS)),
        entry(tokens=2 * TOKENS + 1),
        entry(tokens=TOKENS // 2 - 1),
    ],
)
def test_a_file_that_does_not_match_is_refused_with_what_it_has(tmp_path, other):
    path = write(tmp_path / "t.json", other)
    with pytest.raises(ValueError, match="has no entry for") as refused:
        make(VirtualWorld(2, 2), tuning=path)
    assert path in str(refused.value) and str(other) in str(refused.value) and "hybrid-ep tune" in str(refused.value)


def test_ranks_with_different_files_are_told(tmp_path):
    paths = [
        write(tmp_path / f"{i}.json", entry(key=Key(2, 1, HIDDEN, EXPERTS), settings=Settings(1, 1, 8 + i, 8)))
        for i in range(2)
    ]
    from hybrid_ep import HybridEPBuffer

    world = VirtualWorld(2, 1)
    with pytest.raises(ValueError, match="tuning"):
        world.run(
            lambda rank, group: HybridEPBuffer(
                group,
                HIDDEN,
                TOKENS,
                EXPERTS // 2,
                timeout_s=20,
                num_of_hybrid_ep_ranks_per_nvlink_domain=1,
                tuning=paths[rank],
            )
        )


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not 'hybrid_ep.tuning/1'"),
        ('{"schema": "hybrid_ep.bench/2"}', "hybrid_ep.bench/2"),
        ('{"schema": "hybrid_ep.tuning/1"}', "damaged"),
        ('{"schema": "hybrid_ep.tuning/1", "entries": [{"device": "x"}]}', "damaged"),
        (
            json.dumps({"schema": tuning.SCHEMA, "entries": [entry(settings=Settings(0, 1, 1, 1)).to_json()]}),
            "at least 1",
        ),
    ],
)
def test_what_is_no_tuning_file_is_refused(tmp_path, text, words):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="tuning=") as refused:
        tuning.load(path, "x")
    assert words in str(refused.value)
    with pytest.raises(ValueError, match="must be the path"):
        tuning.load(3, "x")


@pytest.mark.parametrize("order", [1, -1])
def test_what_was_measured_goes_before_a_prediction(tmp_path, order):
    """Its device is the driver's name, that of a prediction a word of it; in one file, whichever was written first."""
    name, measured = "NVIDIA H100 80GB HBM3", Settings(9, 9, 9, 9)
    both = (entry("H100"), entry(name, measured, tokens=2 * TOKENS))
    crossovers = (Crossover("H100", HERE, TOPK, "bf16", 8), Crossover(name, HERE, TOPK, "fp8", 64))
    path = write(tmp_path / "t.json", *both[::order], crossovers=crossovers[::order])
    table = tuning.load(path, name)
    assert table.find(HERE, TOKENS) == measured and table.crossover(HERE) == 64
    assert table.find(HERE, TOKENS // 2) == TUNED, "what was measured is too far away there"
    other = tuning.load(path, "NVIDIA H100 PCIe")
    assert other.find(HERE, 2 * TOKENS) == TUNED and other.crossover(HERE) == 8


def test_a_device_is_whole_words_of_a_name():
    def finds(device: str, name: str) -> bool:
        return tuning._is_device(device, name)

    assert finds("H100", "NVIDIA H100 80GB HBM3") and finds("nvidia b200", "NVIDIA B200")
    assert not finds("B200", "NVIDIA GB200") and not finds("H100", "NVIDIA H1000")
    assert finds("AMD EPYC (x)", "AMD EPYC (x)")


@pytest.mark.parametrize(
    "wanted, environment, megatron, sms",
    [
        ({}, None, 16, 16),
        ({"tuning": "t.json"}, None, 16, None),
        ({}, "t.json", 16, None),
        ({"tuning": "t.json", "num_sms": 4}, None, 16, 4),
    ],
)
def test_megatron_s_default_number_of_sms_does_not_hide_the_file(
    monkeypatch, tmp_path, wanted, environment, megatron, sms
):
    from megatron_patches import buffers, settings

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": []}))

    if environment:
        monkeypatch.setenv("HYBRID_EP_TUNING", environment)
    given = {}
    wanted = settings.Settings.of(buffer_class=lambda **options: given.update(options), **wanted)
    buffers._create(None, HIDDEN, TOKENS, 2, megatron, wanted)
    assert given.get("num_sms_dispatch_api") == given.get("num_sms_combine_api") == sms
    assert given.get("tuning") == (wanted.exchange.tuning or environment)
