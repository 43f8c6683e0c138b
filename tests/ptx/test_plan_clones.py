"""The planner's kernel (tests/cuda/plan_clones.cu) on the PTX machine: the core's plans, nothing that two lanes touch
unordered, a ceiling of instructions; and ptxas takes it for both architectures without spills."""

from __future__ import annotations

import re
import subprocess

import planner_counts  # which finds build_cuda
import pytest

pytestmark = pytest.mark.balance

# A fifth above what they were when set: a layer's warp instructions of PTX, of all warps together. Two constructions
# are made side by side, so that the longest warp has half of what planning takes.
MOST = {
    "EP64 E256 +1 sigma 0.3": 88_000,
    "EP64 E256 +1 sigma 1.5": 110_000,
    "EP64 E256 +2 sigma 1.0": 106_000,
    "EP64 E256 +1 three warps": 101_000,
    "EP32 E256 +1 hot together": 235_000,
    "EP64 E256 +1 hot together": 233_000,
    "EP64 E256 +1 8 groups": 731_000,
    "EP8 E64 +2 sigma 1.0": 13_800,
}
REGISTERS = 232  # of 256 threads, so that the block fits an SM


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(program, PTX, nvcc)."""
    import build_cuda

    nvcc, why = build_cuda.find_nvcc()
    if not nvcc:
        pytest.skip(why)
    return *planner_counts.build(tmp_path_factory.mktemp("planner"), nvcc), nvcc


def test_the_kernel_plans_as_the_core_does(built):
    done = planner_counts.run(*built[:2])
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"(.*): 0 of 3 differ, [1-9]\d* clones, (\d+) warp instructions", done.stdout))
    assert set(found) == set(MOST), done.stdout
    above = {name: n for name, n in found.items() if int(n) > MOST[name]}
    assert not above, above


def test_counts_by_role_are_all_that_is_executed(built):
    """Of one layer a case: planning, sharing and the longest warp, as docs/balancer.md has them of three."""
    rows = planner_counts.counted(*built[:2], 1)
    assert [row["case"] for row in rows] == list(MOST)
    for row in rows:
        total = row["planning"] + row["sharing"]
        assert row["sharing"] > 1000 and total < MOST[row["case"]], row
        assert total / 8 < row["longest_warp"] < total, row


@pytest.mark.parametrize("dropped", [r"\tbar\.warp\.sync.*\n", r"\tbar\.sync.*\n"])
def test_a_kernel_whose_lanes_do_not_meet_is_noticed(built, tmp_path, dropped):
    program, ptx, _ = built
    text, number = re.subn(dropped, "", ptx.read_text())
    assert number > 3
    broken = tmp_path / "broken.ptx"
    broken.write_text(text)
    done = planner_counts.run(program, broken, 1)
    assert done.returncode == 1 and "race" in done.stderr, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("arch", ["90a", "100"])
def test_machine_code_has_no_spills(built, tmp_path, arch):
    import build_cuda

    *_, nvcc = built
    command = [*build_cuda.base_command(nvcc), f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", planner_counts.SOURCE]
    done = subprocess.run(
        [*command, "-o", tmp_path / "x.cubin"],
        cwd=planner_counts.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", said) == [("0", "0")] * 2, said
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == 2 and max(registers) <= REGISTERS, registers
