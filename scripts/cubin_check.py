"""Inspects the machine code of the CUDA library, no GPU needed: every kernel for every architecture is there, within
its budget of registers and instructions, without stack, spills or local memory, and built from the instructions that
its design rests on (bulk copies, mbarriers, proxy fences, elected lanes); no short loop, as over peers, has a fence of
system scope in it; and the loops that add rows issue no more than their ceilings and take no more clocks than the
performance model charges (sass_reduce.py; --write-table writes what it charges, and the table of docs/cuda.md,
cubin_table.py). So do the ways round the loops of the
copy roles (sass_roles.py) and those over lines (sass_lines.py). The exchange kernel's loops over tokens have their
loads under way together, divide by nothing, and keep to ceilings too (sass_route.py). And no host function of ours
calls exit: where a template calls a device function on the host, nvcc compiles that call, without a word, into
exit(1).

    python scripts/cubin_check.py [LIBRARY] [--rail nvshmem] [--arch sm_90a] [--loops] [--json FILE] [--write-table]
    python scripts/cubin_check.py --planted

--rail nvshmem inspects the NVSHMEM library instead, whose kernels call NVSHMEM's functions: these have a stack of their
own, on which combine keeps words over such a call, and ceilings of their own. --arch: the library has that
architecture alone. --planted compiles tests/cuda/host_stub.cu, whose host half makes such a call, and exits with 0
only if the check finds it.

Prints a table and what is wrong; exits with 1 if anything is. Needs cuobjdump and nvdisasm: from CUDA_HOME, PATH or
the triton package (pip install triton), which carries both; and objdump and readelf, which came with the linker."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import cubin_table
import sass_lines
import sass_loops
import sass_reduce
import sass_roles
import sass_route

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("sm_90a", "sm_100")
RAILS = {"mapped": ("P2PDevice", "LoopbackDevice"), "nvshmem": ("NvshmemDevice",)}
LIBRARIES = {"mapped": "libhybrid_ep_cuda.so", "nvshmem": "libhybrid_ep_nvshmem.so"}

# Bulk loads and stores, arrivals and waits, elected lanes, and the fences that hand memory from one proxy to the other:
# .S before a stage is refilled or an output tile is stored, .G between an acquired flag and the loads it licenses.
COPIES = ("UBLKCP.S.G", "UBLKCP.G.S", "SYNCS", "ELECT", "FENCE.VIEW.ASYNC.S")
ACQUIRES = ("FENCE.VIEW.ASYNC.G",)
# The last of the warps that stored into other ranks' memory says so to those ranks: counted at system scope.
SPEAKS_FOR_ALL = ("ATOMG.STRONG.SYS",)
# Lines: a vector of 16 bytes a lane, by stores and loads that every rank sees as they are (docs/latency.md).
LINES = ("STG.128.STRONG.SYS", "LDG.128.STRONG.SYS")


@dataclass(frozen=True)
class Budget:
    """registers: so that one block of the kernel always fits an SM. instructions: a tenth above what it was when the
    number was set; a loop that starts to unroll shows here."""

    registers: int
    instructions: int
    expected: tuple[str, ...]
    stack: int = 0
    forbidden: tuple[str, ...] = ("LDL", "STL", "BPT.TRAP")  # local memory; a trap would take the context with it
    local_loads: int = 0  # at most, where they are not forbidden


NODES = Budget(128, 0, (*LINES, *ACQUIRES), forbidden=("BPT.TRAP",))
BUDGETS = {
    "exchange": Budget(80, 7100, ("ELECT", *ACQUIRES)),
    # Deliver is inlined at each of the four places that come to a group of rows.
    "dispatch": Budget(128, 9800, (*COPIES, *ACQUIRES, *SPEAKS_FOR_ALL)),
    "combine": Budget(168, 11000, (*COPIES, *ACQUIRES, *SPEAKS_FOR_ALL, "LDS.128", "STS.128")),
    # Constructions of a plan are inlined at each place that makes one. 224 registers of 256 threads fit an SM.
    "balance": Budget(224, 22200, ("ELECT", *ACQUIRES)),
    "latency_dispatch": Budget(128, 11000, LINES),
    "latency_combine": Budget(96, 6700, LINES),
    # Of several nodes, with the rows of the rail: lanes of a block of 16 warps have 128 registers each. On sm_90a a
    # combine keeps some words in local memory, and over the rail of tests a dispatch two.
    "latency_dispatch_nodes": replace(NODES, instructions=18600, stack=8, local_loads=4),
    "latency_combine_nodes": replace(NODES, instructions=16300, stack=24, local_loads=40),
    # Of a spare slot the last warp to store speaks for all, of gradients the last to have read them.
    "push_weights": Budget(96, 3000, (*COPIES, *ACQUIRES, *SPEAKS_FOR_ALL)),
    "await_weights": Budget(80, 1150, ("ELECT", *ACQUIRES)),
    "collect_gradients": Budget(168, 3200, ("ELECT", *ACQUIRES, *SPEAKS_FOR_ALL)),
    "push_nodes": Budget(128, 11000, (*COPIES, *ACQUIRES)),
    "collect_nodes": Budget(200, 11300, ("ELECT", *ACQUIRES, *SPEAKS_FOR_ALL)),
}
# A fence of system scope takes about a microsecond: one a group of flags (Arch::st_release_sys_each), not one a flag. A
# loop over peers has 13 to 42 instructions with a fence each; the shortest loop that may have one, over chunks, has 96.
SYSTEM_FENCE, SHORT_LOOP = r"^(@!?U?P\w+\s+)?MEMBAR\.\w+\.SYS\b", 64
LINE = 128  # bytes of shared memory
# Functions that kernels call and that are not inlined lie beside them in the code; NVSHMEM's quiet must not.
FORBIDDEN_FUNCTION = r"Function : (\S*nvshmem\S*quiet\S*)"
# NVSHMEM's own code is not counted. 176 registers of 352 threads, 248 of 224 or 112 of 512 still leave a block its SM.
# What a role of combine keeps over a call of NVSHMEM's, which is not inlined, goes to the stack, though not in the
# loops over rows.
NVSHMEM_REGISTERS = {"combine": 176, "dispatch": 144, "exchange": 112, "balance": 240}
NVSHMEM_REGISTERS |= {name: 128 for name in BUDGETS if name.startswith(("latency_", "await_"))}
NVSHMEM_REGISTERS |= {name: 152 for name in BUDGETS if name.startswith("push_")}
NVSHMEM_REGISTERS |= {"collect_gradients": 192, "collect_nodes": 248}
NVSHMEM_BUDGETS = {
    name: replace(
        budget,
        registers=NVSHMEM_REGISTERS[name],
        instructions=budget.instructions + 500,  # its calls, with what is saved around them
        stack=480,  # of 3.8; 3.7 has 64 bytes less
        forbidden=("BPT.TRAP",) if name in ("combine", "latency_combine_nodes") else ("LDL", "BPT.TRAP"),
        local_loads=112,
    )
    for name, budget in BUDGETS.items()
    if name in NVSHMEM_REGISTERS
}


def budgets_of(rail):
    return NVSHMEM_BUDGETS if rail in RAILS["nvshmem"] else BUDGETS


@dataclass
class Kernel:
    name: str
    rail: str
    arch: str
    registers: int = 0
    stack: int = 0
    shared: int = 0  # what a block has beside what a launch asks for
    local: int = 0
    instructions: int = 0
    opcodes: Counter = field(default_factory=Counter)
    system_fences: int = 0
    fences_in_short_loops: tuple = ()
    row_loops: list = field(default_factory=list)
    route: sass_route.RouteLoops | None = None
    lines: dict = field(default_factory=dict)  # of the latency path

    @property
    def title(self):
        return f"{self.name}<{self.rail}> {self.arch}"


def as_json(kernel):
    # dataclasses.asdict would make a Counter of pairs of the Counter.
    return {
        **vars(kernel),
        "opcodes": dict(kernel.opcodes),
        "row_loops": [asdict(loop) for loop in kernel.row_loops],
        "route": kernel.route and asdict(kernel.route),
    }


def find_tools():
    """The folder that holds cuobjdump and nvdisasm, or None."""
    folders = [Path(os.environ["CUDA_HOME"]) / "bin"] if os.environ.get("CUDA_HOME") else []
    folders += [Path(found).parent] if (found := shutil.which("cuobjdump")) else []
    folders.append(Path(sysconfig.get_path("purelib")) / "triton" / "backends" / "nvidia" / "bin")
    return next((f for f in folders if (f / "cuobjdump").is_file() and (f / "nvdisasm").is_file()), None)


def run(tools, library, *options):
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(
        [str(tools / "cuobjdump"), *options, str(library)], env=environment, capture_output=True, text=True, check=True
    ).stdout


def kernel_of(symbol, arch):
    """The Kernel that a mangled entry point names, None for anything else."""
    match = re.match(r"_ZN3hep\d+([a-z_]+)_entryINS_(\d+)(\w+)", symbol)
    return Kernel(match[1], match[3][: int(match[2])], arch) if match else None


def parse_resources(text):
    """{(kernel, rail, arch): Kernel} from cuobjdump --dump-resource-usage."""
    kernels, arch, kernel = {}, "", None
    for line in text.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            kernel = kernel_of(match[1], arch)
        elif kernel and (match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)):
            kernel.registers, kernel.stack, kernel.shared, kernel.local = map(int, match.groups())
            kernels[kernel.name, kernel.rail, arch] = kernel
            kernel = None
    return kernels


def count_instructions(text, kernels):
    """Adds the opcodes of cuobjdump -sass to the kernels."""
    arch, kernel, code = "", None, {}
    for line in text.splitlines():
        if opcode := opcode_of(line):  # first, for nearly all lines are instructions
            if kernel:
                kernel.opcodes[opcode] += 1
                kernel.instructions += opcode != "NOP"
                code.setdefault((kernel.name, kernel.rail, arch), []).append(sass_loops.instruction_of(line))
        elif match := re.match(r"\s*arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            named = kernel_of(match[1], arch)
            kernel = kernels.get((named.name, named.rail, arch)) if named else None
    for key, instructions in code.items():
        instructions = [i for i in instructions if i]
        is_fence = re.compile(SYSTEM_FENCE).search
        kernels[key].system_fences = sum(is_fence(text) is not None for _, text in instructions)
        kernels[key].fences_in_short_loops = tuple(sass_loops.in_short_loops(instructions, SYSTEM_FENCE, SHORT_LOOP))
        if kernels[key].name in sass_reduce.KERNELS:
            kernels[key].row_loops = sass_reduce.row_loops(instructions)
        if kernels[key].name in sass_lines.KERNELS:
            kernels[key].lines = sass_lines.issued(kernels[key].name, instructions)
        if kernels[key].name == "exchange":
            kernels[key].route = sass_route.of(instructions)


OPCODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def opcode_of(line):
    """The opcode that a line of cuobjdump -sass shows, None where it shows none."""
    match = OPCODE.match(line)
    return match and match[1]


def has(opcodes, name):
    """Whether some opcode is `name` or a form of it: LDS.128 also as LDS.U.128, SYNCS also as SYNCS.ARRIVE. The order
    of the parts counts: UBLKCP.S.G loads, UBLKCP.G.S stores."""
    wanted = re.compile(r"(\.\w+)*\.".join(map(re.escape, name.split("."))) + r"(\.\w+)*")
    return any(wanted.fullmatch(opcode) for opcode in opcodes)


def problems(kernel):
    budget = budgets_of(kernel.rail)[kernel.name]
    if kernel.shared % LINE:
        yield f"{kernel.shared} bytes of shared memory: stages behind them are not at multiples of {LINE}"
    if kernel.registers > budget.registers:
        yield f"{kernel.registers} registers, at most {budget.registers}"
    if kernel.stack > budget.stack or kernel.local:
        yield (
            f"{kernel.stack} bytes of stack and {kernel.local} of local memory, must have "
            f"{f'at most {budget.stack} and none' if budget.stack else 'none'}"
        )
    if kernel.instructions > budget.instructions:
        yield f"{kernel.instructions} instructions, at most {budget.instructions}"
    for name in budget.forbidden:
        if has(kernel.opcodes, name):
            yield f"uses {name}"
    local_loads = sum(number for opcode, number in kernel.opcodes.items() if opcode.startswith("LDL"))
    if local_loads > budget.local_loads:
        yield f"{local_loads} loads of local memory, at most {budget.local_loads}"
    for name in budget.expected:
        if not has(kernel.opcodes, name):
            yield f"has no {name}"
    if kernel.rail not in RAILS["nvshmem"]:  # the library's code has its own loops
        for text, length in kernel.fences_in_short_loops:
            yield f"{text} in a loop of {length} instructions; release a group of flags with one fence"
    yield from sass_reduce.problems(kernel.name, kernel.row_loops, kernel.rail in RAILS["nvshmem"])
    if kernel.route and kernel.rail not in RAILS["nvshmem"]:
        yield from sass_route.problems(kernel.route)


def check(resources, sass, rails=RAILS["mapped"], architectures=ARCHITECTURES):
    """(kernels, complaints) of the texts of cuobjdump."""
    kernels = parse_resources(resources)
    count_instructions(sass, kernels)
    complaints = [
        f"{name}<{rail}> {arch}: is not in the library"
        for rail in rails
        for name in budgets_of(rail)
        for arch in architectures
        if (name, rail, arch) not in kernels
    ]
    complaints += [f"{k.title}: {problem}" for k in kernels.values() for problem in problems(k)]
    complaints += [
        f"{function}: waits for all queue pairs one after the other, and ends the context where a link is broken"
        for function in sorted(set(re.findall(FORBIDDEN_FUNCTION, sass, re.MULTILINE)))
    ]
    return list(kernels.values()), complaints


def host_exits(disassembly):
    """Our host functions, by their symbols, that call exit, from the text of objdump -d. Others may: what NVSHMEM's
    static half or the CUDA runtime does is not ours."""
    function, found = "", set()
    for line in disassembly.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = match[1]
        elif re.search(r"<exit(@\w+)?>", line) and re.search(r"3hep[A-Z0-9]|^hep_", function):
            found.add(function)
    return sorted(found)


def disassemble(library):
    objdump = shutil.which("objdump")
    if not objdump:
        sys.exit("cubin_check: needs objdump; binutils carries it, beside the linker")
    return subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout


def check_host(library):
    return [
        f"{function}: a host function calls exit; does it call one that is __device__ alone?"
        for function in host_exits(disassemble(library))
    ]


def check_planted():
    """Exits with 0 if the check finds the call that tests/cuda/host_stub.cu makes."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import build_cuda

    nvcc, why = build_cuda.find_nvcc()
    if not nvcc:
        sys.exit(f"cubin_check: {why}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "host_stub.so"
        command = [
            *build_cuda.base_command(nvcc),
            "-gencode=arch=compute_90a,code=compute_90a",
            "-shared",
            "-cudart=none",
            "tests/cuda/host_stub.cu",
            "-o",
            str(out),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        complaints = check_host(out)
    print("\n".join(complaints))
    print(f"cubin_check: {len(complaints)} complaints" + (", as there must be" if complaints else ""))
    sys.exit(not complaints)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=Path)
    parser.add_argument("--rail", choices=RAILS, default="mapped")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="the only one that the library has [all]")
    parser.add_argument(
        "--loops",
        action="store_true",
        help="also print what the loops that add rows, those of the copy roles and those of the exchange issue and "
        "take, over a mapped rail",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument(
        "--write-table",
        action="store_true",
        help=f"write what those loops take into {sass_reduce.TABLE.name}, {sass_roles.TABLE.name}, "
        f"{sass_route.TABLE.name} and {sass_lines.TABLE.name}, which the performance model charges, and the kernels' "
        f"numbers into {cubin_table.TABLE.name} and {cubin_table.PAGE.name}; of --rail nvshmem these alone",
    )
    parser.add_argument("--planted", action="store_true", help="only show that the check of host functions can fail")
    args = parser.parse_args()
    if args.planted:
        check_planted()
    binary = args.binary or ROOT / "hybrid_ep" / LIBRARIES[args.rail]
    tools = find_tools()
    if not tools:
        sys.exit("cubin_check: needs cuobjdump and nvdisasm; the triton package carries both (pip install triton)")
    if not binary.is_file():
        sys.exit(f"cubin_check: {binary} is not there; scripts/build_cuda.py builds it")
    architectures = (args.arch,) if args.arch else ARCHITECTURES
    kernels, complaints = check(
        run(tools, binary, "--dump-resource-usage"), run(tools, binary, "-sass"), RAILS[args.rail], architectures
    )
    complaints += check_host(binary)
    roles = {}  # over NVSHMEM they call its functions, whose code is not ours to bound
    if args.rail == "mapped":
        roles, missing = sass_roles.of_library(tools, binary, architectures)
        complaints += [*missing, *sass_roles.problems(roles)]
    if args.write_table:
        cubin_table.write_table(kernels)
    else:
        complaints += cubin_table.table_problems(kernels)
    if args.rail != "mapped":
        pass  # the loops' tables are of the kernels over mapped memory
    elif args.write_table:
        sass_reduce.write_table(kernels)
        sass_roles.write_table(roles)
        sass_route.write_table(kernels)
        sass_lines.write_table(kernels)
    else:
        complaints += [
            *sass_reduce.table_problems(kernels),
            *sass_roles.table_problems(roles),
            *sass_route.table_problems(kernels),
            *sass_lines.table_problems(kernels),
        ]
    print(
        f"{'kernel':<36} {'registers':>9} {'stack':>6} {'local':>6} {'instructions':>12} {'bulk copies':>11} "
        f"{'system fences':>13}"
    )
    for k in sorted(kernels, key=lambda k: (k.rail, k.arch, k.name)):
        copies = sum(n for o, n in k.opcodes.items() if o.startswith("UBLKCP"))
        print(
            f"{k.title:<36} {k.registers:>9} {k.stack:>6} {k.local:>6} {k.instructions:>12} {copies:>11} "
            f"{k.system_fences:>13}"
        )
    if args.loops and args.rail == "mapped":  # whose tiles the bytes a second are of
        print(sass_reduce.HEADER)
        for k in kernels:
            print("\n".join(sass_reduce.report(k.title, k.row_loops)), end="\n" if k.row_loops else "")
        print(sass_roles.HEADER)
        print("\n".join(sass_roles.report(roles)))
        for k in kernels:
            if k.route:
                print("\n".join(sass_route.report(k.title, k.route)))
    if args.json:
        rows = [{**as_json(k), "roles": sass_roles.of_kernel(roles, k)} for k in kernels]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(complaints))
    print(f"cubin_check: {len(kernels)} kernels, {len(complaints)} complaints")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
