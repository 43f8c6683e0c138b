"""What stands on the model: peers, steps, weights instead of tokens, advice, traces, and the event engine beside it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import (
    dwdp,
    events,
    flow,
    memory,
    model,
    models,
    peers,
    recommend,
    route_time,
    routing,
    step_time,
    trace,
)
from hybrid_ep.perf.costs import event_costs
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.order_statistics import expected_max
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.step_time import Job

H100, NVL72 = clusters.get("h100_8x400g"), clusters.get("gb200_nvl72")
QWEN = models.get("qwen3_30b_a3b")
needs_events = pytest.mark.skipif(events.missing() is not None, reason=str(events.missing()))


def test_order_statistics():
    assert expected_max(1) == pytest.approx(0, abs=1e-6)
    assert expected_max(2) == pytest.approx(1 / np.sqrt(np.pi), abs=1e-4)
    assert expected_max(8) == pytest.approx(1.4236, abs=1e-3)
    draws = np.random.default_rng(0).normal(size=(20_000, 64)).max(axis=1).mean()
    assert expected_max(64) == pytest.approx(draws, rel=0.01)
    with pytest.raises(ValueError, match="n=0"):
        expected_max(0)


@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_hierarchy_gains_where_the_rail_is_scarce(ranks):
    shape = Shape(ranks, 8, 4096, 7168, 8, 256)
    got = peers.compare("dispatch", shape, H100)
    assert got["hybrid_ep"].us < got["node_dedup"].us < got["flat"].us
    assert got["flat"].rail_rows == 4096 * 8 * (1 - 8 / ranks)
    assert got["hybrid_ep"].rail_rows < got["flat"].rail_rows


@pytest.mark.parametrize("cluster, ranks", [(H100, 8), (H100, 32), (H100, 256), (NVL72, 64)])
def test_no_exchange_beats_its_links(cluster, ranks):
    shape = Shape(ranks, min(ranks, cluster.ranks_per_node), 4096, 7168, 8, 256)
    for op in model.OPS:
        least = peers.links_us(op, shape, cluster)
        assert 0 < least < min(peer.us for peer in peers.compare(op, shape, cluster, num_sms=64).values())


def test_sms_for_many_tokens_are_those_for_8192():
    job = Job(QWEN, clusters.get("b200_8x400g"), 8, 8, tokens=16384)
    assert recommend.tuned(job).num_sms == recommend.tune(job.shape, job.cluster).num_sms


def test_dedup_saves_less_when_every_expert_is_on_another_node():
    def gain(ranks):
        got = peers.compare("dispatch", Shape(ranks, 8, 4096, 7168, 8, 256), H100)
        return got["flat"].us / got["hybrid_ep"].us

    assert gain(16) > gain(32) > gain(64) > gain(256)


def test_a_step_adds_up():
    job = Job(
        QWEN,
        H100,
        64,
        8,
        pp=2,
        micro_batches=8,
        cv_fast=0.02,
        cv_slow=0.02,
        fixed_us=10.0,
        imbalance=0.2,
        tensor=2,
        recompute="full",
    )
    got = step_time.step(job)
    assert sum(got.shares.values()) == pytest.approx(1.0)
    assert got.tokens_per_s_per_gpu == pytest.approx(4096 * 8 / got.seconds / 2)


@pytest.mark.parametrize(
    "change",
    [
        {"cv_fast": 0.05},
        {"cv_slow": 0.05},
        {"fixed_us": 100.0},
        {"imbalance": 0.5},
        {"efficiency": 0.1},
        {"grad_overlap": 0.0},
        {"micro_batches": 8},
        {"recompute": "full"},
        {"tensor": 2},
        {"tensor": 4, "recompute": "full"},
    ],
)
def test_what_makes_a_step_slower(change):
    base = Job(QWEN, H100, 64, 8, pp=2, micro_batches=32)
    worse = step_time.step(Job(**{**vars(base), **change}))
    assert worse.tokens_per_s_per_gpu < step_time.step(base).tokens_per_s_per_gpu


def test_scaling_decays_slowly_from_8_to_16384_gpus():
    rates = [step_time.step(Job(QWEN, H100, n, 8, cv_slow=0.03)).tokens_per_s_per_gpu for n in (8, 64, 512, 16384)]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0.7 * rates[0]


def test_recompute_and_tensor_parallelism_by_hand():
    """A third of the work is the forward, of layers and not of the output layer, which the last stage has; tensor ranks
    gather and scatter twice a layer, forward and backward."""
    base = Job(QWEN, H100, 64, 8, pp=2, imbalance=0.0)
    again, apart = Job(**{**vars(base), "recompute": "full"}), Job(**{**vars(base), "tensor": 4})
    first, last = base.stages
    layers, more = (step_time.compute_us(job, first) for job in (base, again))
    assert more == pytest.approx(4 / 3 * layers)
    head = step_time.compute_us(base, last) - layers
    assert head > 0 and step_time.compute_us(again, last) == pytest.approx(more + head)
    a_gather = 3 * 4096 * QWEN.hidden * 2 / (H100.gpu.nvlink_rate * 1e3)
    assert step_time.tensor_us(base, first) == 0
    assert step_time.tensor_us(apart, first) == pytest.approx(4 * QWEN.num_layers / 2 * a_gather)


@pytest.mark.parametrize("recompute", ["moe", "full"])
def test_a_recomputed_exchange_by_hand(recompute):
    """Ours dispatches by the first forward's handle and sums nothing; others exchange all again."""
    for dispatcher in ("hybrid_ep", "a2a", "published_hybrid_ep"):
        base = Job(QWEN, H100, 64, 8, dispatcher=dispatcher, dispatch_dtype="fp8", fixed_us=7.0)
        again = Job(**{**vars(base), "recompute": recompute})
        exchanged = (
            peers.flat(op, base.shape, H100, dtype).us for op, dtype in (("dispatch", "fp8"), ("combine", "bf16"))
        )
        by_hand = {
            "hybrid_ep": peers.hybrid("dispatch", base.shape, H100, "fp8", base.num_sms, cached=True).us,
            "a2a": sum(exchanged),
            "published_hybrid_ep": step_time._exchange(
                base.shape, H100.name, "published_hybrid_ep", base.num_sms, "fp8"
            ),
        }[dispatcher]
        assert step_time.recompute_us(base) == 0
        assert step_time.recompute_us(again) == pytest.approx(by_hand + step_time.QUANTISE_US)
        spent = [step_time.step(job).shares for job in (base, again)]
        seconds = [step_time.step(job).seconds * 1e6 / job.micro_batches for job in (base, again)]
        more = {part: spent[1][part] * seconds[1] - spent[0][part] * seconds[0] for part in ("exchange", "fixed")}
        assert more["exchange"] == pytest.approx(QWEN.moe_layers * step_time.recompute_us(again))
        assert more["fixed"] == pytest.approx(QWEN.moe_layers * 7.0 * (1 if dispatcher == "hybrid_ep" else 2))
    one_rank = Job(QWEN, H100, 64, 1, recompute=recompute)
    assert step_time.recompute_us(one_rank) == 0


@pytest.mark.parametrize(
    "change, word",
    [
        ({"tensor": 3}, "tensor=3"),
        ({"pp": 2, "layout": "Et*24|t*23L"}, "must have 2 x 1 chunks with 48 layers t"),
        ({"mtp_layers": -1}, "mtp_layers=-1"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"ep": 7}, "ep=7"),
        ({"gpus": 12}, "gpus=12"),
        ({"overlap": 2}, "overlap=2"),
        ({"dispatcher": "x"}, "dispatcher='x'"),
        ({"efficiency": 0}, "efficiency=0"),
    ],
)
def test_bad_jobs(change, word):
    with pytest.raises(ValueError, match=word):
        Job(**{**vars(Job(QWEN, H100, 64, 8)), **change})


def test_weights_cross_over_tokens():
    deepseek = models.get("deepseek_v3")
    # three weights against four exchanges of tokens, in bytes of one rank
    tokens = dwdp.byte_crossover(deepseek, 8, "bf16", training=True)
    weights = 3 * (256 - 32) * 3 * 7168 * 2048 * 2
    assert tokens * 2 * dwdp.token_bytes(deepseek, 8, "bf16") == pytest.approx(weights)
    assert dwdp.byte_crossover(QWEN, 8, "bf16", training=True) < tokens / 4
    at = dwdp.hiding_crossover(deepseek, NVL72, 4)
    assert dwdp.layer(deepseek, NVL72, at, 4).compute_us >= dwdp.layer(deepseek, NVL72, at, 4).prefetch_us
    assert dwdp.layer(deepseek, NVL72, at - 1, 4).compute_us < dwdp.layer(deepseek, NVL72, at - 1, 4).prefetch_us
    with pytest.raises(ValueError, match="ranks=5"):
        dwdp.layer(deepseek, NVL72, 8, 5)


def test_experts_that_are_kept_are_not_pulled_again():
    deepseek = models.get("deepseek_v3")

    def weights_us(**kept):
        return dwdp.choose(deepseek, NVL72, 2048, 4, "bf16", training=True, micro_batches=8, **kept).weights_us

    times = [weights_us(held=held) for held in (64, 128, 192, 256)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1], "such a layer waits for weights"
    assert weights_us() == times[0] and weights_us(resident=True) == pytest.approx(times[-1])
    assert weights_us(held=128, resident=True) == weights_us(resident=True)
    for held in (63, 257):
        with pytest.raises(ValueError, match=f"held={held} must be from 64"):
            weights_us(held=held)


def test_a_combine_is_simulated_once_for_both_dtypes_of_the_dispatch(monkeypatch):
    shape, asked = Shape(8, 8, 777, 1024, 2, 16), []
    real = model.predict
    monkeypatch.setattr(model, "predict", lambda op, *a, **how: asked.append((op, how["dtype"])) or real(op, *a, **how))
    times = [recommend.tune(shape, clusters.get("h100_8x400g"), dtype).exchange_us for dtype in ("bf16", "fp8")]
    assert times[1] < times[0] and len(asked) == 3 * (len(recommend._SMS) + 1)  # SMs, and then the chunk
    assert set(asked) == {("dispatch", "bf16"), ("dispatch", "fp8"), ("combine", "bf16")}


def test_tuning_takes_no_more_sms_than_it_needs():
    shape = Shape(64, 8, 4096, 7168, 8, 256)
    tuned = recommend.tune(shape, H100)
    fewer = sum(model.predict(op, shape, H100, num_sms=tuned.num_sms // 2).api_us for op in model.OPS)
    more = sum(model.predict(op, shape, H100, num_sms=64).api_us for op in model.OPS)
    assert fewer > 1.05 * more >= 0.99 * tuned.exchange_us


def test_advice_fits_the_memory_and_is_sorted():
    plans = recommend.recommend(QWEN, clusters.get("gb200_nvl36"), 36)
    times = [p.step_seconds for p in plans]
    assert times == sorted(times) and len({(p.ep, p.pp, p.move) for p in plans}) == len(plans) >= 3
    assert all(p.state_gb < p.memory_gb <= 186 * 0.9 for p in plans) and all(p.why for p in plans)
    with pytest.raises(ValueError, match="take more"):
        recommend.recommend(models.get("deepseek_v3"), H100, 64)


def test_state_is_weights_gradients_and_a_share_of_the_optimizer():
    # one GPU holds everything: 2 + 4 + 12 bytes a parameter
    whole, params = Job(QWEN, H100, 1, 1), QWEN.architecture.total_params
    assert memory.per_gpu(whole).state == 18 * params
    assert memory.per_gpu(replace(whole, moments="bf16")).state == 14 * params
    # of fp8 weights bf16 ones stand beside them and their transposes; of mxfp8 these are all
    assert memory.per_gpu(replace(whole, dtype="fp8")).state == 20 * params
    assert memory.per_gpu(replace(whole, dtype="fp8", fp8_params="yes")).state == 18 * params
    blackwell = replace(whole, cluster=clusters.get("b200_8x400g"), dtype="mxfp8")
    assert memory.per_gpu(blackwell).state == 18 * params
    assert memory.per_gpu(replace(blackwell, fp8_params="no")).state == 20 * params


def test_tensor_ranks_share_what_is_no_routed_expert_and_more_gpus_the_optimizer():
    a = QWEN.architecture
    experts = int(QWEN.routed_params) // 8
    dense, whole = a.total_params - 8 * experts, a.whole_params(0)
    # norms and routers by hand: two norms of a layer, of queries and keys, before the output layer
    assert whole == 48 * (2 * 2048 + 2 * 128 + 2048 * 128) + 2048
    for tensor in (1, 8):
        held = whole - (whole - dense) // tensor
        state = memory.per_gpu(Job(QWEN, H100, 64, 8, tensor=tensor)).state
        assert state == 6 * (experts + held) + 12 * (-(-held * tensor // 64) + experts // 8)
        assert Job(QWEN, H100, 64, 8, tensor=tensor).rank_params[0] == pytest.approx(held, rel=0.03)
    deepseek = Job(models.get("deepseek_v3"), H100, 64, 8)
    assert deepseek.rank_params[1] > replace(deepseek, mtp_layers=0).rank_params[1]


@pytest.mark.parametrize("model", models.MODELS.values(), ids=models.MODELS)
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_gradients_are_of_the_parameters_that_memory_counts(model, tensor):
    """The step model's are of an average stage and of the published total, which is rounded."""
    job = Job(model, H100, 256, 8, 2, tensor=tensor)
    dense, experts = map(sum, zip(*memory.parameters(job), strict=True))
    assert 2 * job.rank_params[0] == pytest.approx(dense, rel=0.06)
    assert 2 * job.rank_params[1] == pytest.approx(experts, rel=1e-9)


@pytest.mark.parametrize("layout", [{"ep": 8}, {"ep": 4, "tensor": 8}, {"ep": 2, "pp": 4, "tensor": 2}, {"ep": 1}])
def test_the_fewest_gpus_hold_it_and_fewer_do_not(layout):
    job = Job(QWEN, H100, 512, **layout)
    if (found := memory.fewest_gpus(job)) is None:
        assert not memory.fits(replace(job, gpus=2**40))
        return
    smaller = [n for n in range(1, found) if n % (job.ep * job.pp) == n % (job.tensor * job.pp) == 0]
    assert memory.fits(replace(job, gpus=found))
    assert not any(memory.fits(replace(job, gpus=n)) for n in smaller)


def test_no_job_has_gemms_that_its_gpus_lack():
    with pytest.raises(ValueError, match=r"dtype='mxfp8': H100 SXM5 has no mxfp8 tensor cores; use fp8 or bf16"):
        Job(QWEN, H100, 64, 8, dtype="mxfp8")
    assert not {c.name for c in clusters.CLUSTERS.values() if c.gpu.has_mxfp8} & {"h100_8x400g", "h200_8x400g"}


def test_traces_load(tmp_path):
    got = model.predict("dispatch", Shape(16, 8, 512, 1024, 4, 32), H100, num_sms=4)
    path = tmp_path / "trace.json"
    written = trace.write(path, trace.of_timeline(got.timeline, "dispatch"))
    document = json.loads(path.read_text())
    trace.check(document)
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == written == len(got.timeline.spans)
    nic = [t for t in got.timeline.spans if t.server[0] == "nic"]
    assert sum(e["dur"] for e in spans if "rail" in e["name"] and e["args"]["role"] == "put") == pytest.approx(
        sum(t.work for t in nic), rel=0.01
    )


@pytest.mark.parametrize(
    "break_it, word",
    [
        (lambda d: d["traceEvents"].clear(), "no span"),
        (lambda d: d["traceEvents"][-1].pop("dur"), "lacks dur"),
        (lambda d: d["traceEvents"][-1].update(tid=99), "has no name"),
        (lambda d: d["traceEvents"][-1].update(ts=0.5), "overlap"),
    ],
)
def test_a_broken_trace_is_noticed(break_it, word):
    spans = [trace.TrackSpan("p", "t", "a", float(i), 1.0, {}) for i in range(3)]
    document = trace.to_json(spans)
    trace.check(document)
    break_it(document)
    with pytest.raises(ValueError, match=word):
        trace.check(document)


# What the model may be off, as docs/performance_model.md says it; combine over rails is where it flatters most.
@needs_events
@pytest.mark.parametrize(
    "ranks, local, num_sms, permute_sms, within",
    [
        (8, 8, 8, None, {"dispatch": 0.2, "combine": 0.2}),
        (8, 8, 8, 32, {"dispatch": 0.15, "combine": 0.2}),
        (8, 8, 24, None, {"dispatch": 0.15, "combine": 0.15}),
        (8, 8, 24, 0, {"dispatch": 0.3, "combine": 0.2}),
        (8, 4, 8, None, {"dispatch": 0.2, "combine": 0.3}),
        # with a group of partial rows that two sources share formed last, this combine takes half as long again
        (16, 8, 8, None, {"dispatch": 0.3, "combine": 0.25}),
    ],
)
def test_event_engine_and_model_agree(ranks, local, num_sms, permute_sms, within):
    shape = Shape(ranks, local, 1024, 7168, 8, 64)
    got = events.measure(shape, H100, num_sms=num_sms, permute_sms=permute_sms)
    assert got.exact
    skew = H100.gpu.skew_us.value if shape.nodes > 1 else 0.0
    for op, most in within.items():
        predicted = model.predict(op, shape, H100, num_sms=num_sms, permute_sms=permute_sms).kernel_us - skew
        assert predicted == pytest.approx(got.kernel_us[op], rel=most), op


@needs_events
def test_the_event_engine_charges_routing():
    shape = Shape(4, 4, 256, 512, 4, 16)
    costs = event_costs(H100, 1024, shape)
    assert costs["route_token_ps"] == round(route_time.own_us(shape, H100) / 256 * 1e6) > 0
    assert event_costs(H100, 1024)["route_token_ps"] == 0
    got = events.measure(shape, H100, num_sms=4)
    assert route_time.own_us(shape, H100) < got.kernel_us["exchange"] < 3 * route_time.exchange_us(shape, H100)


@needs_events
def test_the_event_engine_takes_the_blocks_and_the_landing_that_it_is_told():
    shape = Shape(8, 8, 512, 4096, 8, 64)

    def dispatch(**options):
        return events.measure(shape, H100, num_sms=8, **options).kernel_us["dispatch"]

    assert dispatch() == dispatch(permute_sms=12, landed=True) < dispatch(permute_sms=0)
    assert dispatch() < dispatch(landed=False)
    with pytest.raises(ValueError, match="permute_sms=125"):
        dispatch(permute_sms=125)


@needs_events
def test_a_combine_that_reads_single_rows_in_place_moves_the_same_bytes_in_less_time():
    shape = Shape(8, 8, 512, 4096, 8, 256)  # of 5.3 rows that a token has in the node 3.2 are alone on their rank
    formed, in_place = (events.measure(shape, H100, num_sms=8, in_place=there) for there in (False, True))
    assert in_place.kernel_us["combine"] < 0.98 * formed.kernel_us["combine"]
    assert in_place.kernel_us["dispatch"] == formed.kernel_us["dispatch"]
    links = [name for name in formed.link_bytes if name.startswith("nvlink")]
    assert links
    for link in links:
        assert in_place.link_bytes[link] == pytest.approx(formed.link_bytes[link], rel=0.02)


@needs_events
def test_rows_land_and_are_read_in_place_over_nics_as_well():
    """An arena lies beside NVSHMEM's heap; what lands, and what is read there, is not copied."""
    shape = Shape(8, 4, 256, 4096, 4, 32)
    assert events.spec_of(shape, H100, num_sms=4)["reading"] == 0
    assert events.spec_of(shape, H100, num_sms=4, in_place=True)["reading"] == 1
    aside = events.measure(shape, H100, num_sms=4, landed=False)
    there = events.measure(shape, H100, num_sms=4, in_place=True)
    for op in model.OPS:
        assert there.kernel_us[op] < aside.kernel_us[op]


@needs_events
def test_event_engine_moves_the_bytes_of_the_closed_form():
    shape = Shape(8, 4, 256, 2048, 4, 32)
    choices = np.random.default_rng(1).random((8, 256, 32)).argpartition(4)[..., :4]
    got = events.measure(shape, H100, num_sms=4, choices=choices)
    # what the busiest rank sends in a dispatch and gets in the combine, or the other way round
    rows = routing.count(choices, shape)
    there, back = (HYBRID_EP.link_row_bytes(shape, "bf16", op) for op in model.OPS)
    most = max(rows.rail_out, rows.rail_in) * (there + back)
    counts_and_flags = 0.02 * most
    assert 0.9 * most <= got.link_bytes["nic_egress"] <= most + counts_and_flags


@needs_events
def test_fewer_drawn_tokens_than_a_line_needs_are_refused():
    shape = Shape(4, 4, 4096, 1024, 2, 8)
    few = routing.popularity(shape.with_(tokens=32), np.ones(8))
    with pytest.raises(ValueError, match="32 tokens a rank"):
        events.measure(shape, H100, num_sms=8, choices=few, row_budget=1000)


@needs_events
def test_sampled_events_continue_in_a_straight_line():
    shape = Shape(4, 4, 2048, 1024, 4, 16)
    full = events.measure(shape, H100, num_sms=4)
    sampled = events.measure(shape, H100, num_sms=4, row_budget=events.rows(shape) // 3)
    assert full.exact and not sampled.exact and sampled.simulated_tokens < 800
    for op in model.OPS:
        assert sampled.time_us[op] == pytest.approx(full.time_us[op], rel=0.04)


@needs_events
def test_event_timeline_has_every_rank_and_loads(tmp_path):
    got = events.timeline(Shape(4, 2, 64, 1024, 4, 16), H100, num_sms=2)
    trace.write(tmp_path / "t.json", got.spans)
    assert {s.process for s in got.spans} == {f"rank {r}" for r in range(4)}
    assert any(s.track.startswith("nic_egress") for s in got.spans) and any("s2g" in s.track for s in got.spans)


def test_flow_is_deterministic():
    def line():
        return model.predict("combine", Shape(16, 8, 256, 512, 4, 32), H100, num_sms=3).timeline

    assert line().spans == line().spans and isinstance(line(), flow.Timeline)


@pytest.mark.parametrize(("virtual_pp", "overlap", "in_flight"), [(1, 0.0, 4), (1, 0.9, 5), (2, 0.0, 11), (2, 0.9, 12)])
def test_activations_are_those_of_the_micro_batches_in_flight(virtual_pp, overlap, in_flight):
    """Of the first of four stages: 1F1B keeps one micro-batch a stage behind it, interleaved 2 x 3 + 4 + 1 chunks; an
    overlapped exchange one more. All are in flight at once where a step has fewer."""
    mixtral = models.get("mixtral_8x7b")
    job = Job(mixtral, H100, 64, 8, 4, virtual_pp, micro_batches=32, overlap=overlap)
    chunk = 32 // 4 // virtual_pp * 4096 * memory.bytes_per_token(mixtral.architecture)
    assert memory.activations(job, 0) == in_flight * chunk
    assert memory.activations(replace(job, micro_batches=1), 0) == virtual_pp * chunk
    again = replace(job, recompute="full")
    kept, working = 2 * 4096, memory.bytes_per_token(mixtral.architecture)
    layers = 32 // 4 // virtual_pp
    assert memory.activations(again, 0) == 4096 * (in_flight * layers * kept + working - kept)
    logits = 4096 * 32000 * (2 + 4)
    last = memory.activations(job, 3) - logits
    assert last % chunk == 0 and last < in_flight * chunk
