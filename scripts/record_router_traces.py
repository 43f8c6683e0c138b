"""Records what real routers choose while small models learn: tokens of every expert, step by step and layer by layer.

    python scripts/record_router_traces.py -o docs/results/router-traces.npz [--runs NAME ...] [--parts FOLDER]

Each run of `RUNS` trains on this machine, by the code of `recipes`, in a process of its own and as one rank: which
experts a router chooses does not depend on how many ranks share them. The last STEPS steps are kept, counts of a step
over all its tokens. Two runs are recorded through Megatron-Core's router tracer (`--moe-routing-trace-path`) and read
with `hybrid_ep.balance.statistics.load`; their counts must equal what the recipe's own meter counted, or the run is
refused. A run that is in --parts already is not trained again, so that an interrupted recording goes on.

The file: for each run `NAME` uint16 [steps, layers, experts], and `about`, JSON with how each was made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STEPS = 208  # 100 to judge, 100 before them to plan from, 8 that a plan is made of
TRAIN_STEPS = 260

# Sections of RunConfig over tiny_cpu: 2,048 bytes a step, on one rank. megatron: by Megatron-Core's own tracer.
_LARGER: dict[str, Any] = dict(num_layers=12, hidden_size=96, num_experts=64, topk=8, moe_ffn_hidden_size=48)
_TRACED: dict[str, Any] = dict(num_layers=8, hidden_size=96, num_experts=32, topk=4, moe_ffn_hidden_size=64)
_GROUPS: dict[str, Any] = dict(
    score_function="sigmoid", expert_bias=True, router_num_groups=8, router_group_topk=4, topk_scaling_factor=2.5
)
RUNS: dict[str, dict[str, Any]] = {
    "tiny": dict(model={}),
    "tiny_seed": dict(model={}, seed=4321),
    "tiny_weak_loss": dict(model={"aux_loss_coeff": 1e-3}),
    "tiny_no_loss": dict(model={"aux_loss_coeff": 0.0}),
    "tiny_bias": dict(model={"aux_loss_coeff": 0.0, "score_function": "sigmoid", "expert_bias": True}),
    "larger_loss": dict(model={**_LARGER, "aux_loss_coeff": 1e-3}),
    "larger_groups": dict(model={**_LARGER, **_GROUPS, "aux_loss_coeff": 1e-4}),
    "megatron_loss": dict(model={**_TRACED, "aux_loss_coeff": 1e-3}, megatron=True),
    "megatron_no_loss": dict(model={**_TRACED, "aux_loss_coeff": 0.0}, megatron=True),
}


def configuration(name: str, runs_dir: Path) -> Any:
    """The RunConfig of a run."""
    from recipes import get_recipe

    wanted = RUNS[name]
    return get_recipe("tiny_cpu").derive(
        recipe=f"trace_{name}",
        seed=wanted.get("seed", 1234),
        model=wanted["model"],
        parallel={"num_ranks": 1, "expert_parallel_size": 1, "ranks_per_node": 1, "grouped_gemm": True},
        schedule={"train_steps": TRAIN_STEPS, "micro_batch_size": 8, "eval_every": TRAIN_STEPS, "eval_sequences": 8},
        logging={"checkpoint_every": 10 * TRAIN_STEPS, "wandb": False, "tensorboard": False, "runs_dir": str(runs_dir)},
    )


def train(name: str, out: Path) -> None:
    """Trains one run in this process and writes its counts uint16 [steps, layers, experts] to `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        config = configuration(name, Path(scratch))
        from recipes.pretrain import prepare_process

        prepare_process(config)
        from recipes import launch, text_data, trainer

        corpus = text_data.build_corpus(config.data)
        traced, loads, losses = Path(scratch) / "trace", [], []

        def rank_main(context: launch.RankContext) -> None:
            trainer.join_process_groups(config, context.rank, context.store(config.runtime.timeout_s))
            job = trainer.Trainer(
                config, corpus, Path(scratch) / "checkpoints", False, context.emit, context.stop_requested
            )
            tracer = None
            while job.step < TRAIN_STEPS:
                if RUNS[name].get("megatron") and job.step == TRAIN_STEPS - STEPS:
                    tracer = _tracer(traced, job.net)
                record, stop = job.train_step()
                if tracer is not None:
                    tracer.advance_step(job.step)
                context.emit("counts", {"load": record["expert_load"], "loss": record["train_loss"]})
                if stop:
                    raise RuntimeError(f"{name}: stopped at step {job.step}")
            trainer.leave_process_groups(config)

        def on_event(rank: int, kind: str, fields: dict[str, Any]) -> None:
            if kind == "counts":
                loads.append(fields["load"])
                losses.append(fields["loss"])
                if len(losses) % 20 == 0:
                    print(f"{name}: step {len(losses)}, loss {losses[-1]:.3f}", flush=True)

        launch.run_ranks(1, rank_main, on_event)
        if len(loads) != TRAIN_STEPS:
            raise RuntimeError(f"{name}: {len(loads)} of {TRAIN_STEPS} steps ran")
        counts = np.array(loads[-STEPS:])
        if RUNS[name].get("megatron"):
            counts = _read_trace(name, traced, counts)
        np.savez_compressed(out, counts=counts.astype(np.uint16), losses=np.array([losses[0], losses[-1]]))


def _tracer(folder: Path, model: Any) -> Any:
    """Megatron-Core's router tracer over this model, as `--moe-routing-trace-path` makes it."""
    from megatron.core.transformer.moe.router_trace import RouterTracer

    tracer = RouterTracer(str(folder), max_steps=STEPS, rank=0, training_mode=True)
    tracer.register_hooks(model)
    return tracer


def _read_trace(name: str, folder: Path, metered: np.ndarray) -> np.ndarray:
    """Counts of the trace's file. RuntimeError where they are not those of the recipe's meter."""
    from hybrid_ep.balance import statistics

    read = statistics.load(folder / "router_trace_rank0.jsonl", num_experts=metered.shape[2])
    if read.counts.shape != metered.shape or (read.counts != metered).any():
        raise RuntimeError(f"{name}: Megatron's trace has other counts than the meter of the recipe")
    return read.counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file of all runs, .npz")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--parts", type=Path, help="keep each run's counts here, and take those that are there")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)  # a run in this process
    args = parser.parse_args(argv)
    if args.one:
        train(args.one, args.output)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        parts = args.parts or Path(scratch)
        parts.mkdir(parents=True, exist_ok=True)
        for name in args.runs:
            if not (parts / f"{name}.npz").exists():
                command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
                subprocess.run([*command, "-o", str(parts / f"{name}.npz")], timeout=args.timeout, check=True, cwd=ROOT)
        merge(parts, args.runs, args.output)
    return 0


def merge(parts: Path, names: list[str], output: Path) -> None:
    """One file of all runs' counts, with what each was."""
    about, arrays = {}, {}
    for name in names:
        with np.load(parts / f"{name}.npz") as part:
            arrays[name] = part["counts"]
            about[name] = {**RUNS[name], "last_step": TRAIN_STEPS, "loss": [round(float(x), 3) for x in part["losses"]]}
    np.savez_compressed(output, about=np.array(json.dumps(about)), **arrays)
    print(f"{output}: {sum(a.shape[1] for a in arrays.values())} traces, {output.stat().st_size} bytes")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
