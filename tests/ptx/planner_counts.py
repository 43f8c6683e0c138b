"""How many instructions the planner's kernel executes: warp instructions of its PTX, counted by the machine.

    python tests/ptx/planner_counts.py [--layers 100] [--json FILE]     # needs nvcc, no GPU; a minute or two

The layers are those of tests/ptx/planner/plan_clones.cpp. Sharing is what lies in csrc/roles/share_clones.h by the
calls that were inlined (ptx_lines.py), planning is all else. The longest warp is that of both together, which one
block does one after the other. PTX is not machine code: ptxas fuses, unrolls and removes.

The JSON: {"layers", "cases": {case: {"clones", "planning", "sharing", "longest_warp"}}}, each a number a layer, the
last three in warp instructions, the first two of them of all warps."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("scripts", "tests/ptx", "tests/ptx/machine"):
    sys.path.insert(0, str(ROOT / folder))
SOURCE = "tests/cuda/plan_clones.cu"
CORE = ("microbatch", "bound", "share")  # of csrc/balance
SHARING = "roles/share_clones.h"
NUMBERS = ("clones", "planning", "sharing", "longest_warp")


def build(out: Path, nvcc: str) -> tuple[Path, Path]:
    """(program, PTX) made in the folder `out`."""
    import build_cuda

    import build

    ptx = out / "plan_clones.ptx"
    command = [*build_cuda.base_command(nvcc), "-arch=compute_90a", "-ptx", SOURCE, "-o", ptx]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    machine = [part for part in build.objects() if f"{build.stem(part)}.cpp" in os.listdir(build.HERE)]
    sources = ["tests/ptx/planner/plan_clones.cpp", *(f"csrc/balance/{name}.cpp" for name in CORE)]
    options = ["-std=c++20", "-O2", "-Wno-missing-field-initializers", "-Icsrc", "-Itests/ptx/machine"]
    program = out / "plan_clones"
    compiled = [*build.compiler(), *options, *sources, *map(str, machine), "-o", program]
    subprocess.run(compiled, cwd=ROOT, check=True, timeout=300)
    return program, ptx


def run(program: Path, ptx: Path, layers: int = 3, counts: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [program, ptx, str(layers), *([] if counts is None else [counts])]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def counted(program: Path, ptx: Path, layers: int) -> list[dict]:
    """A row a case and layer, as in the JSON. RuntimeError where the machine reports something."""
    import ptx_lines

    sharing = {
        (kernel, line)
        for kernel, lines in ptx_lines.places(ptx.read_text()).items()
        for line, where in lines.items()
        if any(place.file == SHARING for place in where)
    }
    if not sharing:
        raise RuntimeError(f"no line of {ptx} comes from {SHARING}: it was compiled without -lineinfo")
    with tempfile.NamedTemporaryFile() as file:
        done = run(program, ptx, layers, Path(file.name))
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows: list[dict] = []
        for line in Path(file.name).read_text().splitlines():
            first, *numbers = line.split("\t")
            if len(numbers) == 3:
                layer, clones, longest = map(int, numbers)
                rows.append(
                    {
                        "case": first,
                        "layer": layer,
                        "clones": clones,
                        "planning": 0,
                        "sharing": 0,
                        "longest_warp": longest,
                    }
                )
            else:
                at, n = map(int, numbers)
                rows[-1]["sharing" if (first, at) in sharing else "planning"] += n
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100, help="of each case")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    import build_cuda

    nvcc, why = build_cuda.find_nvcc()
    if not nvcc:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        rows = counted(*build(Path(folder), nvcc), args.layers)
    cases: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        for name in NUMBERS:
            cases.setdefault(row["case"], {}).setdefault(name, []).append(row[name])
    print(f"{'least, median and most of a layer':34}" + "".join(f"{name:>24}" for name in NUMBERS))
    for case, numbers in cases.items():
        said = [f"{min(of):,} {statistics.median_low(of):,} {max(of):,}" for of in numbers.values()]
        print(f"{case:34}" + "".join(f"{text:>24}" for text in said))
    if args.json:
        lists = {case: {name: str(of) for name, of in numbers.items()} for case, numbers in cases.items()}
        text = json.dumps({"layers": args.layers, "cases": lists}, indent=1)
        args.json.write_text(re.sub(r'"(\[[\d, ]*\])"', r"\1", text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
