"""The layer rules hold in this repository, and each rule can fail: a small tree breaks it and is caught."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "check_layers.py"

sys.path.insert(0, str(SCRIPT.parent))  # where its import_graph is
_spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
check_layers = importlib.util.module_from_spec(_spec)
sys.modules["check_layers"] = check_layers  # dataclasses look their module up
_spec.loader.exec_module(check_layers)

HOME = "/" + "home/somebody/data"  # in two parts: the rule reads this file too

# Headers that the trees below may include.
HEADERS = (
    "common/macros.h", "layout/buffer.h", "arch/concept.h", "arch/host/fiber.h", "arch/sm90/tma.h",
    "transport/concept.h", "transport/shm/put.h", "pipeline/fifo.h", "roles/n2n.h", "roles/params.h",
    "kernels/dispatch.h", "kernels/instances/host.h", "runtime/engine.h",
)  # fmt: skip


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """A small project that breaks no rule, with `files` added to it."""
    base = {f"csrc/{name}": "#pragma once\n" for name in HEADERS}
    base |= {"hybrid_ep/__init__.py": "", "hybrid_ep/env.py": 'NAMES = ["HYBRID_EP_TIMEOUT_S"]\n'}
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def violations(root: Path) -> list[tuple[str, int, str]]:
    found, _ = check_layers.check(root)
    return [(violation.path, violation.line, violation.rule) for violation in found]


def run_script(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def include(target: str) -> str:
    return f'#pragma once\n#include "{target}"\n'


def lines(count: int, text: str = "// x") -> str:
    return f"{text}\n" * count


@pytest.fixture(scope="module")
def of_repository(tmp_path_factory):
    """(the run over this repository, the picture it drew)."""
    picture = tmp_path_factory.mktemp("picture") / "graph.svg"
    return run_script("--graph", picture), picture


def test_repository_keeps_the_rules(of_repository):
    result, _ = of_repository
    assert result.returncode == 0, result.stdout + result.stderr


def test_small_tree_breaks_nothing(tmp_path):
    assert violations(make_tree(tmp_path, {})) == []


LONG_BODY = lines(79, "  ++x;")

# (file, its text, line and rule of the violation)
BROKEN = [
    # Upwards, sideways, and past the contracts.
    ("csrc/common/a.h", include("layout/buffer.h"), 2, "layers"),
    ("csrc/layout/a.h", include("arch/concept.h"), 2, "layers"),
    ("csrc/arch/host/a.h", include("arch/sm90/tma.h"), 2, "layers"),
    ("csrc/arch/host/a.h", include("transport/shm/put.h"), 2, "layers"),
    ("csrc/transport/shm/a.h", include("arch/host/fiber.h"), 2, "layers"),
    ("csrc/pipeline/a.h", include("arch/host/fiber.h"), 2, "layers"),
    ("csrc/pipeline/a.h", include("roles/n2n.h"), 2, "layers"),
    ("csrc/roles/a.h", include("transport/shm/put.h"), 2, "layers"),
    ("csrc/roles/a.h", include("kernels/dispatch.h"), 2, "layers"),
    ("csrc/kernels/a.h", include("arch/sm90/tma.h"), 2, "layers"),
    ("csrc/kernels/a.h", include("kernels/instances/host.h"), 2, "layers"),
    ("csrc/kernels/instances/a.h", include("runtime/engine.h"), 2, "layers"),
    ("csrc/runtime/a.h", include("roles/n2n.h"), 2, "layers"),
    ("csrc/bindings/a.h", include("roles/n2n.h"), 2, "layers"),
    ("csrc/runtime/a.h", "#include <pybind11/pybind11.h>\n", 1, "layers"),
    ("csrc/misc/a.h", "#pragma once\n", 1, "layers"),
    # How to include.
    ("csrc/roles/a.h", include("n2n.h"), 2, "includes"),
    ("csrc/roles/a.h", "#include <pipeline/fifo.h>\n", 1, "includes"),
    ("csrc/bindings/a.cpp", "#include <torch/extension.h>\n", 1, "torch"),
    ("csrc/bindings/a.cpp", "#  include <ATen/ATen.h>\n", 1, "torch"),
    # Words.
    ("csrc/roles/a.h", 'inline void f() { asm volatile("nop"); }\n', 1, "assembly"),
    ("csrc/arch/host/a.h", 'inline void f() {\n  __asm__("nop");\n}\n', 2, "assembly"),
    ("csrc/runtime/a.cpp", '#include <cstdlib>\nauto x = std::getenv("A");\n', 2, "environment"),
    ("csrc/common/a.h", "#define MY_MACRO 1\n", 1, "macros"),
    ("hybrid_ep/a.py", 'import os\nx = os.environ.get("HYBRID_EP_TIMEOUT_S")\n', 2, "environment"),
    ("hybrid_ep/a.py", 'import os\nx = os.environ["HYBRID_EP_TIMEOUT_S"]\n', 2, "environment"),
    ("recipes/a.py", 'import os\nx = "A" in os.environ\n', 2, "environment"),
    ("scripts/a.py", 'import os\nx = os.getenv("A")\n', 2, "environment"),
    ("megatron_patches/a.py", "from os import environ\n", 1, "environment"),
    # Tensors whose dtype or device a caller's defaults would decide.
    ("hybrid_ep/a.py", 'import torch\nx = torch.empty(2, device="cpu")\n', 2, "tensors"),
    ("megatron_patches/a.py", "import torch\nx = torch.arange(2, dtype=torch.int64)\n", 2, "tensors"),
    ("recipes/a.py", 'import torch\nx = torch.as_tensor([1.0], device="cpu")\n', 2, "tensors"),
    ("hybrid_ep/a.py", 'NAME = "HYBRID_EP_UNKNOWN"\n', 1, "variables"),
    ("docs/a.md", "one\nSet `HYBRID_EP_UNKNOWN`.\n", 2, "variables"),
    # Imports.
    ("hybrid_ep/a.py", "import megatron.core\n", 1, "layers"),
    ("hybrid_ep/cli/a.py", "def f():\n    from megatron_patches import apply\n", 2, "layers"),
    ("hybrid_ep/a.py", "import os, recipes\n", 1, "layers"),
    ("recipes/a.py", "def f():\n    from recipes.b import x\n", 2, "layers"),
    ("hybrid_ep/a.py", 'import importlib\nimportlib.import_module("tests.x")\n', 2, "layers"),
    ("hybrid_ep/a.py", "def f(:\n", 1, "syntax"),
    # Sizes.
    ("csrc/common/a.h", lines(351), 351, "file size"),
    ("csrc/roles/a.h", lines(151), 151, "file size"),
    ("csrc/runtime/a.cpp", lines(451), 451, "file size"),
    ("hybrid_ep/a.py", lines(501, "# x"), 501, "file size"),
    ("hybrid_ep/a.py", "def f():\n" + lines(110, "    pass"), 1, "function size"),
    ("csrc/runtime/a.cpp", "namespace hep {\nint f(int x) {\n" + LONG_BODY + "}\n}\n", 2, "function size"),
    ("csrc/runtime/a.cpp", "struct A {\nA() : x{1}, y{2} {\n" + LONG_BODY + "}\n};\n", 2, "function size"),
    ("csrc/runtime/a.cpp", "template <class T>\nT f(T x)\n{\n" + LONG_BODY + "}\n", 1, "function size"),
    ("csrc/common/a.h", f"// {'x' * 118}\n", 1, "width"),
    ("hybrid_ep/a.py", f"# {'x' * 119}\n", 1, "width"),
    # The tree.
    ("notes/a.md", "text\n", 1, "top level"),
    ("docs/a.md", f"one\nsee {HOME}\n", 2, "machine path"),
]  # fmt: skip


# Neighbours of the rules that must not trip them.
KEPT = [
    ("csrc/roles/a.h", include("transport/concept.h") + include("roles/params.h")),
    ("csrc/roles/a.h", include("arch/concept.h") + include("pipeline/fifo.h")),
    ("csrc/kernels/instances/a.cpp", include("arch/host/fiber.h") + '#include "transport/shm/put.h"\n'),
    ("csrc/arch/sm90/a.h", 'inline void f() { asm volatile("nop"); }\n'),
    ("csrc/transport/nvshmem/device.h", 'inline void f() { asm volatile("nop"); }\n'),
    ("csrc/roles/a.h", '// asm("nop") and getenv\nconst char* kText = "asm (x) getenv(y)";\n'),
    ("csrc/bindings/a.cpp", "#include <pybind11/pybind11.h>\n#define HEP_ANSWER 42\n"),
    ("csrc/common/a.h", "struct A {\n" + lines(90, "  int f() const { return 1'000; }") + "};\n"),
    ("csrc/arch/a.h", "template <class A>\nconcept C = requires(A a) {\n" + lines(90, "{ a.f() };") + "};\n"),
    ("hybrid_ep/env.py", 'import os\nx = os.environ.get("HYBRID_EP_TIMEOUT_S")\n'),
    ("recipes/a.py", 'import os\nos.environ["A"] = "1"\nos.environ.setdefault("B", "2")\n'),
    ("recipes/a.py", "import os\nx = dict(os.environ)\n"),
    ("recipes/a.py", 'import os\nfrom megatron_patches import apply\nx = {**os.environ, "A": "1"}\n'),
    ("hybrid_ep/a.py", 'import torch\nx = torch.empty(2, dtype=torch.int8, device="cpu")\ny = torch.zeros_like(x)\n'),
    ("hybrid_ep/a.py", "import torch\nf = lambda x, **o: (x.new_empty(2), torch.as_tensor(x), torch.ones(2, **o))\n"),
    ("scripts/a.py", "import torch\nx = torch.ones(2)\n"),
    ("hybrid_ep/a.py", "def f():\n" + lines(79, "    pass")),
    ("tests/python/test_a.py", 'import os\nx = os.environ["HYBRID_EP_ANY"]\n'),
    ("docs/a.md", "Mount it below ${ROOT}" + "/" + "work/data.\n"),
]  # fmt: skip

# (files, violations): an import counts wherever it runs, also around three modules and through a function.
CYCLES = [
    ({"a": "from hybrid_ep import b\n", "b": "import hybrid_ep.a\n"}, ["a", "b"]),
    ({"a": "from . import b\n", "b": "from .a import x\n"}, ["a", "b"]),
    ({"a": "from hybrid_ep import b\n", "b": "def f():\n    from hybrid_ep.a import x\n"}, ["a", "b"]),
    ({"a": "import hybrid_ep.b\n", "b": "import hybrid_ep.c\n", "c": "import hybrid_ep.a\n"}, ["a", "b", "c"]),
    (
        {
            "a": "from hybrid_ep import b\n",
            "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hybrid_ep import a\n",
        },
        [],
    ),
    ({"a": "from hybrid_ep import b, c\n", "b": "from hybrid_ep import c\n", "c": "import os\n"}, []),
    ({"a": "import hybrid_ep\nfrom hybrid_ep import env\n"}, []),
]

BROKEN_IDS = [f"{number}-{rule}-{path}" for number, (path, _, _, rule) in enumerate(BROKEN)]
KEPT_IDS = [f"{number}-{path}" for number, (path, _) in enumerate(KEPT)]


@pytest.mark.parametrize(("path", "text", "line", "rule"), BROKEN, ids=BROKEN_IDS)
def test_rule_can_fail(tmp_path, path, text, line, rule):
    where = "notes" if rule == "top level" else path
    assert violations(make_tree(tmp_path, {path: text})) == [(where, line, rule)]


@pytest.mark.parametrize(("path", "text"), KEPT, ids=KEPT_IDS)
def test_rule_lets_good_code_pass(tmp_path, path, text):
    assert violations(make_tree(tmp_path, {path: text})) == []


@pytest.mark.parametrize(("modules", "named"), CYCLES)
def test_cycles_of_imports(tmp_path, modules, named):
    tree = make_tree(tmp_path, {f"hybrid_ep/{name}.py": text for name, text in modules.items()})
    assert [(path, rule) for path, _, rule in violations(tree)] == [(f"hybrid_ep/{n}.py", "cycles") for n in named]


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ("runtime/a", "perf/b", False),
        ("runtime/a", "buffer", False),
        ("runtime/a", "cli/b", False),
        ("hardware/a", "errors", False),
        ("balance/a", "runtime/b", False),
        ("runtime/a", "errors", True),
        ("buffer", "runtime/b", True),
        ("perf/a", "explorer/b", True),
        ("cli/a", "perf/b", True),
    ],
)
def test_rooms(tmp_path, source, target, kept):
    """An import inside a function counts, too."""
    name = f"hybrid_ep.{target.replace('/', '.')}"
    text = f"def f():\n    import {name}\n"
    tree = make_tree(tmp_path, {f"hybrid_ep/{source}.py": text, f"hybrid_ep/{target}.py": ""})
    assert violations(tree) == ([] if kept else [(f"hybrid_ep/{source}.py", 2, "rooms")])


def test_an_allowed_cycle_passes_and_must_exist(tmp_path, monkeypatch):
    pair = ("hybrid_ep.a", "hybrid_ep.b")
    monkeypatch.setattr(check_layers, "CYCLES_ALLOWED", {pair: "until it is mended"})
    modules = {"hybrid_ep/a.py": "from hybrid_ep import b\n", "hybrid_ep/b.py": "import hybrid_ep.a\n"}
    tree = make_tree(tmp_path, modules)
    assert violations(tree) == []
    (tree / "hybrid_ep" / "b.py").write_text("import os\n")
    assert [rule for *_, rule in violations(tree)] == ["cycles"]


def test_the_picture_has_every_package_and_top_module(of_repository):
    _, picture = of_repository
    labels = {element.text for element in xml.etree.ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    remedy = "run python scripts/check_layers.py --graph docs/imports.svg"
    assert picture.read_text() == (ROOT / "docs" / "imports.svg").read_text(), remedy
    top = {path.stem for path in (ROOT / "hybrid_ep").glob("*.py")} - {"__init__"}
    assert top <= labels
    for package in ("balance", "cli", "moe", "runtime", "perf", "recipes", "megatron_patches"):
        assert any(label.startswith(f"{package}/ (") for label in labels)


def test_git_ignored_files_are_not_read(tmp_path):
    make_tree(tmp_path, {".gitignore": "junk/\n", "junk/a.py": "def f(:\n", "notes.md": "text\n"})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    assert violations(tmp_path) == [("notes.md", 1, "top level")]


def test_message_names_file_line_and_rule(tmp_path):
    make_tree(tmp_path, {"csrc/common/a.h": include("layout/buffer.h")})
    result = run_script("--root", tmp_path)
    assert result.returncode == 1
    first = result.stdout.splitlines()[0]
    assert first == "csrc/common/a.h:2: layers: common may not include layout/buffer.h"


def test_private_names_stay_in_their_room(tmp_path):
    root = make_tree(
        tmp_path,
        {
            "hybrid_ep/buffer.py": "class B:\n    def __init__(self):\n        self._s = 1\n    def _busy(self): ...\n",
            "hybrid_ep/testing.py": "def f(b):\n    return b._s\n",  # the same room
            "hybrid_ep/cli/bench.py": "def f(b):\n    b._busy()\n    b.x._replace(y=1)\n    return b._s, b._theirs\n",
            "scripts/look.py": "def f(b):\n    return b._s\n",
        },
    )
    assert violations(root) == [("hybrid_ep/cli/bench.py", 2, "private"), ("hybrid_ep/cli/bench.py", 4, "private")]


def test_stubs_are_text_too(tmp_path):
    root = make_tree(tmp_path, {"hybrid_ep/_core.pyi": f"x: str = '{HOME}'\n"})
    assert violations(root) == [("hybrid_ep/_core.pyi", 1, "machine path")]
