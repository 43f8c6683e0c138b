"""Predicted steps with and without balancing: drawn tokens reach what the plan says, ports and steps add up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import balance_pushes
import experiment_balance_steps as steps

from hybrid_ep import _core
from hybrid_ep.balance import MicrobatchOptions, MicrobatchPlan, MicrobatchPlanner
from hybrid_ep.balance.owners import Owners
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, models, routing, step_time
from hybrid_ep.perf.step_time import Job, Layer

SMALL = Job(models.get("deepseek_v3"), clusters.get("h100_8x400g"), gpus=16, ep=16, tokens=256, micro_batches=4)


def drawn(exponent=1.2, seed=3):
    weights = np.arange(1, 257, dtype=np.float64) ** -exponent
    return routing.popularity(SMALL.shape, weights, seed, shuffle=True)


@pytest.mark.parametrize("spare", [1, 2])
def test_every_slot_gets_the_tokens_of_its_plan(spare):
    choices, owners = drawn(), Owners(256, 16)
    owners.assign(np.random.default_rng(0).permutation(256))
    counts = np.stack([np.bincount(mine.ravel(), minlength=256) for mine in choices])
    plan = MicrobatchPlanner(16, 256, owners.rank_of, spare_slots=spare, num_nodes=2).plan(counts)
    columns = owners.host_columns(spare)
    got = np.stack([steps._redirected(plan, rank, choices[rank], columns) for rank in range(16)])
    tokens = np.bincount(got.ravel(), minlength=16 * (16 + spare)).reshape(16, -1)
    assert plan.num_copies > 0 and (tokens.sum(axis=1) == plan.tokens_of_ranks()).all()
    assert (tokens[:, 16:] == plan.slot_tokens).all()
    assert (np.sort(columns[choices], axis=-1) != np.sort(got, axis=-1)).any()
    owned = got % (16 + spare) < 16
    assert (got[owned] == columns[choices][owned]).all()


@pytest.mark.parametrize("mode", steps.MODES)
def test_modes_agree_with_their_columns(mode):
    share = np.arange(1, 257, dtype=np.float64) ** -1.2
    got = steps.balanced(mode, drawn(), share, share, SMALL, 1)
    by_rank = np.bincount(got.columns.ravel() // (got.slots // 16), minlength=16)
    assert by_rank.sum() == 16 * 256 * 8 and by_rank.max() / by_rank.mean() - 1 == pytest.approx(got.imbalance)
    assert (got.clones > 0) == (mode not in ("off", "slow"))
    assert got.pushes.all_us > 0 or not got.clones
    assert 0 <= balance_pushes.shown_us(got.pushes, SMALL) <= got.pushes.all_us
    if mode in ("exact", "exact near", "both"):
        assert got.imbalance <= 0.0101


@pytest.mark.parametrize("pushed_us, shown_us", [(0.0, 0.0), (300.0, 100.0)])
def test_a_row_timed_again_has_the_steps_of_its_exchange(pushed_us, shown_us, monkeypatch):
    monkeypatch.setitem(steps.ENGINES, "model", (16, 256))
    row = {"cluster": "gb200_nvl72", "engine": "model", "imbalance": 0.2, "dispatch_us": 50.0, "combine_us": 70.0}
    row |= {"pushed_us": pushed_us, "shown_us": shown_us}
    row |= dict.fromkeys(("step_s", "step_in_full_view_s", "step_without_pushes_s"), 0.0)
    got = steps.again(row)
    job = replace(steps.job_of("gb200_nvl72", 16, 256), imbalance=0.2)
    assert got["step_s"] == step_time.step(job, Layer(120.0, shown_us)).seconds
    assert got["step_in_full_view_s"] == step_time.step(job, Layer(120.0, pushed_us)).seconds
    assert got["step_without_pushes_s"] == step_time.step(job, Layer(120.0)).seconds
    assert got.keys() == row.keys() and got["dispatch_us"] == 50.0


def test_pushes_are_charged_to_the_busiest_port():
    nic, nvlink = SMALL.cluster.nic.rate * 1e3, SMALL.cluster.gpu.nvlink_rate * 1e3
    assert balance_pushes.port_us([], SMALL) == 0
    assert balance_pushes.port_us([(0, 1, 1e6)], SMALL) == pytest.approx(1e6 / nvlink)
    assert balance_pushes.port_us([(0, 8, 1e6), (0, 9, 1e6), (1, 8, 1e6)], SMALL) == pytest.approx(2e6 / nic)
    assert balance_pushes.port_us([(0, 8, 1e6), (1, 8, 2e6), (2, 8, 1e6)], SMALL) == pytest.approx(4e6 / nic)


def test_what_experts_compute_meanwhile_hides_pushes():
    job = replace(SMALL, tokens=4096)
    token = efficiency.per_token(job.model, job.cluster, "bf16", job.sequence)
    ninth, others = 4096 * token.expert_gemms / 9, 4096 * token.moe_others
    beside = [8 / 132, 8 / 132, 64 / 132]  # SMs of 132 that products lack meanwhile
    own, load = np.array([1.0, 0.25]), np.array([1.0, 1.0])  # rank 1: a quarter its own rows, the rest a clone's
    hidden = [2 * ninth * 0.25, 2 / 3 * others + ninth * 1.25, ninth * (4 - 2 * 0.75)]

    def shown(there, back):
        return balance_pushes.shown_us(balance_pushes.Pushes(there, back, 7.0, own, load), job)

    less, more = min(hidden) / 2, 2 * max(hidden)
    assert shown(less, less) == pytest.approx(7 + less * sum(beside)), "all of it, for a price"
    left = sum(more - h + h * b for h, b in zip(hidden, beside, strict=True))
    assert shown(more, more) == pytest.approx(7 + left)
    cold = balance_pushes.Pushes(less, less, 0.0, np.array([1.0, 0.0]), load)
    assert balance_pushes.shown_us(cold, job) == pytest.approx(less * (1 + beside[1] + beside[2])), (
        "nothing of its own to compute"
    )
    assert balance_pushes.shown_us(balance_pushes.Pushes(moved_us=7.0), job) == 7.0


def hot(ranks, within=False):
    """Expert 0, of rank 0, cloned to all other ranks."""
    slots = np.zeros((ranks, 1), np.int32)
    slots[0] = -1
    options = MicrobatchOptions(num_nodes=1 if within else 2, within_node=within)
    counts = np.ones((ranks, ranks), np.int64)
    return MicrobatchPlan(slots, slots.astype(np.int64), counts, np.arange(ranks, dtype=np.int32), options)


def test_along_the_rails_a_node_gets_an_expert_once():
    scatter, rail, spread = balance_pushes.by_rails(hot(16), 8)
    assert sum(part for *_, part in scatter) == 7 / 8
    assert sorted(rail) == [(j, 8 + j, 1 / 8) for j in range(8)]
    got = np.zeros(16)
    for _, to, part in spread:
        got[to] += part
    assert (got[8:] == 7 / 8).all() and (got[1:8] == 7 / 8).all() and got[0] == 0  # an eighth lies there already


def test_from_clone_to_clone_each_port_carries_one_expert():
    scatter, spread = balance_pushes.by_holders(hot(8, within=True))
    sent, got = np.zeros(8), np.zeros(8)
    for source, to, part in [*scatter, *spread]:
        sent[source] += part
        got[to] += part
    assert sent == pytest.approx([1] + [6 / 7] * 7) and got == pytest.approx([0] + [1] * 7)


def test_kernels_serve_the_node_beside_the_rails():
    job, plan = SMALL, hot(16)
    at_home = balance_pushes.at_home(plan, 8)
    assert (at_home.slot_expert[:8] == plan.slot_expert[:8]).all() and (at_home.slot_expert[8:] == -1).all()
    size = 2.0 * job.model.expert_params
    steps = list(balance_pushes.by_holders(at_home))
    scatter, spread = (balance_pushes.port_us(balance_pushes.sized(m, 2 * size, True), job) for m in steps)
    far = balance_pushes.channels_us(plan, job, size, False)
    made = balance_pushes.pushes(plan, job, kernels=True)
    together = sum(steps, []) + balance_pushes.crossing_moves(plan, job)
    through_ports = balance_pushes.port_us(balance_pushes.sized(together, size, False), job)
    assert made.blocks == 12 and through_ports > (scatter + spread) / 2 > far, "NVLink carries both"
    assert made.there_us == pytest.approx(through_ports)
    nic = size / 8 / (job.cluster.nic.rate * 1e3)  # an eighth through each of them
    round_us = balance_pushes.chunk_round_us(job, 8, False)
    assert far == pytest.approx(round_us + nic), "64 places of a ring, and four lanes that post, do more than a NIC"
    home = balance_pushes.channels_us(plan, job, 2 * size, True)
    assert home > spread and made.back_us == pytest.approx(home + scatter), "an owner adds its node's clones last"
    back = balance_pushes.chunk_round_us(job, 8, True)
    assert home == pytest.approx(back + 2 * size / 8 / 32768 * back / 64), "eight copies' gradients do less than a NIC"
    assert balance_pushes.channels_us(hot(8, within=True), job, size, True) == 0.0


def test_an_owner_moves_no_more_than_its_warps_do(monkeypatch):
    job = steps.job_of("h100_8x400g", 64, 4096)
    plan = replace(hot(64), options=MicrobatchOptions(num_nodes=8))
    size = 2.0 * job.model.expert_params
    usual = balance_pushes.channels_us(plan, job, size, False)
    nic = 7 * size / 8 / (job.cluster.nic.rate * 1e3)
    assert usual == pytest.approx(balance_pushes.chunk_round_us(job, 8, False) + nic), "a node's NICs, all seven others"
    monkeypatch.setattr(balance_pushes, "OWNER_WARPS", 1)
    warp_us = balance_pushes.end_us(job, 8, False)[0]
    slow = balance_pushes.channels_us(plan, job, size, False)
    assert slow == pytest.approx(balance_pushes.chunk_round_us(job, 8, False) + 7 * size / 32768 * warp_us / 8)
    assert slow > usual


@pytest.mark.parametrize("nodes, width", [(2, 1), (2, 8), (3, 8), (4, 8), (8, 8), (32, 8), (4, 72)])
def test_rings_are_those_that_the_core_lays_out(nodes, width):
    spares = _core.SpareShape(spare_slots=1, num_owners=1, element_bytes=2, elements=[8])
    shape = _core.BufferShape(num_nodes=nodes, num_local_ranks=width, num_experts=nodes * width, spares=spares)
    rings = 4 * (nodes - 1) * width * balance_pushes.places(nodes, width) * balance_pushes.CHUNK
    assert {name: size for name, _, size in shape.regions()}["spare_channel_rings"] == rings


def test_a_given_layer_takes_the_place_of_the_exchange_model():
    job = replace(SMALL, imbalance=0.3)
    own = step_time.step(job)
    given = step_time.step(job, Layer(job.exchange_us * 1.3))
    assert given.seconds == pytest.approx(own.seconds, rel=1e-12)
    more = step_time.step(job, Layer(job.exchange_us * 1.3, 100.0))
    assert more.seconds - own.seconds == pytest.approx((58 + 1) * 4 * 100e-6)  # of one stage, without a bubble; MTP
    with pytest.raises(ValueError, match="recompute"):
        step_time.step(replace(job, recompute="full"), Layer(1.0))
    with pytest.raises(ValueError, match="beside_us"):
        Layer(1.0, -1.0)


def test_rows_of_the_queueing_model(capsys):
    assert steps.main(["--cluster", "gb200_nvl72", "--zipf", "1.0", "--layers", "1"]) == 0
    said = capsys.readouterr().out
    assert "| 1.0 | exact | 0.010 |" in said and "gb200_nvl72, EP64, model, 4,096" in said
