"""tests/gpu on the PTX machine, seed after seed: plain and with happens-before, sm_90a and sm_100 in turn.

    python tests/ptx/soak.py [--seeds 100] [--first 1] [--everyday] [-k NAMES]

Each seed is a pytest of its own, which may take an hour. Prints a line a seed, keeps the output of those that fail in
build/ptx_soak and says how each is run again; exits with 1 if any failed. Needs nvcc, for both architectures."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "ptx_soak"
LIMIT_S = 3600


def command(seed: int, args: argparse.Namespace) -> list[str]:
    """Of one seed; it fixes the mode and the architecture, too."""
    return [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--ptx-machine", "--ptx-seed", str(seed),
            "--ptx-target", "100" if seed % 4 >= 2 else "90", *(["--ptx-races"] if seed % 2 else []),
            *(["--ptx-everyday"] if args.everyday else []), *(["-k", args.names] if args.names else [])]


def run(seed: int, args: argparse.Namespace) -> bool:
    """Whether the seed passed."""
    log, started = OUT / f"{seed}.log", time.monotonic()
    with open(log, "w") as output:
        try:
            status = subprocess.run(command(seed, args), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                                    timeout=LIMIT_S, check=False).returncode
            said = "passed" if status == 0 else f"FAILED, {log}"
        except subprocess.TimeoutExpired:
            status, said = 1, f"FAILED: not done in {LIMIT_S} s, {log}"
    print(f"seed {seed}: {said} [{time.monotonic() - started:.0f} s]", flush=True)
    if status == 0:
        log.unlink()
    else:
        print("  again: " + shlex.join(command(seed, args)), flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--everyday", action="store_true", help="only the tests of CI")
    parser.add_argument("-k", dest="names", default="", help="only these tests, as pytest's -k")
    args = parser.parse_args()
    if subprocess.run([sys.executable, "scripts/build_cuda.py", "--interpreted"], cwd=ROOT, check=False).returncode:
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    failed = [seed for seed in range(args.first, args.first + args.seeds) if not run(seed, args)]
    print(f"ptx soak: {args.seeds} seeds, {len(failed)} failed{': ' if failed else ''}{' '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
