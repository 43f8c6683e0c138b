"""Numbers of the kernels' code as docs/cuda.md has them: registers, instructions, fences of system scope, stack.

    python scripts/cubin_check.py [--rail nvshmem] --write-table

writes what a library has into docs/cuda_kernels.json and the table of that file into the page; a library whose
registers or instructions are not those of the file is a complaint of cubin_check.py, and a test compares page and file.
Both rails have their part: each of the two libraries is asked for its own."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Table = dict[str, dict[str, dict[str, dict[str, int]]]]  # numbers by rail, architecture, kernel
DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE, PAGE = DOCS / "cuda_kernels.json", DOCS / "cuda.md"
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
RAILS = {"P2PDevice": "mapped", "NvshmemDevice": "NVSHMEM"}  # the other rail of mapped memory is for tests
ARCHITECTURES = ("sm_90a", "sm_100")
COUNTED = ("registers", "instructions", "system_fences", "stack")
# Another release of nvcc may allocate and schedule otherwise; registers are granted by eights.
MOST_REGISTERS, MOST_INSTRUCTIONS = 4, 0.02
ORDER = ("exchange", "dispatch", "combine", "balance", "latency_dispatch", "latency_combine", "latency_dispatch_nodes",
         "latency_combine_nodes", "push_weights", "await_weights", "collect_gradients", "push_nodes",
         "collect_nodes")  # fmt: skip


def numbers(kernels: Iterable[Any]) -> Table:
    """{rail: {arch: {kernel: {what: number}}}} of the rails that the page is about."""
    found: Table = {}
    for k in kernels:
        if k.rail in RAILS:
            found.setdefault(k.rail, {}).setdefault(k.arch, {})[k.name] = {what: getattr(k, what) for what in COUNTED}
    return found


def markdown(table: Table) -> str:
    heads = [f"{arch}{', over NVSHMEM' if rail != 'P2PDevice' else ''}" for rail in RAILS for arch in ARCHITECTURES]
    lines = [f"| kernel | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    names = {name for arches in table.values() for kernels in arches.values() for name in kernels}
    for name in sorted(names, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER)):
        cells = []
        for rail in RAILS:
            for arch in ARCHITECTURES:
                of = table.get(rail, {}).get(arch, {}).get(name)
                cells.append(" / ".join(str(of[what]) for what in COUNTED) if of else "-")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def on_page(page: str, table: Table) -> str:
    """The page's text with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name}: has no {BEGIN} .. {END}, between which the table stands")
    return f"{before}{BEGIN}\n{markdown(table)}\n{END}{after}"


def committed() -> Table:
    table: Table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    return table


def write_table(kernels: Iterable[Any]) -> None:
    """The other rail's numbers stay."""
    table = committed() | numbers(kernels)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(on_page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")


def table_problems(kernels: Iterable[Any]) -> Iterator[str]:
    """Where the library has other numbers than the committed file, and so the page, says."""
    table = committed()
    for rail, arches in numbers(kernels).items():
        for arch, named in arches.items():
            for name, now in named.items():
                was = table.get(rail, {}).get(arch, {}).get(name)
                where = f"{name}<{rail}> {arch}"
                if was is None:
                    yield f"{where}: has no row in {TABLE.name}: --write-table, and a word in {PAGE.name}"
                    continue
                for what, most in (("registers", MOST_REGISTERS),
                                   ("instructions", MOST_INSTRUCTIONS * was["instructions"])):  # fmt: skip
                    if abs(now[what] - was[what]) > most:
                        yield (
                            f"{where}: {now[what]} {what}, {was[what]} in {TABLE.name} and {PAGE.name}: --write-table, "
                            "then correct what the page says of them"
                        )
