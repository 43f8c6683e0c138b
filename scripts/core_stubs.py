"""Writes hybrid_ep/_core.pyi, the types of the compiled core, from the signatures that pybind11 puts into docstrings.

    python scripts/core_stubs.py            write the file
    python scripts/core_stubs.py --check    exit 1, and say what differs, where the committed file is stale

The core must be built and current. What a binding does not say, the stub cannot: types are mended in csrc/bindings
(py::arg names, pybind11/typing.h for tuples and dictionaries), not here. A default of None makes a parameter optional,
and a pointer's None with it; a C++ name of a class that is bound is read as that class, any other is an error.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

COLUMNS = 112  # of a line before it is indented
ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "hybrid_ep" / "_core.pyi"
HEAD = '''"""Types of the compiled core. Written by scripts/core_stubs.py: change csrc/bindings, then run it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
'''
# pybind11's words -> ours. Integers are taken from whatever is one; a stub that says so would be unreadable.
WORDS = (
    (r"typing\.SupportsInt(?: \| typing\.SupportsIndex)?", "int"),
    (r"typing\.SupportsFloat(?: \| typing\.SupportsIndex)?", "float"),
    (r"hybrid_ep\._core\.(?:cuda\.)?(?=\w)", ""),
    (r"hep::(?:\w+::)*(?=\w)", ""),
    (r"(?:collections\.abc|typing)\.Sequence", "Sequence"),
    (r"numpy\.typing\.NDArray|numpy\.ndarray(?=\[)", "NDArray"),
    (r"(?<=: )numpy\.ndarray(?=[,)])", "NDArray[Any]"),
    (r"typing\.Any|\bobject\b", "Any"),
    (r"(?:typing\.)?Optional\[(\w+(?:\[[^\[\]]*\])?)\]", r"\1 | None"),
    (r": (\w[\w\[\], .]*?) = None", r": \1 | None = None"),
    (r"Any \| None = None", "Any = None"),
    (r"(?<=: )dict(?= =|[,)])", "dict[str, Any]"),
    (r"\*args(?: ?: object)?(?=[,)])", "*args: Any"),
)


class StubError(ValueError):
    """A signature that cannot be a stub."""


def normalized(signature: str) -> str:
    """A pybind11 signature in the words of the stub."""
    for pattern, word in WORDS:
        signature = re.sub(pattern, word, signature)
    return signature


def split(doc: str, name: str) -> tuple[str, str]:
    """(signature, the rest) of a docstring of pybind11."""
    head, _, rest = (doc or "").partition("\n")
    if not head.startswith(f"{name}("):
        raise StubError(f"{name}: its docstring begins with no signature: {head!r}")
    return normalized(head), textwrap.dedent(rest).strip()


def documented(text: str) -> str:
    """The body of a function of a stub: its docstring, or nothing."""
    if not text:
        return " ..."
    lines = text.splitlines()
    if len(lines) == 1 and len(text) < 100:
        return f'\n    """{text}"""'
    lines[0] = '"""' + lines[0]
    body = [part for one in lines for part in (textwrap.wrap(one, COLUMNS - 4, subsequent_indent=_indent(one)) or [""])]
    return "\n" + textwrap.indent("\n".join(body) + '"""', "    ")


def _indent(line: str) -> str:
    return " " * (len(line) - len(line.lstrip()))


def function(name: str, doc: str, *, known: frozenset[str], static: bool = False) -> str:
    """A function or method. StubError for a name that nothing in the core or the head of the stub defines."""
    signature, rest = split(doc, name)
    signature = re.sub(r"\(self: [\w.]+", "(self", signature)
    text = f"def {signature}:{documented(rest)}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise StubError(f"{name}: {signature} is no Python ({error.msg})") from error
    annotations = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    strange = sorted({n.id for n in annotations} - known)
    if re.search(r"-> (tuple|dict|list)$", signature):
        raise StubError(f"{name}: {signature} says no more than that: give the binding a type of pybind11/typing.h")
    if strange:
        raise StubError(f"{name}: nothing is called {', '.join(strange)} in {signature}: give the binding its type")
    return _wrapped(("@staticmethod\n" if static else "") + text)


def _wrapped(text: str) -> str:
    """Long signatures broken between parameters; methods are indented by four more."""
    out: list[str] = []
    for line in text.splitlines():
        if len(line) <= COLUMNS or not line.startswith("def "):
            out.append(line)
            continue
        opened = line.index("(") + 1
        current = line[:opened]
        for number, parameter in enumerate(_parameters(line[opened:])):
            if number and len(current) + 1 + len(parameter) > COLUMNS:
                out.append(current)
                current = " " * opened + parameter
            else:
                current += f" {parameter}" if number else parameter
        out.append(current)
    return "\n".join(out)


def _parameters(rest: str) -> list[str]:
    """What follows the opening bracket, cut behind the commas that part parameters."""
    parts, depth, begin = [], 1, 0
    for at, symbol in enumerate(rest):
        depth += (symbol in "([{") - (symbol in ")]}")
        if symbol == "," and depth == 1:
            parts.append(rest[begin : at + 1].strip())
            begin = at + 1
    return [*parts, rest[begin:].strip()]


def type_of(value: Any) -> str:
    """The type of a class attribute."""
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{type(key).__name__}, {type(item).__name__}]"
    return type(value).__name__


def class_stub(cls: type, known: frozenset[str]) -> str:
    """A bound class: attributes of the class, properties, methods in the order of their names."""
    members, constants = [], []
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if type(member).__name__ == "pybind11_static_property":
            constants.append(f"{name}: ClassVar[{type_of(getattr(cls, name))}]")
        elif isinstance(member, property):
            members.append("@property\n" + getter(name, member, known))
        elif isinstance(member, staticmethod):
            members.append(function(name, member.__func__.__doc__ or "", known=known, static=True))
        elif name == "__init__" and not (member.__doc__ or "").startswith("__init__(self: "):
            continue  # made by the core alone
        elif callable(member):
            members.append(function(name, member.__doc__ or "", known=known))
    text = "\n\n".join(["\n".join(constants), *members] if constants else members)
    doc = (cls.__doc__ or "").strip()
    body = "\n\n".join(filter(None, [f'"""{doc}"""' if doc else "", text]))
    return f"class {cls.__name__}:\n" + textwrap.indent(body, "    ")


def getter(name: str, member: property, known: frozenset[str]) -> str:
    """A property; its getter's signature says the type."""
    head, _, rest = (member.fget.__doc__ or "").partition("\n") if member.fget else ("", "", "")
    returned = head.rpartition(" -> ")[2]
    if not returned or "(" not in head:
        raise StubError(f"{name}: the property's getter has no signature: {head!r}")
    text = member.__doc__ or rest
    return function(name, f"{name}(self: x) -> {returned}\n{text.strip()}", known=known)


def members_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    return ((name, member) for name, member in sorted(vars(module).items()) if not name.startswith("_"))


def stub_of(core: ModuleType) -> str:
    """The text of the stub."""
    submodules = [m for _, m in members_of(core) if isinstance(m, ModuleType)]
    classes = {name for module in (core, *submodules) for name, m in members_of(module) if inspect.isclass(m)}
    known = frozenset(
        classes
        | {
            "Any",
            "NDArray",
            "Sequence",
            "numpy",
            "torch",
            "int",
            "float",
            "str",
            "bool",
            "bytearray",
            "bytes",
            "list",
            "dict",
            "tuple",
            "staticmethod",
            "property",
            "object",
        }
    )
    parts: list[str] = []
    for _, member in members_of(core):
        if inspect.isclass(member):
            parts.append(class_stub(member, known))
    for module in submodules:
        inside = [
            class_stub(m, known) if inspect.isclass(m) else function(n, m.__doc__ or "", known=known, static=True)
            for n, m in members_of(module)
        ]
        doc = f'"""{(module.__doc__ or "").strip()} A module; its names are read as those of a class."""'
        body = textwrap.indent("\n\n".join([doc, *inside]), "    ")
        name = module.__name__.rpartition(".")[2]
        parts.append(f"class {name}:\n" + re.sub(r"-> DeviceMemory", f"-> {name}.DeviceMemory", body))
    for name, member in members_of(core):
        if not inspect.isclass(member) and not isinstance(member, ModuleType):
            parts.append(function(name, member.__doc__ or "", known=known))
    return HEAD + "\n" + "\n\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from hybrid_ep import _core

    wanted = stub_of(_core)
    found = STUB.read_text() if STUB.is_file() else ""
    if not args.check:
        STUB.write_text(wanted)
    elif wanted != found:
        sys.stdout.writelines(
            difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), "committed", "of the core")
        )
        sys.exit(f"core_stubs: {STUB.relative_to(ROOT)} is stale: run python scripts/core_stubs.py and commit it")


if __name__ == "__main__":
    main()
