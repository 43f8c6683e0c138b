"""Breaks of the PTX machine's own rules: each must fail the machine's tests. python tests/ptx/machine/mutants.py

A checker that checks nothing finds nothing; these show that its tests would notice. Every break is one edit of a
source, which is compiled and linked with the other objects. Prints one line a mutant, exits with 1 if one survives."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent
# file -> (what, old text, new text)
MUTANTS = {
    "memory.cpp": (("bounds are not looked at", "if (!r || at + n > base_of(*r) + r->bytes ||", "if (!r ||"),),
    "access.cpp": (
        (
            "alignment of global accesses is not looked at",
            "if (at & (n - 1) || !c.machine->memory",
            "if (!c.machine->memory",
        ),
        (
            "unwritten shared memory is not noticed",
            "used & ~s.written_bits(off, n)",
            "used & ~s.written_bits(off, n) & 0",
        ),
        ("every byte of a vector counts as used", "const u32 used = i.used_bytes &", "const u32 used ="),
    ),
    "bulk.cpp": (
        ("a bulk copy may have any size", "if (k.bytes % 16)", "if (k.bytes % 1)"),
        ("a bulk copy's source need not be written", "!= 0xffff", "== 0x12345"),
        (
            "pending groups are done",
            "const s64 n = s64(l.committed.size()) - i.offset;",
            "const s64 n = s64(l.committed.size());",
        ),
    ),
    "mbarrier.cpp": (
        ("arrivals are not counted", "if (m->pending <= 0)", "if (m->pending <= -9)"),
        ("the tx-count has no bound", "if (m->bytes > kMostBytes)", "if (m->bytes < -kMostBytes)"),
        ("a phase ends without its bytes", "m.pending != 0 || m.bytes != 0", "m.pending != 0"),
    ),
    "meet.cpp": (
        (
            "lanes that have left are waited for",
            "first.members & w.live) != (first.members & w.live)",
            "first.members) != first.members",
        ),
        ("a barrier opens one thread early", "bar.arrived < b.live", "bar.arrived + 1 < b.live"),
        ("a vote orders memory", "if (races && i.offset == kWarpSync)", "if (races)"),
    ),
    "residency.cpp": (
        ("an SM has room for any number of blocks", "s.shared + need.shared > d.model.shared_per_sm ||", ""),
    ),
    "races.cpp": (
        ("a relaxed load acquires", "l.pending[u8(least)].join(it->second.clocks)", "l.known.join(it->second.clocks)"),
        ("a fence of any scope acquires", "s <= u8(scope); ++s", "s < 4; ++s"),
        (
            "scopes are not looked at",
            "return includes(s.scope, s.component, by) && includes(",
            "return true || includes(",
        ),
        ("a release's scope is not looked at", "return includes(s.scope, s.component, by) && ", "return "),
        ("devices share a scope", "x.device == y.device", "x.device >= 0"),
        ("ranks of a device share a scope", " && x.gpu == y.gpu", ""),
        ("a chain of atomics is cut", "if (!rmw) syncs_.erase(at);", "syncs_.erase(at);"),
        ("a relaxed store releases", "if (!i.release && !by_fence) {", "if (false) {"),
        (
            "what a thread does behind a release counts as before",
            "l.own++);\n  return l.known;",
            "l.own + 1);\n  return l.known;",
        ),
        ("a fence of shared memory covers global memory", "if (spaces & 2)", "if (spaces)"),
        ("a wait for reads is one for writes", "if (!read) lane(w)", "lane(w)"),
    ),
    "cells.cpp": (
        ("a bulk copy forgets its thread's own accesses", "  publish(w);", "  // publish(w);"),
        ("reads of bulk stores are not noted", "touch_shared(false,", "if (false) touch_shared(false,"),
        ("the async proxy sees everything", "a.proxy->at(c.writer) < c.write_tick", "false"),
        ("an init needs no fence", "if (l.known.shared.at(c.writer) < c.write_tick)", "if (false)"),
        ("a write is not compared with reads", "if (c.read_bytes & bytes) check_reads", "if (false) check_reads"),
    ),
    "lines.cpp": (
        ("lines may lack lanes", "if ((here & all) != all) {", "if (false) {"),
        ("lines may lie anywhere", "(begin % kLineBytes || base[lane]", "(false && base[lane]"),
        ("lanes that met are parted before a line", "program.code[n].to_line = true;", ""),
    ),
    "clock.cpp": (
        ("a joined clock loses what one side knew", "std::max(a->ticks[l], b->ticks[l])", "b->ticks[l]"),
        ("clocks share what they must not", "else if (!table_.alone())", "else if (false)"),
    ),
    "alu_operations.h": (
        (
            "halves of a pair change places",
            "Round::apply(upper) << 16 | Round::apply(lower)",
            "Round::apply(lower) << 16 | Round::apply(upper)",
        ),
        ("ties are rounded up", "below == 0x8000 && kept % 2 != 0", "below == 0x8000"),
    ),
    "allocate.cpp": (
        (
            "a register's row is free too early",
            "if (a.to >= i.from) return false;",
            "if (a.to >= i.from + 2) return false;",
        ),
        (
            "loops do not keep registers alive",
            "for (bool changed = true; changed;) {",
            "for (bool changed = false; changed;) {",
        ),
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?", default="", help="of the mutants to try")
    words = parser.parse_args().words
    objects = build.objects()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, what, old, new in ((name, *edit) for name, edits in MUTANTS.items() for edit in edits):
            if words not in what:
                continue
            text = (HERE / name).read_text()
            if text.count(old) != 1:
                sys.exit(f"{name} has {text.count(old)} times: {old}")
            source, program = Path(folder) / name, Path(folder) / "tests"
            source.write_text(text.replace(old, new))
            obj = build.compile_one(source, Path(folder) / "mutant.o", include=HERE)
            build.link([obj, *(o for o in objects if build.stem(o) != source.stem)], program)
            try:
                caught = subprocess.run([program], capture_output=True, timeout=60, check=False).returncode != 0
            except subprocess.TimeoutExpired:
                caught = True
            survivors += not caught
            print("caught  " if caught else "SURVIVES", what, flush=True)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
