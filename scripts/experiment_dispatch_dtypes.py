"""What a quantised forward dispatch does to the loss: tiny_cpu's held-out loss for every dispatch dtype and seed.

    python scripts/experiment_dispatch_dtypes.py -o docs/results/dispatch-dtypes      (writes .json and .md)

Runs `recipes.pretrain` as users do, one run after another, always with the same expert parallelism: for each seed the
unquantised dispatch first (named bf16, "rows as they are"; in this recipe they are fp32), then fp8 and mxfp8. All runs
of a seed have the same weights, text and router noise, so a difference within a seed is the dtype's, and the spread of
the unquantised runs over seeds says how large a difference has to be to mean anything."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("bf16", "fp8", "mxfp8")


def train(args, seed: int, dtype: str, folder: Path) -> list[dict]:
    """The records of one run."""
    name = f"{dtype}-{seed}"
    command = [
        sys.executable,
        "-m",
        "recipes.pretrain",
        args.recipe,
        "--steps",
        str(args.steps),
        "--seed",
        str(seed),
        "--dispatch-dtype",
        dtype,
        "--name",
        name,
        "--runs-dir",
        str(folder),
    ]
    environment = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=args.timeout, check=False
    )
    if done.returncode not in (0, 3):  # 3: a run this short has not learned
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def facts_of(records: list[dict]) -> dict:
    held_out = [r["held_out_loss"] for r in records if r.get("held_out_loss") is not None]
    return {"held_out_loss": held_out[-1], "train_loss": [r["train_loss"] for r in records if "train_loss" in r]}


def table(document: dict) -> str:
    """The page; of runs that are not there, a dash."""
    runs, dtypes = document["runs"], document["dtypes"]
    base = {s: runs[f"bf16-{s}"]["held_out_loss"] for s in document["seeds"] if f"bf16-{s}" in runs}
    lines = [
        "# Loss under a quantised dispatch",
        "",
        f"`{document['command']}`, {document['date']}. Recipe `{document['recipe']}`, {document['steps']} steps, "
        f"{document['parallelism']}, on the host executor. Held-out loss after the last step, in nats a token; in "
        "brackets the difference to the unquantised dispatch of the same seed (`bf16` in the flag's words: rows "
        "as they are, here fp32).",
        "",
        "| dispatch dtype | " + " | ".join(f"seed {s}" for s in base) + " | mean difference |",
        "|---|" + "---|" * (len(base) + 1),
    ]
    largest = 0.0
    for dtype in dtypes:
        found = {s: runs[f"{dtype}-{s}"]["held_out_loss"] for s in base if f"{dtype}-{s}" in runs}
        off = {s: loss - base[s] for s, loss in found.items()}
        largest = max([largest, *map(abs, off.values())])
        cells = [
            "-" if s not in found else f"{found[s]:.4f}" + ("" if dtype == "bf16" else f" ({off[s]:+.4f})")
            for s in base
        ]
        mean = "-" if dtype == "bf16" or not off else f"{sum(off.values()) / len(off):+.4f}"
        lines.append(f"| {dtype} | " + " | ".join(cells) + f" | {mean} |")
    spread = max(base.values()) - min(base.values())
    said = (
        f"The unquantised runs of the {len(base)} seeds differ by {spread:.4f}."
        if len(base) > 1
        else "There is one seed, so nothing says how much a seed matters."
    )
    if len(base) > 1 and largest > spread:
        said += (
            " A dtype differs by more than that; whether by chance (a small change of the first steps shifts when "
            "a short run leaves its plateau) or as a cost, only more seeds and longer runs can tell."
        )
    lines += [
        "",
        f"{said} The largest difference of a dtype is {largest:.4f}. So few steps of a small model can show "
        "a dtype that breaks training; they cannot show that one costs nothing in a long run.",
        "",
    ]
    return "\n".join(lines)


def write(document: dict, out: Path) -> None:
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--recipe", default="tiny_cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for a run")
    args = parser.parse_args()
    if args.dtypes[0] != "bf16":
        parser.error("--dtypes begins with bf16, which the others are compared with")
    sys.path.insert(0, str(ROOT))  # recipes/ is a folder of the checkout
    from recipes import get_recipe

    parallel = get_recipe(args.recipe).parallel
    document = {
        "command": f"python scripts/{Path(__file__).name} -o {args.out}",
        "recipe": args.recipe,
        "date": subprocess.run(["date", "-I"], capture_output=True, text=True, check=True).stdout.strip(),
        "machine": platform.processor() or platform.machine(),
        "steps": args.steps,
        "seeds": args.seeds,
        "parallelism": f"{parallel.num_ranks} ranks, expert parallel {parallel.expert_parallel_size}",
        "dtypes": args.dtypes,
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for dtype in args.dtypes:
                document["runs"][f"{dtype}-{seed}"] = facts = facts_of(train(args, seed, dtype, Path(folder)))
                print(f"seed {seed} {dtype}: held-out loss {facts['held_out_loss']:.4f}", flush=True)
                write(document, args.out)  # after every run: what was measured is kept


if __name__ == "__main__":
    main()
