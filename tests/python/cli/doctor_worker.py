"""A job of `hybrid-ep doctor --multi` with a fault in one rank: `doctor_worker.py RANKS FAULT VICTIM ARGUMENTS...`.

Imports once and forks the ranks. Exits with rank 0's code; the other ranks must say nothing.
"""

import os
import sys
import time

import torch.distributed as dist

from hybrid_ep.cli import main
from hybrid_ep.cli.doctor import pairs

NUM_RANKS, FAULT, VICTIM = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def leave(*_):
    os._exit(9)


def run(rank):
    """One rank; its exit code."""
    os.environ["RANK"] = str(rank)
    pairs.SMALL_REPEATS = 5
    if rank == VICTIM and FAULT == "absent":
        return 0
    if rank == VICTIM and FAULT == "dies":
        pairs.exchange = leave
    if rank == VICTIM and FAULT == "slow":  # with every message that it sends, so that its partners see it too
        send = dist.ProcessGroupGloo.send
        dist.ProcessGroupGloo.send = lambda *arguments: (time.sleep(0.15), send(*arguments))[1]
    return main(["doctor", "--multi", *sys.argv[4:]])


children = []
for rank in range(NUM_RANKS):
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = run(rank)
        finally:
            sys.stdout.flush()
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(codes[0])
