"""The folder of one run: config.yaml, metrics.jsonl, plots, checkpoint. Created once, never overwritten."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import config as configs
from .config import RunConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunFolder:
    """Paths and files of runs/NAME. Use `create` for a new run and `open` for one that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.checkpoint_dir = path / "checkpoint"
        self.metrics_path = path / "metrics.jsonl"
        self.verdict_path = path / "verdict.txt"

    @staticmethod
    def create(config: RunConfig, name: str | None) -> RunFolder:
        """A new folder with its config.yaml. Without a name: recipe and time, numbered if that exists."""
        root = Path(config.logging.runs_dir)
        configs.dump_yaml(config)  # what cannot be written, for want of PyYAML say, must leave no empty folder
        if name is not None:
            path = new_folder(root, name)
        else:
            _make_root(root)
            path = _new_numbered(root / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder = RunFolder(path)
        folder.write_config(config)
        return folder

    @staticmethod
    def path_of(runs_dir: str, name: str) -> Path:
        """Where the run of that name lies, whether it exists or not; ValueError for what is no name."""
        _check_name(name)
        return Path(runs_dir, name)

    @staticmethod
    def open(runs_dir: str, name: str) -> RunFolder:
        """The folder of an earlier run; ValueError lists those that can be resumed."""
        folder = RunFolder(RunFolder.path_of(runs_dir, name))
        if not (folder.path / "config.yaml").is_file():
            known = sorted(path.parent.name for path in Path(runs_dir).glob("*/config.yaml"))
            names = ", ".join(known) or "none"
            raise ValueError(f"resume={name!r}: no such run in {runs_dir}; choose one of: {names}")
        return folder

    def write_config(self, config: RunConfig) -> None:
        """Replaces config.yaml atomically."""
        staging = self.path / ".config.yaml"
        staging.write_text(configs.dump_yaml(config))
        staging.replace(self.path / "config.yaml")

    def read_config(self) -> RunConfig:
        """The configuration the run was started with."""
        return configs.load_yaml((self.path / "config.yaml").read_text())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a job writes here; ValueError if another one does."""
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"name={self.name!r}: another job is writing {self.path}; wait for its end"
                raise ValueError(message) from None
            yield

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        with open(self.metrics_path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl; a last line cut short by a crash is left out."""
        if not self.metrics_path.is_file():
            return []
        lines = self.metrics_path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def rewind_metrics(self, step: int) -> None:
        """Drops the lines of steps after `step`: those a resumed run is about to repeat."""
        kept = [json.dumps(record) + "\n" for record in self.read_metrics() if record["step"] <= step]
        staging = self.path / ".metrics.jsonl"
        staging.write_text("".join(kept))
        staging.replace(self.metrics_path)


def new_folder(root: Path, name: str) -> Path:
    """Makes root/name; ValueError where it exists, or where the name is none."""
    _check_name(name)
    _make_root(root)
    try:
        (root / name).mkdir()
    except FileExistsError:
        message = f"name={name!r}: {root / name} exists; choose another name, or continue it with --resume"
        raise ValueError(message) from None
    return root / name


def _make_root(root: Path) -> None:
    """ValueError where there can be no such folder, or where it takes nothing new."""
    reason = "takes no new folder"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK | os.X_OK):
            return
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise ValueError(f"--runs-dir {root}: {reason}; name a folder that can be written")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: use letters, digits, '.', '_' and '-', first a letter or digit")


def _new_numbered(base: Path) -> Path:
    path, number = base, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = base.with_name(f"{base.name}-{number}")
