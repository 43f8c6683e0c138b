"""`recipes.pretrain` with balancing and Megatron's forced bias: the same losses, ranks levelled, checkpoints that load
with balancing on or off and on other ranks; and the flags."""

import argparse
import math
from importlib.metadata import version

import pytest
from test_pretrain_run import LIMIT_S, launch, metrics, needs_core, pytestmark  # noqa: F401

SKEWED = "tiny_cpu_smoke --forced-bias -1.0 --steps 4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of the runs: off, exact, slow; slow continued on two ranks with both, its single experts stacked; exact
    over stacked experts for 2 steps continued without balancing, and off for 2 steps continued (Megatron draws the
    forced bias anew when a run resumes)."""
    if version("megatron-core").startswith("0.16."):
        pytest.skip("megatron-core 0.16 cannot skew its router")
    folder = tmp_path_factory.mktemp("runs")
    job = launch(
        folder,
        f"off:{SKEWED} --name off",
        f"exact:{SKEWED} --balance exact --name exact",
        f"slow:{SKEWED} --balance slow --balance-interval 1 --name slow",
        "fewer:--resume slow --steps 5 --ranks 2 --balance both --grouped-gemm",
        f"first:{SKEWED} --balance exact --spare-slots 2 --grouped-gemm --name mixed --stop-after 2",
        "second:--resume mixed --balance off",
        f"third:{SKEWED} --name halves --stop-after 2",
        "fourth:--resume halves",
    )
    try:
        text, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0 and "EXIT exact 0" in text and "EXIT fewer 0" in text and "EXIT second 0" in text, text
    return folder


@needs_core
def test_losses_are_those_of_off(runs):
    for name, other in (("exact", "off"), ("slow", "off"), ("mixed", "halves")):
        for mine, reference in zip(metrics(runs / name)[:5], metrics(runs / other), strict=True):
            for key in {"train_loss", "grad_norm", "held_out_loss"} & set(reference):
                assert math.isclose(mine[key], reference[key], rel_tol=2e-5), (name, key, mine[key], reference[key])
    # Router statistics are logical, whoever computes; from the second step on fp32 may flip a near tie.
    loads = [next(line["expert_load"] for line in metrics(runs / n) if "expert_load" in line) for n in ("off", "exact")]
    assert loads[0] == loads[1]


@needs_core
def test_ranks_are_levelled(runs):
    steps = [line for line in metrics(runs / "exact") if "train_loss" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["rank_imbalance"] > 0.3 and line["clones"] >= 1
        assert line["balanced_imbalance_max"] <= 0.05, line["balanced_imbalance_max"]
    *slow, fewer = [line for line in metrics(runs / "slow") if "train_loss" in line]
    assert slow[0]["moved_experts"] >= 2 and slow[0]["balanced_imbalance"] == slow[0]["rank_imbalance"]
    for line in slow[2:]:  # each of two layers has moved after the first two steps
        assert line["balanced_imbalance"] < 0.5 * line["rank_imbalance"], line["balanced_imbalance"]
    assert fewer["step"] == 5 and fewer["train_loss"] < slow[0]["train_loss"] and fewer["clones"] >= 1
    assert all("clones" not in line for line in metrics(runs / "off"))


def parse(*argv):
    from megatron_patches import flags

    parser = flags.add_arguments(argparse.ArgumentParser())
    parser.set_defaults(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    parser.add_argument("--overlap-param-gather", action="store_true")
    parser.add_argument("--async-save", action="store_true")
    return flags.settings_from_args(parser.parse_args(argv))


def test_flags_reach_the_settings():
    assert parse("--hybrid-ep").balance.mode == "off"
    wanted = parse(
        "--hybrid-ep",
        "--hybrid-ep-balance",
        "exact",
        "--hybrid-ep-spare-slots",
        "2",
        "--hybrid-ep-balance-epsilon",
        "0.05",
    ).balance
    assert (wanted.mode, wanted.spare_slots, wanted.epsilon) == ("exact", 2, 0.05)
    wanted = parse(
        "--hybrid-ep",
        "--hybrid-ep-balance",
        "slow",
        "--hybrid-ep-balance-interval",
        "7",
        "--hybrid-ep-layer-updates-per-iter",
        "3",
        "--hybrid-ep-balance-move-cost",
        "1e4",
    ).balance
    assert (wanted.interval, wanted.layer_updates_per_iter, wanted.move_cost) == (7, 3, 1e4)
    assert wanted.migrates and not wanted.clones
    assert parse("--hybrid-ep", "--hybrid-ep-balance", "both", "--hybrid-ep-spare-slots", "3").balance.spare_slots == 3


@pytest.mark.parametrize(
    "argv, flag",
    [
        (["--hybrid-ep-balance", "exact"], "--hybrid-ep-balance"),
        (["--hybrid-ep", "--hybrid-ep-spare-slots", "1"], "--hybrid-ep-spare-slots"),
        (
            ["--hybrid-ep", "--hybrid-ep-balance", "off", "--hybrid-ep-balance-epsilon", "0"],
            "--hybrid-ep-balance-epsilon",
        ),
        (["--hybrid-ep", "--hybrid-ep-balance", "exact", "--overlap-param-gather"], "--overlap-param-gather"),
        (["--hybrid-ep", "--hybrid-ep-balance", "exact", "--hybrid-ep-spare-slots", "0"], "spare_slots"),
        (["--hybrid-ep", "--hybrid-ep-balance", "slow", "--hybrid-ep-spare-slots", "1"], "--hybrid-ep-spare-slots"),
        (["--hybrid-ep", "--hybrid-ep-balance", "exact", "--hybrid-ep-balance-interval", "9"], "balance-interval"),
        (["--hybrid-ep", "--hybrid-ep-balance", "both", "--hybrid-ep-layer-updates-per-iter", "0"], "layer_updates"),
        (["--hybrid-ep", "--hybrid-ep-balance", "slow", "--overlap-param-gather"], "--overlap-param-gather"),
        (["--hybrid-ep", "--hybrid-ep-balance", "slow", "--async-save"], "--async-save"),
    ],
)
def test_flags_that_make_no_sense_are_named(argv, flag):
    with pytest.raises(ValueError, match=flag):
        parse(*argv)
