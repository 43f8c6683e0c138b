"""Errors that name the flags which were typed, and values that would do."""

from __future__ import annotations

import pytest

from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.perf import remedies

FLAGS = {"topk": "--topk ", "num_sms": "--num-sms ", "routing": "--routing ", "expert": "--set expert=", "ep": "--ep "}


@pytest.mark.parametrize(
    "text, said",
    [
        ("topk=300 must be at most experts=256", "--topk 300 must be at most experts=256"),
        ("routing='hot': use uniform", "--routing hot: use uniform"),
        ("routing='a b': use uniform", "--routing 'a b': use uniform"),
        ("routing='': use uniform", "--routing '': use uniform"),
        ("ep=3 must divide; give ep=2 or ep=4", "--ep 3 must divide; give --ep 2 or --ep 4"),
        ("expert=7: must divide", "--set expert=7: must divide"),
        ("needs --set expert=8 and --set 'expert=8'", "needs --set expert=8 and --set 'expert=8'"),
        ("--sbatch ep=3: is set", "--sbatch ep=3: is set"),
        ("step=3, model.topk=2 and my-ep=1", "step=3, model.topk=2 and my-ep=1"),
        ("num_sms=-1, the SMs (num_sms=2)", "--num-sms -1, the SMs (--num-sms 2)"),
    ],
)
def test_arguments_are_said_as_flags(text, said):
    assert in_flags(text, FLAGS) == said


def test_the_values_that_fit_are_the_nearest():
    assert remedies.divisor("ep", 48, 256) == "give ep=32 or ep=64"
    assert remedies.divisor("ep", 512, 256) == "give ep=256"
    assert remedies.multiple("gpus", 12, 8) == "give gpus=8 or gpus=16"
    assert remedies.multiple("gpus", 3, 8) == "give gpus=8"
