"""The inspection of machine code, on texts such as cuobjdump prints: it passes what is good and names what is not."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "cubin_check.py"
sys.path.insert(0, str(_SCRIPT.parent))  # its neighbours
_spec = importlib.util.spec_from_file_location("cubin_check", _SCRIPT)
cubin_check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cubin_check)

ALL = (
    "UBLKCP.S.G",
    "UBLKCP.G.S",
    "SYNCS.ARRIVE.TRANS64",
    "ELECT",
    "FENCE.VIEW.ASYNC.S",
    "FENCE.VIEW.ASYNC.G",
    "ATOMG.E.ADD.64.STRONG.SYS",
    "LDS.128",
    "STS.128",
    "STG.E.128.STRONG.SYS",
    "LDG.E.128.STRONG.SYS",
)


def symbol(kernel: str, rail: str) -> str:
    return f"_ZN3hep{len(kernel) + 6}{kernel}_entryINS_{len(rail)}{rail}EEEvNS_14DispatchParamsET_PNS_11CudaControlE"


WIDEN = {
    "bf16": ["LOP3.LUT R1, R1, 0xffff0000, RZ, 0xc0, !PT"] * 8,
    "fp16": ["HADD2.F32 R1, -RZ, R1.H0_H0"] * 16,
    "fp32": [],
}
AWAY = ["NOP"] * 100  # a way that a waiting warp goes


LOOPS = tuple(WIDEN)
SCALED = tuple(f"{name}_scaled" for name in WIDEN)


def row_code(rows=(*LOOPS, *SCALED), row=(), tile=()) -> list[str]:
    """SASS of a loop over rows for each of these types, with a tile's end that all share. `row` is issued for every row
    as well, `tile` for every tile. '>NAME' is a branch's target, 'NAME:' a place."""
    code = ["tile:"]
    for name in rows:
        code += [f"@P1 BRA >{name}_row"]
    code += ["EXIT"]
    for name in rows:
        code += [
            f"{name}_row:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2",
            f"@P0 BRA >{name}_here",
            *AWAY,
            f"{name}_here:",
            "LDS.128 R4, [R1]",
            "LDS.128 R8, [R1]",
            *WIDEN[name.split("_")[0]],
            *["FMUL R1, R2, R3"] * (16 * name.endswith("scaled")),
            *["FADD R1, R2, R1"] * 16,
            *row,
            "MEMBAR.ALL.CTA",
            "FENCE.VIEW.ASYNC.S",
            "BRA.DIV UR5, >away",
            "@P2 BRA >end",
            f"BRA >{name}_row",
        ]
    code += [
        "end:",
        *["F2FP.BF16.F32.PACK_AB R1, R2, R3"] * 8,
        *tile,
        "UBLKCP.G.S [UR6], [UR15], UR14",
        "BRA >tile",
        "away:",
        *AWAY,
        "EXIT",
    ]
    return placed(code)


def placed(code: list[str]) -> list[str]:
    """Addresses in place of the names of places."""
    places = {
        line[:-1]: 16 * sum(not c.endswith(":") for c in code[:i]) for i, line in enumerate(code) if line.endswith(":")
    }
    return [re.sub(r">(\w+)", lambda m: f"{places[m[1]]:#x}", line) for line in code if not line.endswith(":")]


AHEAD = [f"LDG.E R{i}, desc[UR4][R40.64]" for i in range(20, 28)]
USE = ["IADD3 R1, R20, R21, RZ"]


def route_code(loads=(*AHEAD, *USE), walk=(), record=(), turn=(), turns=4) -> list[str]:
    """SASS of an exchange kernel's loops: lists, a walk and its turns, three sums, records. `loads` are the walk's;
    `walk`, `turn` and `record` are issued in those loops as well."""
    turn = ["LDS R1, [R2]"] * 3 + ["STS [R2], R1"] * 3 + [*turn]
    code = [*AHEAD, "FSEL R1, R20, R21, P0", "FSEL R1, R20, R21, P0"]
    code += ["walk:", *loads, *walk]
    for i in range(turns):
        code += [f"turn{i}:", *turn, f"@P1 BRA >turn{i}"]
    code += ["@P0 BRA >walk"]
    for i in range(3):
        code += [f"sum{i}:", *AHEAD, *USE, f"@P0 BRA >sum{i}"]
    code += ["record:", *AHEAD[:3], *["LDS R1, [R2]"] * 6, *["STG.E [R2], R1"] * 10, *record, "@P0 BRA >record"]
    return placed(code)


def library(
    opcodes=ALL,
    registers=90,
    stack=0,
    local=0,
    leave_out=None,
    repeat=1,
    rail="mapped",
    rows=None,
    route=None,
    shared=1152,
):
    """The two texts of a library in which every kernel consists of these opcodes."""
    resources, sass = [], []
    for arch in cubin_check.ARCHITECTURES:
        resources.append(f"arch = {arch}")
        sass.append(f"\tcode for {arch}\narch = {arch}")
        for rail_type in cubin_check.RAILS[rail]:
            for kernel, budget in cubin_check.budgets_of(rail_type).items():
                if (kernel, rail_type, arch) == leave_out:
                    continue
                resources.append(
                    f" Function {symbol(kernel, rail_type)}:\n  REG:{min(registers, budget.registers + 1)}"
                    f" STACK:{stack} SHARED:{shared} LOCAL:{local} CONSTANT[0]:1016"
                )
                sass.append(f"\t\tFunction : {symbol(kernel, rail_type)}")
                code = row_code() if rows is None else rows
                code = code if kernel == "combine" else []
                if kernel == "exchange":
                    code = route_code() if route is None else route
                code = code + [f"@!UP0 {name} R1, R2" for name in opcodes * repeat]
                sass += [
                    f"        /*{16 * i:04x}*/                   {text} ;   /* 0x00007 */"
                    for i, text in enumerate(code)
                ]
    return "\n".join(resources), "\n".join(sass)


def complaints(**changes) -> list[str]:
    return cubin_check.check(*library(**changes))[1]


def test_good_code_passes():
    kernels, said = cubin_check.check(*library(registers=70))
    assert said == []
    assert len(kernels) == len(cubin_check.BUDGETS) * 4  # two rails, two architectures
    assert all(k.instructions == len(ALL) for k in kernels if k.name == "dispatch")
    assert all(k.registers == 70 for k in kernels)


def test_a_row_is_counted_the_short_way_round():
    kernels, _ = cubin_check.check(*library())
    combine = next(k for k in kernels if k.name == "combine")
    counted = {k.row: (k.issued, k.shared_loads, k.fences, k.constant_loads) for k in combine.row_loops if not k.scaled}
    assert counted == {"bf16": (33, 2, 2, 0), "fp16": (41, 2, 2, 0), "fp32": (25, 2, 2, 0)}
    bf16 = combine.row_loops[0]
    assert bf16.tile == 43  # 20 from the sums to the end, 10 there, the choice of a type, 12 to the sums
    assert bf16.whole and not bf16.scaled
    assert bf16.gigabytes_per_second == pytest.approx(5.251 * 8192 / (4.251 * 33 + 43) * 1.755, rel=1e-3)


@pytest.mark.parametrize(
    "code, words",
    [
        ({"row": ["MOV R1, R2"] * 86}, "bf16 rows: 119 instructions a row, at most 118"),
        ({"row": ["LDS.128 R1, [R2]"] * 5}, "bf16 rows: 7 shared loads a row, at most 6"),
        (
            {"row": ["LDC R1, c[0x0][0x3c4]", "ULDC UR5, c[0x0][0x3c4]", "@P0 LDC R1, c[0x0][0x3c8]"]},
            "3 constant loads",
        ),
        ({"row": ["MEMBAR.ALL.CTA"]}, "3 fences a row, at most 2"),
        ({"tile": ["MOV R1, R2"] * 290}, "instructions a tile, at most 325"),
        ({"row": ["MOV R1, R2"] * 100}, "bf16 scaled rows: 149 instructions a row, at most 145"),
        ({"rows": (*LOOPS[:-1], *SCALED)}, "0 loops over fp32 rows found, at least 1"),
    ],
)
def test_loops_over_rows_that_grow_are_named(code, words):
    said = complaints(rows=row_code(**code))
    assert any(line.startswith("combine<P2PDevice> sm_90a") and words in line for line in said), said


def test_the_loops_of_an_exchange_are_counted_with_their_turns():
    kernels, said = cubin_check.check(*library(registers=70))
    exchange = next(k for k in kernels if k.name == "exchange")
    assert said == [] and exchange.route.runs == 5
    assert exchange.route.walk == 9 + 4 * 7 + 1 + 3 * 4 * 7  # a warp goes round a turn's loop four times in a step
    assert (exchange.route.list, exchange.route.record) == (9, 20)
    eight, many = (sum(cubin_check.sass_route.exchange_parts(exchange.route, *w).values()) for w in ((8, 1), (64, 8)))
    assert 5 < eight < many


def test_loops_of_an_exchange_that_the_model_does_not_charge_are_named():
    kernels, _ = cubin_check.check(*library(registers=70))
    route = cubin_check.sass_route
    said = list(route.table_problems(kernels))  # the planted loops are far shorter than the library's
    table = json.loads(route.TABLE.read_text())
    walk = table["sm_90a"]["walk"]
    assert any(line.startswith(f"exchange sm_90a: 122 instructions a walk, {walk} in route_loops") for line in said)
    assert route.table(kernels).keys() == table.keys()


@pytest.mark.parametrize(
    "code, words",
    [
        ({"loads": (*AHEAD[:3], "@P3 BRA >walk", *AHEAD[3:])}, "4 places have 6 loads under way"),
        ({"loads": (*AHEAD[:4], *USE, *AHEAD[4:])}, "4 places have 6 loads under way"),
        ({"loads": [f"LDG.E R{i + 1}, desc[UR4][R{i}.64]" for i in range(20, 28)]}, "4 places have 6 loads under way"),
        ({"walk": ["I2F.U32.RP R0, R17", "MUFU.RCP R0, R0"]}, "a division in a loop (40 instructions"),
        ({"record": ["CALL.REL.NOINC R4"]}, "a division in a loop (21 instructions"),
        ({"turn": ["MOV R1, R2"] * 60}, "1082 instructions a walk, at most"),
        ({"record": ["MOV R1, R2"] * 461}, "481 instructions a record, at most"),
        ({"turns": 3}, "no walk found"),
    ],
)
def test_loops_of_an_exchange_that_wait_or_divide_are_named(code, words):
    said = complaints(route=route_code(**code), registers=70)
    assert any(line.startswith("exchange<P2PDevice> sm_90a") and words in line for line in said), said


def test_a_wait_may_divide():
    polls = ["MOV R1, R2", "LDG.E.64.STRONG.SYS R20, desc[UR4][R40.64]", "MUFU.RCP R0, R0"]
    code = route_code()
    at = len(code)
    assert complaints(route=[*code, *polls, f"@P0 BRA {16 * at:#x}"], registers=70) == []
    assert complaints(route=[*code, polls[0], polls[2], f"@P0 BRA {16 * at:#x}"], registers=70) != []


def test_each_kernel_has_its_loops():
    said = complaints(rows=row_code(rows=LOOPS), registers=70)
    assert {line.split("<")[0] for line in said} == {"combine"}
    assert "combine<P2PDevice> sm_90a: 0 loops over bf16 scaled rows found, at least 1" in said


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"registers": 129}, "129 registers, at most 128"),
        ({"stack": 32}, "32 bytes of stack"),
        ({"local": 8}, "8 of local memory"),
        ({"opcodes": (*ALL, "LDL.64")}, "uses LDL"),
        ({"opcodes": (*ALL, "BPT.TRAP")}, "uses BPT.TRAP"),
        ({"opcodes": ALL[1:]}, "has no UBLKCP.S.G"),
        (
            {"opcodes": tuple(o for o in ALL if "ASYNC.G" not in o)},
            "combine<P2PDevice> sm_90a: has no FENCE.VIEW.ASYNC.G",
        ),
        (
            {"opcodes": tuple(o.replace("STRONG.SYS", "STRONG.GPU") for o in ALL)},
            "dispatch<P2PDevice> sm_90a: has no ATOMG.STRONG.SYS",
        ),
        ({"repeat": 700}, "instructions, at most"),
        ({"leave_out": ("dispatch", "P2PDevice", "sm_100")}, "dispatch<P2PDevice> sm_100: is not in the library"),
    ],
)
def test_what_is_wrong_is_named(changes, words):
    said = complaints(**changes)
    assert any(words in line for line in said), said


def test_stages_begin_at_lines_of_shared_memory():
    assert len(said := complaints(registers=70, shared=1056)) >= 26 and "1056 bytes of shared memory" in said[0]


def test_kernels_that_call_nvshmem_may_have_its_stack_and_nothing_more():
    def said(**changes):
        return cubin_check.check(*library(rail="nvshmem", **changes), cubin_check.RAILS["nvshmem"])[1]

    assert said(registers=70, stack=352, opcodes=(*ALL, "STL.64")) == []
    assert any("512 bytes of stack" in line for line in said(stack=512))
    assert any("uses LDL" in line for line in said(opcodes=(*ALL, "LDL")))
    assert any("dispatch<NvshmemDevice> sm_90a: 145 registers" in line for line in said(registers=200))
    assert len(cubin_check.check(*library(rail="nvshmem"), cubin_check.RAILS["nvshmem"])[0]) == 13 * 2


def test_a_kernel_that_waits_for_nvshmems_queue_pairs_is_named():
    resources, sass = library(rail="nvshmem", registers=70)
    quiet = "_Z14nvshmemi_quietIL13threadgroup_t0EEviPii"
    said = cubin_check.check(resources, f"{sass}\n\t\tFunction : {quiet}\n", cubin_check.RAILS["nvshmem"])[1]
    assert len(said) == 1 and said[0].startswith(f"{quiet}: waits for all queue pairs")


def test_a_library_for_one_architecture_needs_no_other():
    texts = library(registers=70, leave_out=("dispatch", "P2PDevice", "sm_100"))
    assert cubin_check.check(*texts)[1] == ["dispatch<P2PDevice> sm_100: is not in the library"]
    assert cubin_check.check(*texts, architectures=("sm_90a",))[1] == []


def test_kernels_that_need_no_acquire_may_lack_its_fence():
    said = complaints(opcodes=tuple(o for o in ALL if "ASYNC.G" not in o), registers=70)
    others = {"push_weights", "await_weights", "collect_gradients", "push_nodes", "collect_nodes"}
    others |= {"latency_dispatch_nodes", "latency_combine_nodes"}
    assert {line.split("<")[0] for line in said} == {"balance", "exchange", "dispatch", "combine", *others}


def test_lines_are_vectors_that_every_rank_sees():
    said = complaints(
        opcodes=tuple("LDG.E.64.STRONG.SYS" if o == "LDG.E.128.STRONG.SYS" else o for o in ALL), registers=70
    )
    by_lines = {"latency_dispatch", "latency_combine", "latency_dispatch_nodes", "latency_combine_nodes"}
    assert {line.split("<")[0] for line in said} == by_lines
    assert all(line.endswith("has no LDG.128.STRONG.SYS") for line in said)


def looping(*body: str) -> str:
    """The SASS of a loop with that body, then one fence behind it."""
    lines = ["MOV R1, R2", *body, "@P0 BRA 0x10", "MEMBAR.ALL.SYS", "EXIT"]
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ;    /* 0x00007 */" for i, line in enumerate(lines))


def kernel_with(text: str):
    key = ("exchange", "P2PDevice", "sm_90a")
    kernels = {key: cubin_check.Kernel(*key)}
    cubin_check.count_instructions(f"arch = sm_90a\n\t\tFunction : {symbol(key[0], key[1])}\n{text}", kernels)
    return kernels[key]


def test_a_system_fence_in_a_loop_over_peers_is_named():
    fenced = kernel_with(looping("LDG.E R2, [R4]", "@!P1 MEMBAR.ALL.SYS", "ST.E.STRONG.SYS [R4], R2"))
    assert fenced.system_fences == 2  # the second is behind the loop
    assert fenced.fences_in_short_loops == (("@!P1 MEMBAR.ALL.SYS", 4),)
    assert any("MEMBAR.ALL.SYS in a loop of 4 instructions" in said for said in cubin_check.problems(fenced))


@pytest.mark.parametrize(
    "body",
    [("MEMBAR.ALL.GPU",), ("MEMBAR.SC.CTA", "LDG.E R2, [R4]"), ("MEMBAR.ALL.SYS", *["IADD3 R1, R1, R1, RZ"] * 64)],
)
def test_narrower_fences_and_long_loops_pass(body):
    assert kernel_with(looping(*body)).fences_in_short_loops == ()


DISASSEMBLY = """
0000000000001000 <_ZN3hep4cuda12CudaExecutorINS_9P2PDeviceEE8exchangeERKNS_14ExchangeParamsE>:
    1000:\tmov    $0x1,%edi
    1005:\tcall   1f0 <exit@plt>

0000000000002000 <_ZN3hep4cuda5otherEv>:
    2000:\tcall   300 <exit_group_of_ours>

0000000000003000 <nvshmemi_get_p2p_attrs>:
    3000:\tcall   1f0 <exit@plt>

0000000000004000 <hep_cuda_entry>:
    4000:\tjmp    1f0 <exit@plt>
"""


def test_a_host_function_of_ours_that_calls_exit_is_named_and_those_of_others_are_not():
    assert cubin_check.host_exits(DISASSEMBLY) == [
        "_ZN3hep4cuda12CudaExecutorINS_9P2PDeviceEE8exchangeERKNS_14ExchangeParamsE",
        "hep_cuda_entry",
    ]
    assert cubin_check.host_exits(DISASSEMBLY.replace("<exit@plt>", "<abort@plt>")) == []
