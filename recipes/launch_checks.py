"""What a GPU recipe needs on the machine that starts it, looked for before a job waits hours for its nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .cluster import ClusterRun


def missing(run: ClusterRun, container: str = "") -> list[str]:
    """One line for each thing that is not there, with its remedy. In a container only the data can be looked for: the
    image holds Megatron-LM and Transformer Engine, or does not."""
    found = []
    script = Path(run.megatron_path, "pretrain_gpt.py")
    if not container and not script.is_file():
        found.append(
            f"{script.absolute()} is not there: git clone https://github.com/NVIDIA/Megatron-LM, or say where "
            "it is with --set megatron_path=FOLDER"
        )
    if not container and importlib.util.find_spec("transformer_engine") is None:
        found.append(
            "Transformer Engine is not installed, and the recipe's layers are Megatron's with it: pip install "
            "--no-build-isolation 'transformer-engine[pytorch]', or --container IMAGE"
        )
    for suffix in (".bin", ".idx") if run.data_path else ():
        if not Path(run.data_path + suffix).is_file():
            found.append(
                f"{run.data_path}{suffix} is not there: data_path is the prefix of what Megatron-LM's "
                "tools/preprocess_data.py wrote, without suffix"
            )
    return found


def require(run: ClusterRun, container: str = "") -> None:
    """ValueError with every line of `missing`."""
    if found := missing(run, container):
        raise ValueError("; ".join(found) + "; --no-submit writes the script all the same")


def data(run: ClusterRun) -> str:
    """What the run reads, said so that nobody takes a benchmark for a training."""
    if run.data_path:
        return f"data: {run.data_path}, tokenizer {run.tokenizer}, {run.train_steps:,} steps"
    return (
        f"DATA: MOCK, random tokens, {run.train_steps:,} steps: this measures speed and trains NOTHING of use; for "
        "a training give --set data_path=PREFIX --set tokenizer=NAME --set train_steps=N"
    )
