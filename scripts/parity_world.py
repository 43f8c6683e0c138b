"""Short-lived worlds of gloo ranks for parity runs and tests, forked from one process that imported Megatron.

Importing Megatron-Core takes longer than most of these runs. Python's fork server imports this module (and
through `preload` the heavy ones) in one clean single-threaded process with the CPU pieces of
`megatron_patches.cpu` in place; each rank is a fork of it. The caller's own process stays free of torch and
of those pieces.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]

from hybrid_ep.local_ranks import Ended, LocalRanks, variables  # noqa: E402

START_S = 120.0
ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than these runs
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no compile workers
    "OMP_NUM_THREADS": "1",  # ranks share few cores
}
# Modules that the fork server imports; one that cannot be imported is left to the ranks. Nothing by which Megatron is
# patched: tests ask what is so before that. Add to them before the first world.
PRELOAD = ["parity_preload", "hybrid_ep.buffer", "hybrid_ep.functional", "hybrid_ep.spares", "hybrid_ep.weights"]
PRELOAD += ["hybrid_ep.balance.collector", "hybrid_ep.moe.grouped"]
_context = None


class WorldError(RuntimeError):
    """A rank failed or the deadline passed; the message has every failed rank's traceback."""


def run_world(function, num_ranks, arguments=(), *, timeout_s=240.0, environment=None):
    """Run `function(*arguments)` on `num_ranks` gloo ranks and return the list of results, by rank.

    function: importable by name. environment: variables for these ranks only. Raises WorldError as soon as
    a rank fails, or after `timeout_s` seconds; the other ranks are then killed.
    """
    ranks = LocalRanks(_fork_server(), num_ranks, _rank, (function, arguments, environment or {}))
    try:
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        ranks.kill()


def _fork_server():
    """The context, with the server started. Early 3.11 and 3.12 preload without our sys.path: so PYTHONPATH."""
    global _context
    if _context is None:
        paths = [str(ROOT), str(Path(__file__).resolve().parent)]
        sys.path += [path for path in paths if path not in sys.path]
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
        before = dict(os.environ)
        os.environ.update(ENVIRONMENT)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before.get("PYTHONPATH"), *paths]))
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return _context


def _collect(ranks, deadline):
    results, errors = {}, {}
    while len(results) + len(errors) < len(ranks.processes):
        grace = 5.0 if errors else deadline - time.monotonic()  # after one failure the others fail soon or never
        news = ranks.receive(grace)
        if not news:
            break
        for rank, message in news:
            if message is not Ended:
                kind, value = message
                (results if kind == "ok" else errors)[rank] = value
            elif rank not in results and rank not in errors:
                ranks.processes[rank].join(5)
                errors[rank] = f"ended with exit code {ranks.processes[rank].exitcode} and no result"
    if errors:
        raise WorldError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
    if missing := sorted(set(range(len(ranks.processes))) - set(results)):
        raise WorldError(f"ranks {missing} did not finish in time")
    return [results[rank] for rank in range(len(results))]


def _rank(job, function, arguments, environment):
    gc.freeze()  # or each collection would look at all that the fork server imported, and copy its pages
    os.environ.update(environment)
    os.environ.update(variables(job.rank, job.num_ranks, job.port))
    try:
        import parity_preload  # noqa: F401  (done already in the fork server, which hides why it failed)
        import torch

        store = job.store(START_S)
        torch.distributed.init_process_group("gloo", store=store, rank=job.rank, world_size=job.num_ranks)
        value = function(*arguments)
        torch.distributed.barrier()  # nobody leaves while another still talks to it
        torch.distributed.destroy_process_group()
        job.pipe.send(("ok", value))
    except BaseException:
        job.pipe.send(("error", traceback.format_exc()))
    job.pipe.close()
