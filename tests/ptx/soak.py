"""tests/gpu on the PTX machine, seed after seed: plain and with happens-before, sm_90a and sm_100 in turn.

    python tests/ptx/soak.py [--seeds 100] [--first 1] [--minutes M] [--everyday] [-k NAMES]

First come the machine's own tests that CI leaves out (a Megatron training, executed against static counts). Then each
seed is a pytest of its own, which may take an hour. Prints a line a seed, keeps the output of those that fail in
build/ptx_soak and says by which command each is run again; the last line sums up. Exits with 1 if any failed. Needs
nvcc, for both architectures, and takes it out of pip where there is none."""

from __future__ import annotations

import argparse
import os
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
    chosen = ["--ptx-seed", str(seed), "--ptx-target", "100" if seed % 4 >= 2 else "90"]
    return [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "--timeout",
        str(LIMIT_S),
        "--ptx-machine",
        *chosen,
        *(["--ptx-races"] if seed % 2 else []),
        *(["--ptx-everyday"] if args.everyday else []),
        *(["-k", args.names] if args.names else []),
    ]


def run(name: str, of_it: list[str]) -> bool:
    """Whether a pytest passed."""
    log, started = OUT / (name.replace(" ", "_") + ".log"), time.monotonic()
    with open(log, "w") as output:
        try:
            status = subprocess.run(
                of_it, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
            ).returncode
            said = "passed" if status == 0 else f"FAILED, {log}"
        except subprocess.TimeoutExpired:
            status, said = 1, f"FAILED: not done in {LIMIT_S} s, {log}"
    print(f"{name}: {said} [{time.monotonic() - started:.0f} s]", flush=True)
    if status == 0:
        log.unlink()
    else:
        print("  again: " + shlex.join(of_it), flush=True)
    return status == 0


def find_nvcc() -> str | None:
    """Sets CUDA_HOME where nvcc is not found without; why there is none, or None."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import cuda_packages

    home, why = cuda_packages.find_toolkit(lambda it: (subprocess.run(list(map(str, it)), check=False).returncode, ""))
    if home:
        os.environ["CUDA_HOME"] = str(home)
    return why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--everyday", action="store_true", help="only the tests of CI")
    parser.add_argument("-k", dest="names", default="", help="only these tests, as pytest's -k")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed later")
    args = parser.parse_args()
    begun = time.monotonic()
    if why := find_nvcc():
        sys.exit(f"ptx soak: {why}")
    if subprocess.run([sys.executable, "scripts/build_cuda.py", "--interpreted"], cwd=ROOT, check=False).returncode:
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    jobs = {f"seed {seed}": command(seed, args) for seed in range(args.first, args.first + args.seeds)}
    if not args.names:
        own = [sys.executable, "-m", "pytest", "tests/ptx", "-q", "--ptx-slow", "--timeout", str(LIMIT_S)]
        jobs = {"own tests": own, **jobs}
    ran, failed = 0, []
    for name, of_it in jobs.items():
        if time.monotonic() - begun < 60 * args.minutes:
            ran += 1
            failed += [] if run(name, of_it) else [name]
    print(
        f"ptx soak: {ran} of {len(jobs)} run in {(time.monotonic() - begun) / 60:.0f} minutes, {len(failed)} failed"
        f"{': ' if failed else ''}{', '.join(failed)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
