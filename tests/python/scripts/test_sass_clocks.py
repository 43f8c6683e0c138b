"""Clocks of a way through machine code: what depends waits, what does not is issued one a clock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import sass_clocks

ADD = "FADD R1, R2, R1"  # waits for the one before
FREE = ["FADD R10, R2, R3", "FADD R11, R2, R3", "FADD R12, R2, R3", "FADD R13, R2, R3"]


@pytest.mark.parametrize(
    "texts, clocks",
    [
        (FREE, 4),
        ([ADD], 4),
        ([ADD, *FREE], 5),  # the others are issued while it is waited for
        (["LDS.128 R4, [R2]", "FADD R1, R7, R3"], 31),  # the fourth word
        (["LDS.128 R4, [R2]", "FADD R1, R8, R3"], 2),  # beside it
        (["LDS.64 R4, [R2]", "MEMBAR.ALL.CTA", "FENCE.VIEW.ASYNC.S"], 30 + 20 + 20),
        (["SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ], R3", "@P1 BRA 0x10"], 31),
        (["SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ], RZ", ADD], 30),  # the next round's waits for this one
        (["ISETP.NE.AND P1, PT, R2, R3, PT", "@!P1 FADD R10, R2, R3"], 5),
        ([*FREE, "BRA 0x10"], 4 + 8),
        (["R2UR UR6, R2", "UBLKCP.G.S [UR6], [UR15], UR14"], 13),
        (["LDG.E R4, desc[UR4][R2.64]", "FADD R1, R4, R3"], 271),
        (["LD.E R4, desc[UR4][R2.64]", "LDG.E R5, desc[UR4][R4.64]", "FADD R1, R5, R3"], 541),  # one after the other
        (["LDG.E R4, desc[UR4][R2.64]", "LDG.E R5, desc[UR4][R2.64+0x4]", "FADD R1, R4, R3", "FADD R7, R5, R3"], 272),
        # A barrier is not behind the L2, as a fence is.
        (["LDG.E R4, desc[UR4][R2.64]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R9+URZ], R3", "@P1 BRA 0x10"], 32),
        (["LDG.E R4, desc[UR4][R2.64]", "MEMBAR.ALL.CTA"], 290),
    ],
    ids=str,
)
def test_a_round_of_a_loop(texts, clocks):
    assert sass_clocks.loop_clocks(texts) == clocks


def test_a_way_out_of_a_loop_waits_for_what_the_loop_began():
    loop = [*FREE, "LDS.128 R4, [R2]"]
    assert sass_clocks.way_clocks(loop, FREE) == 4
    assert sass_clocks.way_clocks(loop, ["FADD R1, R4, R3"]) == 30


@pytest.mark.parametrize(
    "text, written, read",
    [
        ("LDS.128 R44, [R48+0x10]", ["R44", "R45", "R46", "R47"], ["R48"]),
        ("@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R38+URZ], RZ", [], ["P0", "R38"]),
        ("LOP3.LUT P2, RZ, R41, 0x4, R39, 0xf8, !PT", ["P2"], ["R41", "R39"]),
        ("IMAD.WIDE.U32 R40, R84, R19, R40", ["R40"], ["R84", "R19", "R40"]),
        ("@P2 STS.128 [R0], R36", [], ["P2", "R0", "R36"]),
        ("ULDC.64 UR6, c[0x0][0x3c0]", ["UR6", "UR7"], []),
    ],
)
def test_what_an_instruction_reads_and_writes(text, written, read):
    assert sass_clocks.operands(text)[1:] == (written, read)


PREFETCH = ["MOV R4, R5", "LDG.E R5, desc[UR4][R2.64]", *FREE, *[ADD] * 80]  # the next round's, a round ahead


@pytest.mark.parametrize(
    "waits, clocks",
    [
        ({}, 326),  # the sums hide it
        ({0: (2,)}, 326),  # who uses it waits
        ({3: (2,)}, 326 + 264),  # who needs nothing of it, but waits for a load that is entered on the same scoreboard
        ({3: (1,)}, 326),  # another one
    ],
)
def test_loads_that_share_a_scoreboard_are_waited_for_together(waits, clocks):
    boards = [(2 if text.startswith("LDG") else None, waits.get(i, ())) for i, text in enumerate(PREFETCH)]
    assert sass_clocks.loop_clocks(PREFETCH, boards) == pytest.approx(clocks, abs=8)
