"""What a GPU recipe needs on the machine that starts it, looked for before a job waits hours for its nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .cluster import ClusterRun


def missing(run: ClusterRun, mounts: str | None = None) -> list[str]:
    """One line for each thing that is not there, with its remedy. mounts: FROM:TO,.. of the container that runs ranks;
    None: there is none. In one, the image holds Megatron-LM and Transformer Engine, or does not; data is looked for
    where it is mounted from."""
    found = []
    script = Path(run.megatron_path, "pretrain_gpt.py")
    if mounts is None and not script.is_file():
        found.append(
            f"{script.absolute()} is not there: git clone https://github.com/NVIDIA/Megatron-LM, or say where "
            "it is with --set megatron_path=FOLDER"
        )
    if mounts is None and importlib.util.find_spec("transformer_engine") is None:
        found.append(
            "Transformer Engine is not installed, and the recipe's layers are Megatron's with it: pip install "
            "--no-build-isolation 'transformer-engine[pytorch]', or --container IMAGE"
        )
    for name, here in _data_files(run, mounts):
        if here is not None and not here.is_file():
            where = "" if str(here) == name else f" ({here} outside the container)"
            found.append(
                f"{name}{where} is not there: data_path is the prefix of what Megatron-LM's "
                "tools/preprocess_data.py wrote, without suffix"
            )
    return found


def unseen(run: ClusterRun, mounts: str | None = None) -> list[str]:
    """One line for what only the container's image may hold."""
    inside = [name for name, here in _data_files(run, mounts) if here is None]
    if not inside:
        return []
    return [
        f"{' and '.join(inside)}, which no mount of the container covers: the image must hold them; else add "
        "--container-mounts FOLDER:FOLDER"
    ]


def require(run: ClusterRun, mounts: str | None = None) -> None:
    """ValueError with every line of `missing`."""
    if found := missing(run, mounts):
        raise ValueError("; ".join(found) + "; --no-submit writes the script all the same")


def _data_files(run: ClusterRun, mounts: str | None) -> list[tuple[str, Path | None]]:
    """(as ranks name it, where that is on this machine; None: nowhere that is known) of the data's files."""
    names = [run.data_path + suffix for suffix in (".bin", ".idx")] if run.data_path else []
    return [(name, Path(name) if mounts is None else _outside(name, mounts)) for name in names]


def _outside(inside: str, mounts: str) -> Path | None:
    """The path on this machine of one in a container; of several mounts that cover it the innermost."""
    path, best = Path.cwd() / inside, None
    for mount in mounts.split(","):
        source, _, rest = mount.partition(":")
        target = Path(rest.partition(":")[0] or source)  # flags may follow
        if path.is_relative_to(target) and (best is None or len(target.parts) > len(best[1].parts)):
            best = Path(source), target
    return None if best is None else best[0] / path.relative_to(best[1])


def data(run: ClusterRun) -> str:
    """What the run reads, said so that nobody takes a benchmark for a training."""
    if run.data_path:
        return f"data: {run.data_path}, tokenizer {run.tokenizer}, {run.train_steps:,} steps"
    return (
        f"DATA: MOCK, random tokens, {run.train_steps:,} steps: this measures speed and trains NOTHING of use; for "
        "a training give --set data_path=PREFIX --set tokenizer=NAME --set train_steps=N"
    )
