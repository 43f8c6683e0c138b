"""The comparison of templated code with its hand-written twin, on texts such as cuobjdump prints."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import twin_check


def text(**counts: tuple[int, int]) -> str:
    lines = []
    for arch, numbers in counts.items():
        lines.append(f"\tcode for {arch}\n\tarch = {arch}")
        for kernel, number in zip(twin_check.KERNELS, numbers, strict=True):
            lines.append(f"\t\tFunction : _ZN3hep{len(kernel)}{kernel}ENS_10TwinParamsEPNS_11CudaControlE")
            lines += [f"        /*{16 * i:04x}*/         @!P0 MOV R1, R2 ;   /* 0x00007 */" for i in range(number)]
            lines.append("        /*ffff0*/                   NOP ;   /* 0x00007 */")
    return "\n".join(lines)


def test_instructions_are_counted_by_kernel_and_architecture():
    assert twin_check.count(text(sm_90a=(5, 4), sm_100=(7, 9))) == {
        "sm_90a": {"templated": 5, "written": 4},
        "sm_100": {"templated": 7, "written": 9},
    }


def test_what_is_larger_than_its_twin_or_missing_is_named():
    assert not list(twin_check.complaints(twin_check.count(text(sm_90a=(110, 100), sm_100=(90, 100)))))
    (said,) = twin_check.complaints(twin_check.count(text(sm_90a=(100, 100), sm_100=(111, 100))))
    assert said.startswith("sm_100: the templated kernel has 111 instructions, its hand-written twin 100")
    assert len(list(twin_check.complaints(twin_check.count(text(sm_90a=(100, 0)))))) == 2
