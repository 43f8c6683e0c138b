"""A rank of `hybrid-ep doctor --multi` with a fault: `doctor_worker.py FAULT RANK ARGUMENTS...`."""

import os
import sys
import time

from hybrid_ep.cli import main
from hybrid_ep.cli.doctor import pairs

fault, victim = sys.argv[1], int(sys.argv[2])
right = pairs.exchange


def wrong(group, peer, first, num_bytes, timeout):
    if fault == "dies":
        os._exit(9)
    return right(group, peer, first, num_bytes, timeout)


pairs.SMALL_REPEATS = 5
if fault == "absent" and int(os.environ["RANK"]) == victim:
    sys.exit(0)
if int(os.environ["RANK"]) == victim:
    pairs.exchange = wrong
    if fault == "slow":  # it takes its time with every message, so that its partners see it too
        import torch.distributed as dist

        send = dist.ProcessGroupGloo.send
        dist.ProcessGroupGloo.send = lambda *args: (time.sleep(0.15), send(*args))[1]
sys.exit(main(["doctor", "--multi", *sys.argv[3:]]))
