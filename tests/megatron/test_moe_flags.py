"""Flags of what happens around the exchange: their settings, their refusals, and the table of all flags."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from megatron_patches import flags, settings
from megatron_patches.layer_settings import GEMM_BACKENDS, GEMM_PRECISIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron.md"
FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep", "--hybrid-ep"]
NO_TE = importlib.util.find_spec("transformer_engine") is None


def parser():
    made = flags.add_arguments(argparse.ArgumentParser())
    made.add_argument("--moe-token-dispatcher-type")
    made.add_argument("--moe-flex-dispatcher-backend")
    return made


def parsed(*argv):
    return flags.settings_from_args(parser().parse_args([*FLEX, *argv]))


@pytest.mark.version_free
def test_the_table_in_the_docs_has_every_flag_and_no_other():
    ours = {name for action in parser()._actions for name in action.option_strings if name.startswith("--hybrid-ep")}
    rows = re.search(r"^## Flags\n(.*?)^## ", PAGE.read_text(), re.S | re.M)[1].splitlines()
    listed = re.findall(r"`(--hybrid-ep[a-z-]*)", "\n".join(row.split("|")[1] for row in rows if row.startswith("|")))
    assert sorted(listed) == sorted(ours)


@pytest.mark.version_free
def test_the_backend_of_the_grouped_gemm_is_a_setting():
    assert parsed("--hybrid-ep-grouped-gemm").experts.backend == "auto"
    assert parsed("--hybrid-ep-grouped-gemm", "--hybrid-ep-grouped-gemm-backend", "loop").experts.backend == "loop"
    from hybrid_ep.moe.backends import BACKENDS

    assert GEMM_BACKENDS[0] == "auto" and set(GEMM_BACKENDS[1:]) == set(BACKENDS)


@pytest.mark.version_free
def test_the_precision_of_the_grouped_gemm_is_a_setting():
    assert parsed("--hybrid-ep-grouped-gemm").experts.precision is None
    for precision in GEMM_PRECISIONS:
        given = parsed("--hybrid-ep-grouped-gemm", "--hybrid-ep-grouped-gemm-precision", precision)
        assert given.experts.precision == precision
    from hybrid_ep.moe.precisions import PRECISIONS

    assert tuple(PRECISIONS) == GEMM_PRECISIONS
    made = {name: settings.Settings.of(grouped_gemm=True, grouped_gemm_precision="fp8", grouped_gemm_backend=name)
            for name in ("auto", "loop")}  # fmt: skip
    assert all(one.experts.precision == "fp8" for one in made.values()) and set(PRECISIONS["fp8"]) == {"triton", "loop"}


@pytest.mark.version_free
@pytest.mark.parametrize(
    "argv, said",
    [
        pytest.param(
            ["--hybrid-ep-grouped-gemm", "--hybrid-ep-grouped-gemm-backend", "te"],
            r"\(--hybrid-ep-grouped-gemm-backend\) is 'te', but Transformer Engine is not installed.*choose auto",
            marks=pytest.mark.skipif(not NO_TE, reason="Transformer Engine is installed"),
        ),
        (["--hybrid-ep-grouped-gemm-backend", "loop"], "without --hybrid-ep-grouped-gemm does nothing: add it"),
        (["--hybrid-ep-grouped-gemm-precision", "fp8"], "-precision without --hybrid-ep-grouped-gemm does nothing"),
        (["--hybrid-ep-router-max-load-ratio", "2"], "without --hybrid-ep-router-guard warn or stop"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_by_name(argv, said):
    with pytest.raises(ValueError, match=said):
        parsed(*argv)


@pytest.mark.version_free
@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            {"grouped_gemm": True, "grouped_gemm_backend": "cutlass"},
            "is 'cutlass': choose one of auto, torch, triton, te, loop",
        ),
        (
            {"grouped_gemm": True, "grouped_gemm_precision": "mxfp8"},
            r"\(--hybrid-ep-grouped-gemm-precision\) is 'mxfp8': choose one of params, fp8",
        ),
        (
            {"grouped_gemm": True, "grouped_gemm_precision": "fp8", "grouped_gemm_backend": "torch"},
            r"backend\) is 'torch', which multiplies in the dtype of the parameters: choose auto, triton or loop",
        ),
        (
            {"grouped_gemm_precision": "params"},
            r"without grouped_gemm \(--hybrid-ep-grouped-gemm\) and does nothing: add it",
        ),
        (
            {"grouped_gemm_backend": "loop"},
            r"without grouped_gemm \(--hybrid-ep-grouped-gemm\) and does nothing: add it",
        ),
    ],
)
def test_the_same_from_python(wrong, said):
    with pytest.raises(ValueError, match=said):
        settings.Settings.of(**wrong)
