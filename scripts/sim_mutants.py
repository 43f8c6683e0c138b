"""Runs the mutants under the simulator and writes the table of seeds-to-catch into docs/simulator.md.

    python scripts/sim_mutants.py [--program build/tests/cpp-mutants/tests/cpp/test_sim_mutants] [--check]

The program is built by `make test ARGS="--only cpp-mutants"`. --check only says whether all were caught."""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "simulator.md"
BEGIN, END = "<!-- seeds-to-catch: begin -->", "<!-- seeds-to-catch: end -->"
HEADER = ["| mutant | the bug | mixed | random | pct | caught as |", "|---|---|---:|---:|---:|---|"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/tests/cpp-mutants/tests/cpp/test_sim_mutants")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.program.is_file():
        sys.exit(f'sim_mutants: {args.program} is not there; make test ARGS="--only cpp-mutants" builds it')
    result = subprocess.run([args.program], capture_output=True, text=True, check=False)
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    print(result.stdout.strip().splitlines()[-1])
    if result.returncode or not rows:
        sys.exit(result.stdout + result.stderr)
    if args.check:
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"sim_mutants: {PAGE} has no {BEGIN} ... {END}")
    PAGE.write_text(before + "\n".join([BEGIN, *HEADER, *rows, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
