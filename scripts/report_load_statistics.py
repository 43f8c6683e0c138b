"""`hybrid-ep balance report` under the name, with the flags and in the layout that TensorRT-LLM users know."""

import argparse
import sys

from hybrid_ep.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expert_statistic_path", required=True)
    parser.add_argument("--iter_start", type=int)
    parser.add_argument("--iter_stop", type=int, help="not included")
    parser.add_argument("--per_expert", action="store_true", help="by expert (one expert a rank)")
    parser.add_argument("--ep_size", type=int)
    parser.add_argument("--projection_eplb_config_path")
    args = parser.parse_args()
    argv = ["balance", "report", args.expert_statistic_path, "--layout", "tensorrt"]
    if args.iter_start is not None or args.iter_stop is not None:
        last = args.iter_stop - 1 if args.iter_stop is not None else 2**31
        argv += ["--between", f"{args.iter_start or 0}-{last}"]
    if args.ep_size and not args.per_expert:
        argv += ["--ep", str(args.ep_size)]
    if args.projection_eplb_config_path:
        argv += ["--plan", args.projection_eplb_config_path]
    sys.exit(main(argv))
