"""Lays out every C++ and CUDA file with the environment's clang-format and .clang-format.

python scripts/format_cpp.py            rewrite what is laid out otherwise
python scripts/format_cpp.py --check    exit 1 and name the files
"""

import argparse
import subprocess
import sys
from pathlib import Path

from check_layers import project_files

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something would change")
    args = parser.parse_args()
    beside = Path(sys.executable).parent / "clang-format"
    program = str(beside) if beside.exists() else "clang-format"
    sources = [path for path in project_files(ROOT) if path.endswith(SUFFIXES)]
    how = ["--dry-run", "-Werror"] if args.check else ["-i"]
    if subprocess.run([program, *how, *sources], cwd=ROOT, check=False).returncode:
        sys.exit("format_cpp: run make format" if args.check else "format_cpp: clang-format failed")


if __name__ == "__main__":
    main()
