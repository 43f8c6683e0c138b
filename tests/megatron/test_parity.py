"""Training parity in the subset CI runs, and proof that parity can fail: every planted bug must be
noticed."""

import gc
import os
import sys

import parity
import parity_field_notes
import parity_field_table
import parity_world
import pytest
from parity_worker import SABOTAGE, VARIANTS, Case, run_cases


def train(cases):
    outcome = parity_world.run_world(run_cases, parity.NUM_RANKS, (cases,), timeout_s=280)[0]
    return parity.compare(cases, outcome["records"])


def imported(names):
    return [name in sys.modules for name in names]


@pytest.mark.version_free
def test_what_ranks_have_in_common_is_imported_before_they_are_forked():
    """Nothing of ours that is imported only where Megatron is patched: what is so before that is tested, too."""
    names = ("megatron.core.models.gpt.gpt_model", "hybrid_ep.buffer", "hybrid_ep.spares", "recipes.model")
    assert parity_world.run_world(imported, 1, (names,)) == [[True] * len(names)]
    assert parity_world.run_world(imported, 1, (["megatron_patches.buffers", "deep_ep"],)) == [[False, False]]


def test_collections_of_a_rank_do_not_look_at_what_was_imported_before():
    """Of which there are half a million objects, in each of hundreds of ranks."""
    assert parity_world.run_world(gc.get_freeze_count, 1)[0] > 100_000


def test_quick_parity_on_both_hooks():
    steps = 20 if "HYBRID_EP_TEST_MATRIX" in os.environ else 8
    options = parity.arguments(["--quick", "--hook", "both", "--steps", str(steps)])
    cases, _ = parity.plan(options, parity.megatron_minor())
    assert {case.ep for case in cases} == {1, 4} and {"token_dispatcher", "deep_ep"} <= {
        case.dispatcher for case in cases
    }
    for case, record, loss, norm, ok in train(cases):
        assert len(record["loss"]) == steps and record["loss"][0] != record["loss"][-1]
        assert ok, f"{case}: loss {loss:.1e}, gradient norm {norm:.1e}"


@pytest.mark.version_free
def test_parity_with_weights_that_travel():
    options = parity.arguments(
        ["--move", "weights", "--ep", "4", "--steps", "6", "--variant", "plain", "recompute", "bf16"]
    )
    cases, _ = parity.plan(options, parity.megatron_minor())
    assert [case.move for case in cases].count("weights") == 3
    for case, _, loss, norm, ok in train(cases):
        assert ok, f"{case}: loss {loss:.1e}, gradient norm {norm:.1e}"


@pytest.mark.version_free
def test_every_planted_bug_is_noticed():
    cases = [Case("plain", "alltoall", 4, 4), Case("plain", "token_dispatcher", 4, 4)]
    cases += [Case("plain", "token_dispatcher", 4, 4, sabotage=kind) for kind in SABOTAGE]
    rows = train(cases)
    assert [ok for *_, ok in rows[:2]] == [True, True]
    for case, _, loss, norm, ok in rows[2:]:
        assert not ok, f"{case.sabotage} passed: loss {loss:.1e}, gradient norm {norm:.1e}"


@pytest.mark.version_free
def test_a_run_that_diverges_is_not_equal():
    good, bad = {"loss": [1.0], "grad_norm": [1.0]}, {"loss": [float("nan")], "grad_norm": [1.0]}
    cases = [Case("plain", "alltoall", 1, 1), Case("plain", "token_dispatcher", 1, 1)]
    assert [row[-1] for row in parity.compare(cases, [good, bad])] == [True, False]
    assert [row[-1] for row in parity.compare(cases, [good, good])] == [True, True]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_plan_has_a_baseline_first_and_no_overlap_in_it(name):
    cases, _ = parity.plan(parity.arguments(["--variant", name]), 19)
    assert cases[0].dispatcher == "alltoall" and not cases[0].overlap
    assert {case.ep for case in cases} == {1, 2, 4} and any(case.dispatcher == "token_dispatcher" for case in cases)


@pytest.mark.version_free
def test_a_failing_rank_fails_the_world():
    with pytest.raises(parity_world.WorldError, match="rank 1"):
        parity_world.run_world(parity.differences, 2, ({"loss": []}, {}), timeout_s=60)


def test_field_notes_notice_a_fault_and_nothing_else():
    """One honest row and each fault, where it shows; the whole table is scripts/parity.py --field-notes."""
    variant = "notes_opening_fp32"
    cases = [Case(variant, "alltoall", 4, 6), Case(variant, "token_dispatcher", 4, 6, grouped=True)]
    faults = [fault for fault in parity_field_notes.BREAKS if fault != "rounding"]
    cases += [Case(variant, "token_dispatcher", 4, 6, grouped=True, broken=fault) for fault in faults]
    cases += [
        Case("notes_forced_bf16", "alltoall", 4, 6),
        Case("notes_forced_bf16", "token_dispatcher", 4, 6, grouped=True),
    ]
    cases += [Case("notes_forced_bf16", "token_dispatcher", 4, 6, grouped=True, broken="rounding")]
    outcome = parity_world.run_world(run_cases, parity.NUM_RANKS, (cases,), timeout_s=280)[0]
    assert outcome["records"][1]["empty"][0] >= 6, "experts must start empty"
    for case, _, found, ok in parity_field_table.compared(cases, outcome["records"]):
        assert ok != bool(case.broken), (case.variant, case.broken, found)
