"""`hybrid-ep balance plan` under the name and flags that TensorRT-LLM users know."""

import argparse
import sys

from hybrid_ep.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expert_statistic_path", required=True)
    parser.add_argument("--output_path", required=True)
    parser.add_argument("--ep_size", type=int, required=True)
    parser.add_argument("--num_slots", type=int, required=True)
    parser.add_argument("--iter_start", type=int)
    parser.add_argument("--iter_stop", type=int, help="not included")
    parser.add_argument("--layer_updates_per_iter", type=int, default=0)
    args = parser.parse_args()
    argv = [
        "balance",
        "plan",
        args.expert_statistic_path,
        "--ep",
        str(args.ep_size),
        "--num-slots",
        str(args.num_slots),
        "-o",
        args.output_path,
        "--layer-updates-per-iter",
        str(args.layer_updates_per_iter),
    ]
    if args.iter_start is not None or args.iter_stop is not None:
        last = args.iter_stop - 1 if args.iter_stop is not None else 2**31
        argv += ["--between", f"{args.iter_start or 0}-{last}"]
    sys.exit(main(argv))
