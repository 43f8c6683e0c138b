"""Ways round the loops of copy roles, on texts such as nvdisasm -gi prints: the shortest past all that it must pass is
counted, wherever its lines lie, and a way that grows or is no longer found is named."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import sass_roles
from sass_roles import Cost, Way, at

from hybrid_ep.perf import copy_loops

SOURCE = """
struct Role {
  HEP_DEVICE void run() {
    for (;;) {
      a.wait();
      scatter({1, 2});
    }
  }
  HEP_HOST_DEVICE uint32_t scatter(Dst dst) {
    // the record, then the row
    a.bulk(metadata);
    if (dst.rows) {
      a.bulk(row);
    }
    return 1;
  }
};
"""


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line)


CALL = line_of("scatter({1")
WAIT, METADATA, ROW = (
    (line_of(text), *call) for text, call in (("a.wait", ()), ("metadata", (CALL,)), ("(row)", (CALL,)))
)
BODY = (  # (instruction, lines that it is of, the innermost first)
    ("LDG.E.64 R2, desc[UR4][R4.64]", WAIT),
    ("UBLKCP.G.S [UR6], [UR15], UR14", METADATA),
    ("@P0 BRA `(.L_x_7)", ROW),
    *[("IADD3 R1, R2, R3, RZ", ROW)] * 4,
    ("UBLKCP.G.S [UR6], [UR15], UR14", ROW),
    ".L_x_7:",
    ("LDS.128 R8, [R2]", WAIT),
    ("@P1 BRA `(.L_x_3)", WAIT),
)
METADATA_STORE = at(r"UBLKCP\.G\.S", ("roles/role.h", "scatter", "metadata"))
ROW_STORE = at(r"UBLKCP\.G\.S", ("roles/role.h", "scatter", "bulk(row)"))


def disassembly(body=BODY, name="entry", file="/anywhere/csrc/roles/role.h", words=()) -> list[str]:
    """What nvdisasm -gi -c -hex prints of a loop from .L_x_3 over `body`, with an exit behind it. Of a chain that goes
    on over instructions it prints nothing. words: upper halves of the instructions' encodings, of the first ones."""
    words = iter(words)
    lines = [f"//--------------------- .text.{name} --------------------------", "\t.section\t.text", ".L_x_3:"]
    address, before = 0, None
    for part in body:
        if isinstance(part, str):
            lines.append(part)
            continue
        text, chain = part
        if chain != before:
            for n, at_line in zip(chain, (*chain[1:], 0), strict=True):
                inlined = f' inlined at "{file}", line {at_line}' if at_line else ""
                lines.append(f'\t//## File "{file}", line {n}{inlined}')
            before = chain
        lines.append(f"        /*{address:04x}*/                   {text} ;            /* 0x0000001f00127981 */")
        lines += [f"{' ' * 80}/* 0x{word:016x} */" for word in [*itertools.islice(words, 1)]]
        address += 16
    return [*lines, f"        /*{address:04x}*/                   EXIT ;", "//--------------------- .nv.info --------"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "roles").mkdir()
    (folder / "roles" / "role.h").write_text(SOURCE)
    return sass_roles.Sources(folder)


def code_of(**changes):
    return sass_roles.parse(disassembly(**changes))["entry"]


def cost_of(code, way, sources) -> Cost:
    return sass_roles.cost(code, sass_roles.walk(code, way, sources))


def test_instructions_have_the_lines_that_they_are_of():
    code = code_of()
    assert code.instructions[1] == (0x10, "UBLKCP.G.S [UR6], [UR15], UR14")
    assert code.lines[1] == {("roles/role.h", METADATA[0]), ("roles/role.h", CALL)}
    assert code.lines[3] == code.lines[7] == {("roles/role.h", ROW[0]), ("roles/role.h", CALL)}
    assert code.lines[8] == {("roles/role.h", WAIT[0])}
    assert code.instructions[2][1] == "@P0 BRA 0x80" and code.instructions[9][1] == "@P1 BRA 0x0"  # labels are places


def test_instructions_have_their_scoreboards():
    words = (0x000EA4000C1E1B00, 0x004FE20003F05270, 0x000FE20000000000)  # of LDG R18; what reads it; neither
    assert code_of(words=words).boards[:4] == [(2, ()), (None, (2,)), (None, ()), (None, ())]


def test_who_waits_for_a_scoreboard_waits_for_all_that_is_entered_on_it(sources):
    body = (("LDG.E R30, desc[UR4][R4.64]", WAIT), ("IADD3 R9, R10, R11, RZ", WAIT), *BODY[1:])
    entered, waiting, free = 0x000EA4000C1E1B00, 0x004FE20003F05270, 0x000FE20000000000
    clocks = [
        cost_of(code_of(body=body, words=(entered, word)), Way(METADATA_STORE), sources).clocks
        for word in (waiting, free)
    ]
    assert clocks[0] > 270 > 60 > clocks[1]


def test_each_function_has_its_own_code():
    both = sass_roles.parse([*disassembly(), *disassembly(BODY[:2], "other")])
    assert {name: len(code.instructions) for name, code in both.items()} == {"entry": 11, "other": 3}


def test_the_shortest_way_past_all_that_it_must_pass(sources):
    code = code_of()
    short = cost_of(code, Way(METADATA_STORE), sources)
    assert (short.issued, short.global_loads, short.shared_loads) == (5, 1, 1)
    stored = sass_roles.walk(code, Way(METADATA_STORE, (ROW_STORE,)), sources)
    assert len(stored) == 10 and stored[-1] == 1


def test_a_load_from_global_memory_is_waited_for(sources):
    def clocks(text):
        body = ((text, WAIT), ("IADD3 R4, R2, R3, RZ", WAIT), *BODY[1:])
        return cost_of(code_of(body=body), Way(METADATA_STORE), sources).clocks

    assert clocks("LDG.E R2, desc[UR4][R4.64]") - clocks("LDS R2, [R4]") == 270 - 30
    assert clocks("LD.E R2, desc[UR4][R4.64]") == clocks("LDG.E R2, desc[UR4][R4.64]")


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 5))
def test_what_lies_on_a_way_is_counted_and_what_it_goes_round_is_not(sources, on_way, beside):
    """Instructions before the branch are on every way; those behind it only on ways past the row's store."""
    on = tuple(("LDG.E R9, desc[UR4][R10.64]" if load else "ULDC UR4, c[0x0][0x210]", WAIT) for load in on_way)
    body = (*on, *BODY[:3], *[("LDS R9, [R10]", ROW)] * beside, *BODY[3:])
    code = code_of(body=body)
    short = cost_of(code, Way(METADATA_STORE), sources)
    long = cost_of(code, Way(METADATA_STORE, (ROW_STORE,)), sources)
    assert short.issued == 5 + len(on) and long.issued == 10 + len(on) + beside
    assert short.global_loads == long.global_loads == 1 + sum(on_way)
    assert short.constant_loads == len(on) - sum(on_way)
    assert (short.shared_loads, long.shared_loads) == (1, 1 + beside)
    assert long.clocks >= short.clocks >= short.issued


@pytest.mark.parametrize(
    "place, words",
    [
        (("roles/role.h", "scatter", "a.gone"), "0 lines with the text of roles/role.h, scatter, `a.gone`"),
        (("roles/role.h", "scatter", "a.bulk"), "2 lines with the text"),
        (("roles/role.h", "run", "metadata"), "0 lines with the text"),  # it is in another function
        (("roles/role.h", "scattered"), "0 functions roles/role.h, scattered"),
        (("roles/rolle.h",), "no file roles/rolle.h"),
    ],
)
def test_places_that_are_not_there_are_named(sources, place, words):
    with pytest.raises(ValueError, match=words):
        sass_roles.walk(code_of(), Way(at("UBLKCP", place)), sources)


def test_a_function_ends_at_its_brace(sources):
    run = sources.lines(sass_roles.Place("roles/role.h", "run"))
    assert {n for _, n in run} == set(range(line_of("void run"), line_of("uint32_t scatter")))


@pytest.mark.parametrize(
    "changes, way, words",
    [
        ({}, Way(at("UBLKCP.S.G", "roles/role.h")), "no instruction UBLKCP.S.G of roles/role.h"),
        ({"file": "/anywhere/csrc/roles/other.h"}, Way(METADATA_STORE), "with -lineinfo?"),  # of other sources
        ({"body": BODY[:-1]}, Way(METADATA_STORE), "no way round"),
        ({"body": (*BODY[:3], ("EXIT", ROW), *BODY[3:])}, Way(METADATA_STORE, (ROW_STORE,)), "no way round"),
    ],
)
def test_a_way_that_is_not_found_is_named(sources, changes, way, words):
    with pytest.raises(ValueError, match=words):
        sass_roles.walk(code_of(**changes), way, sources)


def test_ways_of_a_kernel_that_are_not_found_are_complaints(sources, monkeypatch):
    ways = {"role": {"token": Way(METADATA_STORE), "row": Way(at("UBLKCP.S.G", "roles/role.h"))}}
    monkeypatch.setitem(sass_roles.WAYS, "dispatch", ways)
    found, complaints = sass_roles.costs(code_of(), "dispatch", sources)
    assert found.keys() == {"role"} and found["role"].keys() == {"token"}
    assert len(complaints) == 1 and complaints[0].startswith("role, a row: no instruction")


def test_every_anchor_is_in_the_sources():
    sources = sass_roles.Sources()
    anchors = {
        anchor
        for roles in sass_roles.WAYS.values()
        for ways in roles.values()
        for way in ways.values()
        for anchor in (way.start, *way.past)
    }
    assert all(sources.lines(place) for anchor in anchors for place in anchor.places)


@pytest.fixture
def committed():
    table = json.loads(sass_roles.TABLE.read_text())
    return {
        arch: {role: {way: Cost(**costs) for way, costs in ways.items()} for role, ways in roles.items()}
        for arch, roles in table.items()
    }


def changed(found, arch="sm_90a", role="s2g", way="destination", **changes):
    cost = Cost(**{**vars(found[arch][role][way]), **changes})
    return {**found, arch: {**found[arch], role: {**found[arch][role], way: cost}}}


def test_the_committed_table_keeps_to_the_ceilings(committed):
    assert list(sass_roles.problems(committed)) == list(sass_roles.table_problems(committed)) == []
    ways = {role: set(ways) for roles in sass_roles.WAYS.values() for role, ways in roles.items()}
    assert ways == {role: set(most) for role, most in sass_roles.MOST_ISSUED.items()}
    assert all({role: set(ways) for role, ways in roles.items()} == ways for roles in committed.values())


def test_a_way_that_grows_is_named(committed):
    most = sass_roles.MOST_ISSUED["s2g"]["destination"]
    said = list(sass_roles.problems(changed(committed, issued=most + 1)))
    assert said == [f"s2g sm_90a: {most + 1} instructions a destination, at most {most}"]
    assert not list(sass_roles.problems(changed(committed, issued=most)))


@pytest.mark.parametrize("factor, named", [(1.06, True), (1.04, False), (0.81, False), (0.79, True)])
def test_clocks_that_the_model_does_not_charge_are_named(committed, factor, named):
    clocks = committed["sm_90a"]["s2g"]["destination"].clocks
    said = list(sass_roles.table_problems(changed(committed, clocks=factor * clocks)))
    assert bool(said) == named
    assert all(
        line.startswith(f"s2g sm_90a: {factor * clocks:.0f} clocks a destination, {clocks:.0f} in") for line in said
    )


def test_ways_that_the_table_lacks_or_has_alone_are_named(committed):
    fewer = {**committed, "sm_100": {role: ways for role, ways in committed["sm_100"].items() if role != "n2n"}}
    assert list(sass_roles.table_problems(fewer)) == [
        "n2n sm_100: no way round a token, of which copy_loops.json has one"
    ]
    s2g = committed["sm_90a"]["s2g"]
    more = {**committed, "sm_90a": {**committed["sm_90a"], "s2g": {**s2g, "new": s2g["pair"]}}}
    assert [line.split(",")[0] for line in sass_roles.table_problems(more)] == [
        f"s2g sm_90a: {s2g['pair'].clocks:.0f} clocks a new"
    ]


def test_a_table_written_is_the_table_read(committed, tmp_path, monkeypatch):
    monkeypatch.setattr(sass_roles, "TABLE", tmp_path / "copy_loops.json")
    sass_roles.write_table(committed)
    assert list(sass_roles.table_problems(committed)) == []
    one = changed({"sm_100": committed["sm_100"]}, "sm_100", clocks=1.0)
    sass_roles.write_table(one)  # of a library with one architecture
    assert list(sass_roles.table_problems(changed(committed, "sm_100", clocks=1.0))) == []


def test_the_model_reads_the_table(committed):
    for generation, arch in (("hopper", "sm_90a"), ("blackwell", "sm_100")):
        for role, ways in committed[arch].items():
            for way, cost in ways.items():
                assert copy_loops.copy_loop(generation, role, way) == cost.clocks > 0
                assert vars(copy_loops.copy_loops(generation)[role][way]) == vars(cost)


@pytest.mark.parametrize(
    "asked, words",
    [
        (("volta", "s2g", "token"), "generation is 'volta'.*hopper"),
        (("hopper", "s2s", "token"), "role is 's2s'.*s2g"),
        (("hopper", "s2g", "row"), "way is 'row', which s2g does not have.*destination"),
    ],
)
def test_what_the_model_does_not_know_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        copy_loops.copy_loop(*asked)
