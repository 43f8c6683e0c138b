"""The types of the compiled core are those of the core that is built; what a binding leaves unsaid is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import core_stubs

KNOWN = frozenset({"Any", "Plan", "TensorView", "NDArray", "numpy", "int", "float", "str", "dict", "list", "tuple"})


def test_the_committed_stub_is_that_of_the_core():
    command = [sys.executable, core_stubs.ROOT / "scripts" / "core_stubs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_a_stale_stub_is_named(tmp_path, monkeypatch, capsys):
    stub = tmp_path / "_core.pyi"
    stub.write_text(core_stubs.STUB.read_text().replace("class Plan:", "class Plain:"))
    monkeypatch.setattr(core_stubs, "STUB", stub)
    monkeypatch.setattr(core_stubs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["core_stubs.py", "--check"])
    with pytest.raises(SystemExit, match="is stale: run python scripts/core_stubs.py"):
        core_stubs.main()
    assert "-class Plain:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("doc", "stub"),
    [
        (
            "f(n: typing.SupportsInt | typing.SupportsIndex, s: typing.SupportsFloat = 1.0) -> str",
            "def f(n: int, s: float = 1.0) -> str: ...",
        ),
        ("f(n: int) -> int", "def f(n: int) -> int: ..."),  # as pybind11 2 says it
        (
            "f(self: hybrid_ep._core.Plan, x: hybrid_ep._core.TensorView = None) -> hep::Plan",
            "def f(self, x: TensorView | None = None) -> Plan: ...",
        ),
        (
            "f(a: numpy.ndarray, b: numpy.ndarray[numpy.int32]) -> Optional[int]\n\nWhy.\n",
            'def f(a: NDArray[Any], b: NDArray[numpy.int32]) -> int | None:\n    """Why."""',
        ),
        ("f(x: typing.Any = None) -> dict[str, object]", "def f(x: Any = None) -> dict[str, Any]: ..."),
    ],
)
def test_signatures_in_the_words_of_the_stub(doc, stub):
    assert core_stubs.function("f", doc, known=KNOWN) == stub


@pytest.mark.parametrize(
    ("doc", "said"),
    [
        ("f(x: hep::Unbound) -> int", "nothing is called Unbound"),
        ("f() -> tuple", "says no more than that"),
        ("f() -> std::vector<int>", "is no Python"),
        ("About f.", "begins with no signature"),
    ],
)
def test_what_a_binding_leaves_unsaid_is_refused(doc, said):
    with pytest.raises(core_stubs.StubError, match=said):
        core_stubs.function("f", doc, known=KNOWN)
