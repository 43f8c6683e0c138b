"""`recipes.pretrain` with exact balancing and Megatron's forced bias: the same losses, ranks levelled, checkpoints
that load with balancing on or off; and the flags."""

import argparse
import math
from importlib.metadata import version

import pytest
from test_pretrain_run import LIMIT_S, launch, metrics, needs_core, pytestmark  # noqa: F401

SKEWED = "tiny_cpu_smoke --forced-bias -1.0 --steps 4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of the runs: off, exact; exact for 2 steps continued without balancing, and off for 2 steps continued
    (Megatron draws the forced bias anew when a run resumes)."""
    if version("megatron-core").startswith("0.16."):
        pytest.skip("megatron-core 0.16 cannot skew its router")
    folder = tmp_path_factory.mktemp("runs")
    job = launch(
        folder,
        f"off:{SKEWED} --name off",
        f"exact:{SKEWED} --balance exact --name exact",
        f"first:{SKEWED} --balance exact --spare-slots 2 --name mixed --stop-after 2",
        "second:--resume mixed --balance off",
        f"third:{SKEWED} --name halves --stop-after 2",
        "fourth:--resume halves",
    )
    try:
        text, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0 and "EXIT exact 3" in text and "EXIT second 3" in text, text
    return folder


@needs_core
def test_losses_are_those_of_off(runs):
    for name, other in (("exact", "off"), ("mixed", "halves")):
        for mine, reference in zip(metrics(runs / name), metrics(runs / other), strict=True):
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
    assert all("clones" not in line for line in metrics(runs / "off"))


def parse(*argv):
    from megatron_patches import flags

    parser = flags.add_arguments(argparse.ArgumentParser())
    parser.set_defaults(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    parser.add_argument("--overlap-param-gather", action="store_true")
    return flags.settings_from_args(parser.parse_args(argv))


def test_flags_reach_the_settings():
    assert parse("--hybrid-ep").balance == "off"
    wanted = parse("--hybrid-ep", "--hybrid-ep-balance", "exact", "--hybrid-ep-spare-slots", "2",
                   "--hybrid-ep-balance-epsilon", "0.05")
    assert (wanted.balance, wanted.spare_slots, wanted.balance_epsilon) == ("exact", 2, 0.05)


@pytest.mark.parametrize("argv, flag", [
    (["--hybrid-ep-balance", "exact"], "--hybrid-ep-balance"),
    (["--hybrid-ep", "--hybrid-ep-spare-slots", "1"], "--hybrid-ep-spare-slots"),
    (["--hybrid-ep", "--hybrid-ep-balance", "off", "--hybrid-ep-balance-epsilon", "0"], "--hybrid-ep-balance-epsilon"),
    (["--hybrid-ep", "--hybrid-ep-balance", "exact", "--overlap-param-gather"], "--overlap-param-gather"),
    (["--hybrid-ep", "--hybrid-ep-balance", "exact", "--hybrid-ep-spare-slots", "0"], "spare_slots"),
])
def test_flags_that_make_no_sense_are_named(argv, flag):
    with pytest.raises(ValueError, match=flag):
        parse(*argv)
