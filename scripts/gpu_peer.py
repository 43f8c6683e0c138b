"""Times one implementation of dispatch and combine, ours or a peer whose code is given by path, and writes raw JSON.

    python scripts/gpu_peer.py NAME [--path FOLDER] --out FILE [--ranks N] [--quick] [--executor cuda|host]

NAME: hybrid_ep, deep_ep-hybrid (DeepEP's hybrid-ep branch), deep_ep-v1 or deep_ep-v2. FOLDER holds the package
deep_ep, built; it comes first on sys.path, and what the peer compiles at run time goes to a folder NAME-build beside
FILE, never into its source. Every implementation gets the same tokens and the same routing (seeded by rank) and is
driven through its public interface by the adapters of `hybrid-ep bench`. One process a rank; --ranks: the GPUs of this
machine by default, so that one GPU is a group of one rank, which has all experts: its numbers compare copying and
launching, no links.

Two times: `api_us`, between events around the call on the current stream, routing included and with everything that
the caller would wait for; `kernel_us`, the GPU time of all kernels that the call launched (torch.profiler). A peer that
cannot be imported or cannot take part is {"skipped": reason}, and the exit status is 0: nothing failed here."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

NAMES = ("hybrid_ep", "deep_ep-hybrid", "deep_ep-v1", "deep_ep-v2")


def num_gpus():
    import torch  # the launcher needs nothing else of it

    return max(1, torch.cuda.device_count())


def start(args):
    """The ranks, as processes with the peer's folder first and build folders of their own; the worst exit status."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    caches = args.out.parent / f"{args.name}-build"
    caches.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(args.path.resolve()) if args.path else "", os.environ.get("PYTHONPATH")]))
    own = {
        name: str(caches / name.lower())
        for name in ("TORCH_EXTENSIONS_DIR", "EP_JIT_CACHE_DIR", "HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(args.ranks), "--port", str(port), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(r)], env={**os.environ, **own, "PYTHONPATH": path}) for r in range(args.ranks)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--path", type=Path, help="folder with the package deep_ep; not for hybrid_ep")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--executor", default="cuda", choices=("cuda", "host"), help="host: to try the script itself")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # this process is that rank
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.name == "hybrid_ep") != (args.path is None):
        parser.error("--path names a peer's code: give it for every name but hybrid_ep")
    args.ranks = args.ranks or num_gpus()
    if args.rank is None:
        sys.exit(start(args))
    import gpu_peer_rank

    gpu_peer_rank.be_rank(args)


if __name__ == "__main__":
    main()
