"""What the user sees of a run: a progress bar on a terminal, plain lines elsewhere; Weights & Biases and TensorBoard
where installed, both on this machine alone unless told otherwise."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import metrics
from .config import RunConfig
from .run_folder import RunFolder
from .text_data import Corpus


class Reporter:
    """Receives the events of a run; owns the terminal and metrics.jsonl."""

    def __init__(self, config: RunConfig, folder: RunFolder, corpus: Corpus) -> None:
        self._config, self._folder, self._entropy = config, folder, corpus.unigram_entropy
        self._bar: _Bar | None = None
        self._wandb: Any = None
        self._tensorboard: Any = None
        self._first_step = 0
        self._started = time.monotonic()
        self.held_out_loss: float | None = None
        self.outcome: str | None = None
        self.step = 0

    def on_event(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Handles one event. All ranks report the same numbers, so those of rank 0 are enough."""
        if kind == "stopping":
            self._say(f"{fields['signal']}: finishing the step and writing a checkpoint (again: end at once)")
        elif rank == 0:
            getattr(self, f"_on_{kind}")(fields)

    def close(self) -> None:
        """Gives the terminal back; call it whatever happened."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _on_start(self, fields: dict[str, Any]) -> None:
        self._started, self._first_step = time.monotonic(), fields["step"]
        self.step = fields["step"]
        model, parallel = self._config.model, self._config.parallel
        self._say(
            f"{fields['num_parameters'] / 1e6:.2f} M parameters, {model.num_layers} layers, "
            f"{model.num_experts} experts, top-{model.topk}; {parallel.num_ranks} ranks, "
            f"{parallel.expert_parallel_size // parallel.ranks_per_node} nodes x {parallel.ranks_per_node}, "
            f"dispatcher {parallel.dispatcher}"
        )
        # Only now: wandb starts threads and processes, and ranks must be forked before that.
        self._wandb = self._start_wandb()
        self._tensorboard = self._start_tensorboard()
        if _is_terminal():
            self._bar = _Bar.create(self._config.schedule.train_steps, self.step)

    def _on_held_out(self, fields: dict[str, Any]) -> None:
        self._folder.append_metrics(fields)
        self._show_held_out(fields)

    def _on_step(self, record: dict[str, Any]) -> None:
        self._folder.append_metrics(record)
        self.step = record["step"]
        if self._wandb is not None or self._tensorboard is not None:
            self._log(record["step"], metrics.flatten(record, self._config.parallel.expert_parallel_size))
        if self._bar is not None:
            self._bar.update(record["step"], _summary(record))
        elif record["step"] % self._config.logging.line_every == 0:
            self._say(
                f"step {record['step']:>5}/{self._config.schedule.train_steps}  {_summary(record)}  "
                f"{self._time_left(record['step'])}"
            )
        if "held_out_loss" in record:
            self._show_held_out(record)

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)

    def _on_profile(self, fields: dict[str, Any]) -> None:
        from . import step_profile  # which needs torch

        path, step = self._folder.path / "profile.md", fields.pop("step")
        path.write_text(step_profile.markdown(step, fields) + "\n")
        self._say(f"{step_profile.markdown(step, fields, rows=8)}\n{path}: the whole of it")

    def _on_end(self, fields: dict[str, Any]) -> None:
        self.outcome = fields["outcome"]

    def _show_held_out(self, record: dict[str, Any]) -> None:
        loss = self.held_out_loss = record["held_out_loss"]
        self._say(
            f"step {record['step']:>5}  held-out loss {loss:.4f} nats/byte = {loss / self._entropy:.0%} of "
            f"the unigram entropy {self._entropy:.4f}"
        )

    def _time_left(self, step: int) -> str:
        per_step = (time.monotonic() - self._started) / max(1, step - self._first_step)
        left = per_step * (self._config.schedule.train_steps - step)
        return f"{int(left // 60)}:{int(left % 60):02d} left"

    def _start_wandb(self) -> Any:
        """A wandb run named like the folder, offline unless WANDB_MODE says otherwise; None without wandb."""
        if not self._config.logging.wandb:
            return None
        try:
            import wandb
        except ImportError:
            return None
        mode = os.environ.get("WANDB_MODE", "offline")
        try:
            run = wandb.init(
                project=self._config.logging.wandb_project,
                name=self._folder.name,
                id=self._folder.name,
                resume="allow",
                dir=self._folder.path,
                config=self._config.to_dict(),
                mode=mode,
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # a log that nobody can reach must not end a training run
            self._say(f"wandb does not start ({type(error).__name__}: {error}); training goes on without it")
            return None
        self._say(f"wandb: logging {mode} to {self._folder.path / 'wandb'}")
        return run

    def _start_tensorboard(self) -> Any:
        """A writer of event files in the run folder; None where TensorBoard is not installed."""
        if not self._config.logging.tensorboard:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        self._say(f"TensorBoard: logging to {self._folder.path / 'tensorboard'}")
        return SummaryWriter(self._folder.path / "tensorboard", purge_step=self.step + 1)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            say(text)


def say(text: str) -> None:
    """To stdout. Whoever reads it may be gone, as `tee` after Ctrl-C: that is no reason for a run to lose its step."""
    with _reader_may_go():
        print(text, flush=True)


@contextlib.contextmanager
def _reader_may_go() -> Iterator[None]:
    """From then on nothing is printed: a pipe that nobody reads, a terminal that has been closed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _summary(record: dict[str, Any]) -> str:
    return (
        f"loss {record['train_loss']:.3f}  grad norm {record['grad_norm']:.2f}  {record['tokens_per_s']:,.0f} tok/s  "
        f"dispatch {record['dispatch_s'] * 1e3:.0f} ms  combine {record['combine_s'] * 1e3:.0f} ms  imbalance "
        f"{record['rank_imbalance']:.2f}"
    )


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Bar:
    """A rich progress bar with the metrics of the last step under it, redrawn a few times a second."""

    @staticmethod
    def create(total: int, done: int) -> _Bar | None:
        """A bar, or None where rich is not installed: plain lines say the same."""
        try:
            import rich.live  # noqa: F401
            import rich.progress  # noqa: F401
        except ImportError:
            return None
        return _Bar(total, done)

    def __init__(self, total: int, done: int) -> None:
        from rich import live, progress

        self._progress = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=30),
            progress.TimeElapsedColumn(),
            progress.TextColumn("<"),
            progress.TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("train", total=total, completed=done)
        self._live = live.Live(self._progress, refresh_per_second=4)
        self._live.start()

    def update(self, step: int, summary: str) -> None:
        """Moves to `step` and shows its metrics."""
        from rich import console, text

        with _reader_may_go():
            self._progress.update(self._task, completed=step)
            self._live.update(console.Group(self._progress, text.Text(summary)))

    def print(self, text: str) -> None:
        """A line above the bar."""
        with _reader_may_go():
            self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leaves the last state on the screen and restores the cursor."""
        with _reader_may_go():
            self._live.stop()
