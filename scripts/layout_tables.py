"""Writes docs/results/recipe-layouts.md: layouts that the GPU recipes ship beside the fastest that fit, by the model,
and beside Megatron's alltoall. Deterministic, some minutes.

python scripts/layout_tables.py [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep.perf import training
from hybrid_ep.perf.efficiency import FITTED
from recipes import CLUSTER_RECIPES, cluster_summary, layouts, memory

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "recipe-layouts.md"
CLUSTERS = ("h100_8x400g", "h800_8x400g", "h200_8x400g", "b200_8x400g", "b300_8x800g", "gb200_nvl72", "gb300_nvl72")


def row(name: str, cluster: str) -> str:
    """One recipe on one cluster."""
    run = CLUSTER_RECIPES[name](cluster)
    own, best = layouts.own(run), layouts.ranked(run)[0]
    alike = min(layout.seconds for layout in layouts.ranked(run, sequences=()))
    flat = next(c.seconds for c in cluster_summary.candidates(run, cluster_summary.job_of(run)) if c.name == "alltoall")
    room = memory.budget_bytes(run) / 1e9
    cells = [name, f"{run.num_gpus} {run.hardware.gpu.split()[0]}", run.precision]
    cells += [str(own), run.num_sms, f"{own.need_bytes / 1e9:.0f} of {room:.0f}", f"{own.seconds:.2f}", f"{flat:.2f}"]
    cells += [
        str(best),
        f"{best.need_bytes / 1e9:.0f}",
        f"{best.seconds:.2f}",
        f"{own.seconds / best.seconds - 1:+.0%}",
        f"{own.seconds / alike - 1:+.0%}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def text() -> str:
    """The whole page."""
    both = FITTED.layer_us_x86 / 1e3
    halves = sorted(training.of_half(half).layer_us_x86 / 1e3 for half in training.HALVES)
    lines = [
        "# Layouts of the GPU recipes",
        "",
        "Made by `make tables`. Step times are the [performance model's](../performance_model.md); nothing was",
        "measured. The fastest is searched among tensor 1 to 8, pipeline 1 to 16 with 1 to 8 virtual stages, every",
        "expert size that lies in an NVLink domain or fills several, 1 to 8 sequences a micro-batch (MBS), and the",
        "least recompute that fits, with the recipe's hosts, global batch and precision",
        "(`hybrid-ep launch RECIPE --cluster NAME --layouts`). A lead of a few per",
        "cent is none: the model misses published steps by a tenth in the median ([table](training-residuals.md)).",
        "",
        "| recipe | GPUs | precision | ships | SMs | GB | step s | alltoall s "
        "| the fastest that fits | GB | step s | ships, to it | to the fastest of its MBS |",
        "|---|---|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|",
        *(row(name, cluster) for name in CLUSTER_RECIPES for cluster in CLUSTERS),
        "",
        "Larger micro-batches pay for launches once, which on x86 hosts the model has as "
        f"{both:.1f} ms of a layer, and as",
        f"{halves[0]:.1f} or {halves[-1]:.1f} fitted to either half of the published steps; the leads of layouts with",
        "another MBS there rest on that number, and no published run has these layouts.",
        "",
        "What ships is not always the first: layouts are preferred that published runs have (EP 32 and PP 8 for",
        "DeepSeek-V3 on B200, EP 64 and PP 4 on GB200, EP 8 and PP 8 for Qwen3-235B on Blackwell), that keep a few GB",
        "free, and that spread experts. EP 1, where every GPU has all experts, exchanges nothing: where a model is",
        "small enough for it, no dispatcher can beat that.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    args.out.write_text(text())
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
