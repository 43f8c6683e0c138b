"""scripts/gpu_litmus.py without a GPU: what it asks of how many devices, and what it makes of the answers."""

import ctypes
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import gpu_litmus  # noqa: E402  (a script)

CLEAN, LACKING = "3 bulk stores, wait, release; acquire, fence, bulk load", "4 as 3 without the reader's fence"


class Library:
    """The C interface; answers with what `found` says: (old words, other words, error)."""

    def __init__(self, devices=2, found=(0, 0, b"")):
        self.names = ((CLEAN, 1), (LACKING, 0), ("6 a stage is refilled", 1))
        self.devices, self.found, self.asked = devices, found, []
        self.hep_litmus_pattern = lambda i, clean: self._pattern(i, clean)

    def _pattern(self, i, clean):
        if i >= len(self.names):
            return None
        clean._obj.value = self.names[i][1]
        return self.names[i][0].encode()

    def hep_litmus_sizes(self):
        return ctypes.sizeof(gpu_litmus.Request) << 16 | ctypes.sizeof(gpu_litmus.Result)

    def hep_litmus_devices(self):
        return self.devices

    def hep_litmus_run(self, request, result):
        q, r = request._obj, result._obj
        self.asked.append(q)
        r.rounds, (r.old_words, r.others, r.error) = q.rounds * q.blocks, self.found


def asked(devices):
    litmus = gpu_litmus.Litmus(Library(devices))
    return [(p.number, writer, reader, at) for p, writer, reader, at in gpu_litmus.cases(litmus.patterns, devices)]


def test_every_ordered_pair_is_asked_with_rows_on_either_side():
    two = asked(2)
    assert [c for c in two if c[0] == 3] == [(3, 0, 1, False), (3, 0, 1, True), (3, 1, 0, False), (3, 1, 0, True)]
    assert [c for c in two if c[0] == 6] == [(6, 0, 0, False), (6, 1, 1, False)]
    assert len([c for c in asked(8) if c[0] == 3]) == 8 * 7 * 2


def test_one_device_is_asked_on_two_of_its_streams():
    assert asked(1) == [(3, 0, 0, False), (4, 0, 0, False), (6, 0, 0, False)]


@pytest.mark.parametrize(
    ("number", "found", "said", "fails"),
    [
        (0, (0, 0, b""), "held", False),
        (0, (1, 2, b""), "FINDING: 3 words, first word 0 in round 0: 0x0", True),
        (0, (0, 0, b"the reader waited until its deadline"), "the reader waited until its deadline", True),
        (1, (0, 0, b""), "not seen", False),
        (1, (4, 0, b""), "shows: 4 words", False),
        (1, (0, 0, b"CUDA: launch: out of memory"), "CUDA: launch: out of memory", True),
    ],
)
def test_a_finding_fails_and_what_lacks_a_piece_may_show_it(number, found, said, fails):
    litmus = gpu_litmus.Litmus(Library(found=found))
    row = litmus.run(litmus.patterns[number], 0, 1, at_writer=True, rounds=5, pairs=3, places=8)
    assert row["rounds"] == 15 and row["rows_at"] == "writer" and row["clean"] == (number == 0)
    assert (row["first"] is None) == (found[0] + found[1] == 0)
    assert gpu_litmus.verdict(row) == said and gpu_litmus.failed(row) == fails


def test_what_is_asked_arrives():
    library = Library()
    litmus = gpu_litmus.Litmus(library)
    litmus.run(litmus.patterns[1], 2, 5, at_writer=False, rounds=7, pairs=4, places=16, load=True, seed=9, timeout_s=2)
    q = library.asked[0]
    assert (q.pattern, q.writer_device, q.reader_device, q.rows_at_writer, q.load) == (1, 2, 5, 0, 1)
    assert (q.blocks, q.places, q.rounds, q.timeout_ns, q.seed) == (4, 16, 7, 2_000_000_000, 9)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--pairs", "2000"], ["--places", "12"], ["--places", "2"]])
def test_numbers_that_cannot_be_are_refused(wrong, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_litmus.py", *wrong])
    with pytest.raises(SystemExit) as error:
        gpu_litmus.main()
    assert error.value.code == 2 and f"{wrong[0]} {wrong[1]}" in capsys.readouterr().err
