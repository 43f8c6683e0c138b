"""How many instructions each role of a kernel executes: the warp instructions of the PTX, counted by the machine.

    python tests/ptx/counts.py [--nodes 1] [--ranks 2] [--tokens 64] [--hidden 1024] [--topk 4] [--experts 4]
                               [--target 90] [--seed 1] [--json FILE]

One dispatch with permute and one combine with unpermute of a world of virtual ranks. A role is the first file of
csrc/roles on the way from the kernel to an instruction, by the calls that were inlined (ptx_lines.py); what lies
outside them is the kernel's. Polls depend on who waits for whom: an instruction in a wait is counted as such and is
no part of a role's work. PTX is not machine code: ptxas fuses, unrolls and removes.

The JSON: {"world": {...}, "tokens", "rows", "payload_kib": of all ranks, "roles": [{"kernel", "role",
"warp_instructions", "lanes": mean of those that take part, "per_token", "per_row", "per_kib", "waiting"}]}. Rows are
those that the experts receive; payload is the rows' bytes, once."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("", "tests/ptx", "tests/gpu", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))
WAIT = re.compile(r"\d(wait_|look_up|poll_|mbar_wait|mbar_test|expire|leave|nanosleep|try_wait)")


@dataclass(frozen=True)
class Line:
    """Executed instructions of one line of PTX. kernel: its short name; entry: as PTX has it; places: see ptx_lines."""

    kernel: str
    entry: str
    number: int
    text: str
    places: tuple
    threads: int
    warps: int

    @property
    def role(self) -> str:
        files = [p.file for p in self.places]
        return next((f for top in ("roles/", "kernels/") for f in files if f.startswith(top)), "not said by -lineinfo")

    @property
    def waits(self) -> bool:
        return any(WAIT.search(p.function) for p in self.places)


def per_round(executed_lines: list[Line], texts: list[str], kernel: str, marker: str) -> dict[int, float]:
    """{how many instructions that match `marker` lie in a loop of the kernel: the warp instructions that one round of
    it executed, on average}, of innermost loops that ran; that of the most rounds where several have as many."""
    import ptx_lines

    by_line = {line.number: line for line in executed_lines if line.kernel == kernel}
    found, rounds, covered = {}, {}, set()
    for text in texts:
        for name, of_kernel in ptx_lines.loops(text).items():
            if short(name) != kernel or not any(line.entry == name for line in by_line.values()):
                continue
            for first, last in of_kernel:
                body = [by_line[n] for n in range(first, last + 1) if n in by_line]
                marks = [line for line in body if re.search(marker, line.text) and line.number not in covered]
                covered |= {line.number for line in marks}
                if not marks or last not in by_line or by_line[last].warps <= rounds.get(len(marks), 0):
                    continue
                rounds[len(marks)] = by_line[last].warps
                found[len(marks)] = sum(line.warps for line in body) / by_line[last].warps
    return found


def short(kernel: str) -> str:
    """exchange, dispatch, ... of a mangled entry."""
    found = re.search(r"\d([a-z]+)_entry", kernel)
    return found[1] if found else kernel


def executed(library) -> Counter:
    """{(kernel, line): (threads, warps)} as two counters' difference allows: keys (kernel, line, 0 or 1)."""
    with tempfile.NamedTemporaryFile() as file:
        library.write_counts(Path(file.name))
        found = Counter()
        for row in Path(file.name).read_text().splitlines():
            kernel, line, threads, warps = row.split()
            found[kernel, int(line), 0], found[kernel, int(line), 1] = int(threads), int(warps)
    return found


def lines(library, counted: Counter) -> list[Line]:
    import ptx_lines

    out = []
    for text in library.texts():
        split = text.split("\n")
        for kernel, places in ptx_lines.places(text).items():
            for n, where in places.items():
                threads, warps = counted[kernel, n, 0], counted[kernel, n, 1]
                if warps:
                    out.append(Line(short(kernel), kernel, n, split[n - 1].strip(), where, threads, warps))
    return out


def run(args: argparse.Namespace) -> tuple[list[Line], dict[str, int], list[str]]:
    """(what was executed, {"tokens", "rows", "payload_kib"}, the library's PTX)."""
    import torch_cuda
    from examples import Example, expected
    from gpu_world import GpuWorld
    from ptx_machine import Choices

    # No lanes are parted at random: each part would count as an instruction of its own.
    library = torch_cuda.install(Choices(seed=args.seed, target=args.target, split_percent=0))
    ex = Example(
        args.nodes, args.ranks, args.experts, (args.tokens,) * (args.nodes * args.ranks), args.topk, args.hidden, seed=1
    )
    want, before, after, rows = expected(ex), Counter(), Counter(), [0] * ex.world.num_ranks
    with library.modes():
        world = GpuWorld(args.nodes, args.ranks, args.experts, skew=0, num_sms_dispatch_api=2, num_sms_combine_api=2)

        def work(rank, buffer):
            mine = want.inputs[rank]
            out, *_, handle = buffer.dispatch_with_permute(
                hidden=mine.hidden, num_of_experts=ex.world.num_experts, **mine.routing()
            )
            buffer.combine_with_unpermute(hidden=out, handle=handle)
            rows[rank] = len(out)

        world.run(work)  # makes room
        before = executed(library)
        world.run(work)
        after = executed(library)
        world.close()
    if library.reports():
        sys.exit("\n".join(library.reports()))
    after.subtract(before)
    size = {
        "tokens": args.tokens * ex.world.num_ranks,
        "rows": sum(rows),
        "payload_kib": sum(rows) * args.hidden * 2 / 1024,
    }
    return lines(library, after), size, library.texts()


@dataclass(frozen=True)
class Role:
    kernel: str
    role: str
    warp_instructions: int
    lanes: float
    per_token: float
    per_row: float
    per_kib: float
    waiting: int


def roles(executed_lines: list[Line], size: dict) -> list[Role]:
    work, threads, waiting = Counter(), Counter(), Counter()
    for line in executed_lines:
        key = line.kernel, line.role
        if line.waits:
            waiting[key] += line.warps
        else:
            work[key] += line.warps
            threads[key] += line.threads
    found = []
    for key, n in sorted(work.items(), key=lambda item: (item[0][0], -item[1])):
        per = [round(n / max(size[by], 1), 2) for by in ("tokens", "rows", "payload_kib")]
        found.append(Role(*key, n, round(threads[key] / n, 1), *per, waiting[key]))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("nodes", 1),
        ("ranks", 2),
        ("tokens", 64),
        ("hidden", 1024),
        ("topk", 4),
        ("experts", 4),
        ("seed", 1),
    ):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--target", type=int, choices=(90, 100, 103), default=90)
    made.add_argument("--json", type=Path, help="where to write the report")
    return made


def main() -> int:
    args = parser().parse_args()
    executed_lines, size, _ = run(args)
    found = roles(executed_lines, size)
    print(f"{size['tokens']} tokens, {size['rows']} rows, {size['payload_kib']:.0f} KiB; sm_{args.target}a's PTX")
    print(
        f"{'kernel':10} {'role':32} {'warp instr.':>11} {'lanes':>5} {'/token':>9} {'/row':>9} {'/KiB':>8} "
        f"{'waiting':>9}"
    )
    for r in found:
        print(
            f"{r.kernel:10} {r.role:32} {r.warp_instructions:11} {r.lanes:5} {r.per_token:9} {r.per_row:9} "
            f"{r.per_kib:8} {r.waiting:9}"
        )
    if args.json:
        world = {
            name: getattr(args, name)
            for name in ("nodes", "ranks", "tokens", "hidden", "topk", "experts", "seed", "target")
        }
        args.json.write_text(json.dumps({"world": world, **size, "roles": [asdict(r) for r in found]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
