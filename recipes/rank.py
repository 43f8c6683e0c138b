"""`python -m recipes.rank RUN_FOLDER`: one rank of a run that srun or torchrun started, one process a rank.

Who and how many: RANK and WORLD_SIZE, else SLURM_PROCID and SLURM_NTASKS; where to meet: MASTER_ADDR and MASTER_PORT.
The run starts from config.yaml of the folder, or from the checkpoint there. Once it trains, SIGTERM and SIGINT end it
after the step it is in, with a checkpoint; before that they end it at once. Exit code: 0 done, or stopped by SIGINT
(of anything else torchrun makes a report of two screens), 1 this rank failed (its error is on stderr), 2 bad usage, 143
stopped by SIGTERM.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybrid_ep import local_ranks

from .run_folder import RunFolder
from .verdict import verdict

if TYPE_CHECKING:
    import torch.distributed as dist

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 128 + signal.SIGTERM
_DECIDED = "recipes/start"
_POLL_S = 0.1


class _Terminated(BaseException):
    """SIGTERM before there is a step to finish."""


def whoami() -> tuple[int, int]:
    """(rank, number of ranks) from the launcher's variables; ValueError where there is no launcher."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    raise ValueError("RANK is not set: start this through torchrun or srun, or use hybrid-ep launch")


def meet(rank: int, num_ranks: int, timeout_s: float) -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, served by rank 0, or by torchrun where that says so."""
    import torch.distributed as dist

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set: it says where rank 0 serves the rendezvous")
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        num_ranks,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def part(store: Any, key: str, rank: int, num_ranks: int) -> None:
    """Ranks that leave without a collective: rank 0, which may serve the store, goes when the others have read it. They
    may start late, as all may of a job; a DistStoreError after the store's timeout where one never comes."""
    store.set(f"{key}/{rank}", "")
    if rank == 0:
        store.wait([f"{key}/{other}" for other in range(num_ranks)])


def await_key(store: Any, key: str, timeout_s: float) -> bytes:
    """What rank 0 sets. Not by the store's own wait, in whose C++ no signal is heard."""
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not set {key} within {timeout_s:g} s: see what it says, or where it is")
        time.sleep(_POLL_S)
    return store.get(key)


def check_one_machine(store: Any, key: str, rank: int, timeout_s: float) -> None:
    """ValueError on a rank that shares no memory and no loopback with rank 0, as ranks on CPUs must."""
    from hybrid_ep.runtime import devices

    machine, name = devices.machine(), socket.gethostname()
    if rank == 0:
        store.set(key, f"{machine} {name}")
    first, first_name = await_key(store, key, timeout_s).decode().split()
    if machine != first:
        raise ValueError(
            f"nodes: rank {rank} is on {name}, rank 0 on {first_name}: ranks on CPUs meet in shared "
            "memory; ask for one machine, or for a GPU recipe"
        )


def run(folder: RunFolder, asked: list[int]) -> int:
    """Trains; the exit code. Every rank of the job must call this. asked: signals that came and mean to stop."""
    config = folder.read_config()
    rank, num_ranks = whoami()
    if num_ranks != config.parallel.num_ranks:
        raise ValueError(f"WORLD_SIZE={num_ranks}: the run has {config.parallel.num_ranks} ranks; start as many")
    from .pretrain import prepare_process

    prepare_process(config)
    from . import checkpoint, plots, text_data, trainer
    from .report import Reporter, say

    # A restarted job gets a new store at the same port, so the key must belong to this start alone.
    store = meet(rank, num_ranks, config.runtime.timeout_s)
    decided = f"{_DECIDED}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    check_one_machine(store, f"{decided}/machine", rank, config.runtime.timeout_s)
    with folder.lock() if rank == 0 else nullcontext():
        if rank == 0:
            corpus = text_data.build_corpus(config.data)  # first, alone: it fills the cache for the others
            step = checkpoint.latest_step(folder.checkpoint_dir) or 0
            folder.rewind_metrics(step) if step else folder.metrics_path.unlink(missing_ok=True)
            store.set(decided, str(step))
        step = int(await_key(store, decided, config.runtime.timeout_s))
        if step >= config.schedule.train_steps:
            part(store, f"{decided}/read", rank, num_ranks)
            if rank == 0:
                print(f"{folder.path}: its {step} steps are done", flush=True)
                if folder.verdict_path.is_file():  # it stays, for whoever started this asks it for the exit code
                    print(folder.verdict_path.read_text(), end="", flush=True)
            return 0
        if rank:
            corpus = text_data.build_corpus(config.data)
        if rank == 0:
            folder.verdict_path.unlink(missing_ok=True)
            how = f"resuming after step {step}" if step else "starting"
            print(f"{folder.path}: {how}, {num_ranks} ranks", flush=True)
        reporter = Reporter(config, folder, corpus) if rank == 0 else None

        def emit(kind: str, fields: dict[str, Any]) -> None:
            if reporter is not None:
                reporter.on_event(0, kind, fields)

        try:
            trainer.join_process_groups(config, rank, store)
            job = trainer.Trainer(config, corpus, folder.checkpoint_dir, step > 0, emit, lambda: bool(asked))
            for number in (signal.SIGINT, signal.SIGTERM):  # there is a step to finish now
                signal.signal(number, lambda number, _frame: asked.append(number))
            outcome = job.train()
            trainer.leave_process_groups(config)
        finally:
            if reporter is not None:
                reporter.close()
    if reporter is not None:
        say(f"{folder.path}: {outcome} after step {job.step}")
        if outcome == "done":
            say(
                plots.draw_all(
                    folder.path,
                    folder.read_metrics(),
                    corpus.unigram_entropy,
                    config.parallel.expert_parallel_size,
                    config.parallel.ranks_per_node,
                )
            )
            loss, entropy, must_learn = reporter.held_out_loss, corpus.unigram_entropy, config.schedule.must_learn
            sentence, _ = verdict(outcome, job.step, loss, entropy, folder.name, must_learn)
            folder.verdict_path.write_text(sentence + "\n")  # ranks of torchrun have no exit code for it
            say(sentence)
    return 0 if outcome == "done" or signal.SIGINT in asked else EXIT_STOPPED


def main(argv: Sequence[str]) -> int:
    """The command. A failing rank leaves at once, without destructors that would wait for the others."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return EXIT_USAGE
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun that is killed tells its ranks nothing
        local_ranks.die_with_parent(signal.SIGKILL)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, _terminate)
    try:
        path = Path(argv[0])
        return run(RunFolder.open(str(path.parent), path.name), asked)
    except KeyboardInterrupt:  # it was asked for; without destructors, as below
        os._exit(0)
    except _Terminated:
        os._exit(EXIT_STOPPED)
    except BaseException as error:
        if isinstance(error, ValueError):
            print(f"error: {error}", file=sys.stderr)
        traceback.print_exc()
        who = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "?"))
        print(f"rank {who} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_FAILED)


def _terminate(_number: int, _frame: Any) -> None:
    raise _Terminated


def _leave(code: int) -> NoReturn:
    """As the interpreter ends, but for its destructors: Megatron's modules refer to its groups until then, and a thread
    of gloo's that drops a tensor there aborts the process (hybrid_ep.local_ranks.end_groups_first)."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            code = code or EXIT_FAILED
            with suppress(OSError):
                os.write(2, f"what this rank printed last is lost: {error}\n".encode())
    ctypes.CDLL(None).fflush(None)  # what C++ has printed
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
