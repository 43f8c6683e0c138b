"""Builds the PTX machine's own tests, without nvcc, and prints their path: python tests/ptx/machine/build.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[2] / "build" / "ptx_machine"
OF_LIBRARY = HERE.parents[2] / "build" / "cuda" / "interpreted"  # where build_cuda.py --interpreted compiled the same
FLAGS = ["-std=c++20", "-O1", "-g1", "-DNDEBUG", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]


def compiler():
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def sources():
    return sorted(HERE.glob("*.cpp")) + sorted((HERE / "tests").glob("*.cpp"))


def is_current(source, obj):
    newest = max(p.stat().st_mtime for p in [source, *HERE.glob("*.h"), *HERE.glob("tests/*.h")])
    return obj.is_file() and obj.stat().st_mtime >= newest


def compile_one(source, obj, include=None):
    command = [*compiler(), *FLAGS, *([f"-I{include}"] if include else []), "-c", str(source), "-o", str(obj)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{source.name} does not compile:\n{done.stderr}")
    return obj


def objects():
    """Of everything, made anew where a source or any header is newer."""
    OUT.mkdir(parents=True, exist_ok=True)
    found = []
    for source in sources():
        built = OF_LIBRARY / f"tests__ptx__machine__{source.name}.o"
        obj = built if source.parent == HERE and is_current(source, built) else OUT / f"{source.stem}.o"
        if not is_current(source, obj):
            compile_one(source, obj)
        found.append(obj)
    return found


def link(parts, program):
    command = [*compiler(), *map(str, parts), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{program} does not link:\n{done.stderr}")
    return program


def stem(obj):
    """Of the source: a library's object is tests__ptx__machine__meet.cpp.o."""
    return obj.name.split("__")[-1].split(".")[0]


def build():
    return link(objects(), OUT / "tests")


if __name__ == "__main__":
    print(build())
