"""The planner's kernel (tests/cuda/plan_clones.cu) on the PTX machine: the core's plans, nothing that two lanes touch
unordered, a ceiling of instructions; and ptxas takes it for both architectures without spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests" / "ptx" / "machine")]
SOURCE = "tests/cuda/plan_clones.cu"
CORE = ("microbatch", "bound", "share")
# A fifth above what they were when set: a layer's warp instructions of PTX, of all warps together. Two constructions
# are made side by side, so that the longest warp has half of what planning takes.
MOST = {
    "EP64 E256 +1 sigma 0.3": 88_000,
    "EP64 E256 +1 sigma 1.5": 110_000,
    "EP64 E256 +2 sigma 1.0": 106_000,
    "EP64 E256 +1 three warps": 101_000,
    "EP32 E256 +1 hot together": 235_000,
    "EP8 E64 +2 sigma 1.0": 13_800,
}
REGISTERS = 232  # of 256 threads, so that the block fits an SM


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(program, PTX, nvcc)."""
    import build_cuda

    import build

    nvcc, why = build_cuda.find_nvcc()
    if not nvcc:
        pytest.skip(why)
    out = tmp_path_factory.mktemp("planner")
    ptx = out / "plan_clones.ptx"
    command = [*build_cuda.base_command(nvcc), "-arch=compute_90a", "-ptx", SOURCE, "-o", ptx]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    machine = [part for part in build.objects() if f"{build.stem(part)}.cpp" in os.listdir(build.HERE)]
    sources = ["tests/ptx/planner/plan_clones.cpp", *(f"csrc/balance/{name}.cpp" for name in CORE)]
    options = ["-std=c++20", "-O2", "-Wno-missing-field-initializers", "-Icsrc", "-Itests/ptx/machine"]
    program = out / "plan_clones"
    compiled = [*build.compiler(), *options, *sources, *map(str, machine), "-o", program]
    subprocess.run(compiled, cwd=ROOT, check=True, timeout=300)
    return program, ptx, nvcc


def run(program, ptx, layers=3):
    return subprocess.run([program, ptx, str(layers)], capture_output=True, text=True, timeout=300, check=False)


def test_the_kernel_plans_as_the_core_does(built):
    done = run(*built[:2])
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"(.*): 0 of 3 differ, [1-9]\d* clones, (\d+) warp instructions", done.stdout))
    assert set(found) == set(MOST), done.stdout
    above = {name: n for name, n in found.items() if int(n) > MOST[name]}
    assert not above, above


@pytest.mark.parametrize("dropped", [r"\tbar\.warp\.sync.*\n", r"\tbar\.sync.*\n"])
def test_a_kernel_whose_lanes_do_not_meet_is_noticed(built, tmp_path, dropped):
    program, ptx, _ = built
    text, number = re.subn(dropped, "", ptx.read_text())
    assert number > 3
    broken = tmp_path / "broken.ptx"
    broken.write_text(text)
    done = run(program, broken, 1)
    assert done.returncode == 1 and "race" in done.stderr, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("arch", ["90a", "100"])
def test_machine_code_has_no_spills(built, tmp_path, arch):
    import build_cuda

    *_, nvcc = built
    command = [*build_cuda.base_command(nvcc), f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", SOURCE]
    done = subprocess.run(
        [*command, "-o", tmp_path / "x.cubin"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", said) == [("0", "0")] * 2, said
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == 2 and max(registers) <= REGISTERS, registers
