"""Short-lived worlds of gloo ranks for parity runs and tests, forked from one process that imported Megatron.

Importing Megatron-Core takes longer than most of these runs. Python's fork server imports this module (and
through `preload` the heavy ones) in one clean single-threaded process with the CPU pieces of
`megatron_patches.cpu` in place; each rank is a fork of it. The caller's own process stays free of torch and
of those pieces.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than these runs
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no compile workers
    "OMP_NUM_THREADS": "1",  # ranks share few cores
    "MASTER_ADDR": "127.0.0.1",
}
_context = None


class WorldError(RuntimeError):
    """A rank failed or the deadline passed; the message has every failed rank's traceback."""


def run_world(function, num_ranks, arguments=(), *, timeout_s=240.0, environment=None):
    """Run `function(*arguments)` on `num_ranks` gloo ranks and return the list of results, by rank.

    function: importable by name. environment: variables for these ranks only. Raises WorldError as soon as
    a rank fails, or after `timeout_s` seconds; the other ranks are then killed.
    """
    context = _fork_server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        receive, send = context.Pipe(duplex=False)
        variables = {
            **(environment or {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_PORT": str(port),
        }
        process = context.Process(target=_rank, args=(function, arguments, variables, send), daemon=True)
        process.start()
        send.close()
        ranks.append((process, receive))
    try:
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _fork_server():
    """The context, with the server started. Early 3.11 and 3.12 preload without our sys.path: so PYTHONPATH."""
    global _context
    if _context is None:
        paths = [str(ROOT), str(Path(__file__).resolve().parent)]
        sys.path += [path for path in paths if path not in sys.path]
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["parity_preload"])
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
    while len(results) + len(errors) < len(ranks):
        waiting = {receive: rank for rank, (_, receive) in enumerate(ranks) if rank not in {**results, **errors}}
        grace = 5.0 if errors else deadline - time.monotonic()  # after one failure the others fail soon or never
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(grace, 0))
        if not ready:
            break
        for receive in ready:
            rank = waiting[receive]
            try:
                kind, value = receive.recv()
            except EOFError:
                ranks[rank][0].join(5)
                kind, value = "error", f"ended with exit code {ranks[rank][0].exitcode} and no result"
            (results if kind == "ok" else errors)[rank] = value
    if errors:
        raise WorldError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
    if len(results) < len(ranks):
        raise WorldError(f"ranks {sorted(set(range(len(ranks))) - set(results))} did not finish in time")
    return [results[rank] for rank in range(len(ranks))]


def _rank(function, arguments, variables, send):
    os.environ.update(variables)
    try:
        import parity_preload  # noqa: F401  (done already in the fork server, which hides why it failed)
        import torch

        torch.distributed.init_process_group("gloo")
        value = function(*arguments)
        torch.distributed.barrier()  # nobody leaves while another still talks to it
        torch.distributed.destroy_process_group()
        send.send(("ok", value))
    except BaseException:
        send.send(("error", traceback.format_exc()))
    send.close()
