"""Asks GPUs the litmus questions of docs/memory_model.md: does a reader that sees a flag see what lies behind it?

    python scripts/gpu_litmus.py [--rounds 1000000] [--pairs 32] [--only 3,11] [--load] [--seconds 60] [--json FILE]

Every pattern runs on every ordered pair of devices that map each other's memory, with its rows pushed into the
reader's memory and pulled from the writer's; on a machine with one device on two streams of that, where no link is
crossed. A pattern that keeps the contract must never show a word of another round: one is a finding, and the exit
status 1. Patterns that lack a piece may show them; where none does, the test may be too weak to trust its neighbour.
--load keeps the link busy with copies meanwhile.

Needs nvcc as scripts/build_cuda.py does. The JSON: {"devices": [..], "rows": [{"pattern", "clean", "writer", "reader",
"rows_at", "rounds", "old_words", "other_words", "first", "seconds", "error"}]}. Patterns over NICs (9) are not here."""

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_cuda  # noqa: E402

SOURCE, NAME, EXPORTED = "tests/cuda/litmus/litmus.cu", "libhybrid_ep_litmus.so", "hep_litmus_*"
TIMEOUT_S = 60


class Request(ctypes.Structure):
    """litmus.h's."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("pattern", "writer_device", "reader_device", "rows_at_writer", "load")),
        ("blocks", ctypes.c_uint32),
        ("places", ctypes.c_uint32),
        *((n, ctypes.c_uint64) for n in ("rounds", "timeout_ns", "seed")),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint64) for n in ("rounds", "old_words", "others", "first_round", "first_word", "first_seen")),
        ("seconds", ctypes.c_double),
        ("error", ctypes.c_char * 256),
    ]


@dataclass(frozen=True)
class Pattern:
    """number: of docs/memory_model.md. clean: it keeps the contract."""

    index: int
    name: str
    clean: bool

    @property
    def number(self):
        return int(self.name.split()[0])

    @property
    def crosses(self):
        """Whether it has a writer and a reader: not those of one block."""
        return self.number not in (6, 7)


class Litmus:
    """The built library. lib: it, loaded already."""

    def __init__(self, lib):
        self._c = lib
        if lib.hep_litmus_sizes() != ctypes.sizeof(Request) << 16 | ctypes.sizeof(Result):
            raise RuntimeError("the structures of gpu_litmus.py are not those of tests/cuda/litmus/litmus.h")
        self._c.hep_litmus_pattern.restype = ctypes.c_char_p
        self.patterns = []
        clean = ctypes.c_int()
        while name := self._c.hep_litmus_pattern(len(self.patterns), ctypes.byref(clean)):
            self.patterns.append(Pattern(len(self.patterns), name.decode(), bool(clean.value)))

    def devices(self):
        return self._c.hep_litmus_devices()

    def run(
        self, pattern, writer, reader, *, at_writer, rounds, pairs, places, load=False, seed=1, timeout_s=TIMEOUT_S
    ):
        """A row, as the JSON has it."""
        timeout_ns = int(timeout_s * 1e9)
        asked = Request(pattern.index, writer, reader, at_writer, load, pairs, places, rounds, timeout_ns, seed)
        got = Result()
        self._c.hep_litmus_run(ctypes.byref(asked), ctypes.byref(got))
        wrong = got.old_words + got.others
        return {
            "pattern": pattern.name,
            "clean": pattern.clean,
            "writer": writer,
            "reader": reader,
            "rows_at": "writer" if at_writer else "reader",
            "rounds": got.rounds,
            "old_words": got.old_words,
            "other_words": got.others,
            "first": {"round": got.first_round, "word": got.first_word, "seen": got.first_seen} if wrong else None,
            "seconds": round(got.seconds, 3),
            "error": got.error.decode(errors="replace"),
        }


def build(nvcc, out):
    """The library's path; for all architectures of the CUDA library. Exits with the compiler's words on failure."""
    path = Path(out) / NAME
    command = [
        *build_cuda.base_command(nvcc),
        *build_cuda.targets(),
        "-shared",
        "-cudart=static",
        SOURCE,
        "-o",
        str(path),
    ]
    home = Path(nvcc).resolve().parent.parent
    command += [f"-L{home / name}" for name in ("lib64", "lib") if (home / name).is_dir()]
    done = subprocess.run(command, cwd=build_cuda.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"hybrid_ep: {SOURCE} does not compile:\n\n{done.stderr}{done.stdout}")
    return path


def verdict(row):
    """In a word or two."""
    wrong = row["old_words"] + row["other_words"]
    if row["error"]:
        return row["error"]
    if row["clean"]:
        return f"FINDING: {wrong} words, {first(row)}" if wrong else "held"
    return f"shows: {wrong} words" if wrong else "not seen"


def first(row):
    """The first wrong word, said. Above its low 24 bits stands the round that it is of, if a writer stored it."""
    found = row["first"]
    return f"first word {found['word']} in round {found['round']}: {found['seen']:#x}"


def failed(row):
    return bool(row["error"]) or (row["clean"] and row["old_words"] + row["other_words"] > 0)


def cases(patterns, devices):
    """(pattern, writer, reader, rows at the writer) of all that can be asked."""
    ordered = list(itertools.permutations(range(devices), 2)) or [(0, 0)]
    for pattern in patterns:
        if not pattern.crosses:
            yield from ((pattern, device, device, False) for device in range(devices))
            continue
        for writer, reader in ordered:
            yield from ((pattern, writer, reader, at) for at in ((False, True) if writer != reader else (False,)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="of each pair [%(default)s]")
    parser.add_argument(
        "--pairs", type=int, default=32, help="of a writer's and a reader's block, at once [%(default)s]"
    )
    parser.add_argument("--places", type=int, default=256, help="of rows of a pair, a power of two [%(default)s]")
    parser.add_argument("--only", help="numbers of patterns, as docs/memory_model.md has them")
    parser.add_argument("--load", action="store_true", help="copies between the devices meanwhile")
    parser.add_argument("--seconds", type=float, help="after which no further pattern is begun [no limit]")
    parser.add_argument("--seed", type=int, default=1, help="of the order of places [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    for name in ("rounds", "pairs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give 1 or more")
    if args.pairs > 1024:
        parser.error(f"--pairs {args.pairs}: at most 1024, which a device can run beside each other")
    if args.places < 4 or args.places & (args.places - 1):
        parser.error(f"--places {args.places}: give a power of two, 4 or more")
    nvcc, why = build_cuda.find_nvcc()
    if not nvcc:
        sys.exit(f"hybrid_ep: no litmus program: {why}")
    folder = build_cuda.BUILD / "litmus"
    folder.mkdir(parents=True, exist_ok=True)
    litmus = Litmus(ctypes.CDLL(str(build(nvcc, folder)), mode=os.RTLD_LOCAL | os.RTLD_NOW))
    devices = litmus.devices()
    if devices == 0:
        sys.exit("hybrid_ep: the litmus program needs a GPU and finds none")
    patterns = litmus.patterns
    if args.only:
        wanted = {int(n) for n in args.only.split(",")}
        if unknown := wanted - {p.number for p in patterns}:
            parser.error(f"--only: no pattern {sorted(unknown)}; there are {sorted({p.number for p in patterns})}")
        patterns = [p for p in patterns if p.number in wanted]
    if devices == 1:
        print("one device: writers and readers are two streams of it, and no link is crossed")
    rows, end, skipped = [], time.monotonic() + (args.seconds or float("inf")), 0
    print(f"{'pattern':<58} {'from':>4} {'to':>4} {'rows at':<8} {'rounds':>12} {'s':>7}  result", flush=True)
    for pattern, writer, reader, at_writer in cases(patterns, devices):
        if time.monotonic() > end:
            skipped += 1
            continue
        how = {name: getattr(args, name) for name in ("rounds", "pairs", "places", "load", "seed")}
        row = litmus.run(pattern, writer, reader, at_writer=at_writer, **how)
        rows.append(row)
        print(
            f"{row['pattern']:<58} {writer:>4} {reader:>4} {row['rows_at']:<8} {row['rounds']:>12,} "
            f"{row['seconds']:>7.2f}  {verdict(row)}",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"devices": devices, "load": args.load, "rows": rows}, indent=1) + "\n")
    bad = sum(map(failed, rows))
    print(f"{len(rows) - bad} as the contract says, {bad} not" + (f", {skipped} not begun" if skipped else ""))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
