"""What a message tells its reader to do can be done: extras and packages, commands, scripts and their flags, targets of
the Makefile, fields of recipes, taken from the strings of the three packages and tried where that costs nothing."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from functools import lru_cache

import pytest
from docs_pages import ROOT
from test_docs_commands import refusal

from hybrid_ep import cli
from recipes.cluster import ClusterRun
from recipes.config import RunConfig

PIP = re.compile(r"pip install ((?:--[a-z-]+ )*)('[^']+'|[\w.\[\]<>=-]+)")
SCRIPT = re.compile(r"(?:python |')(scripts/\w+\.py)((?: --[a-z-]+)*)")
MAKE = re.compile(r"(?:^|[`('] ?|or |: )make ([a-z-]+)(?=[.,;)'`]| [A-Z]+=| does| which|$)")
COMMAND = re.compile(r"hybrid-ep (?:bench|balance|doctor|launch|report|simulate|tune)[^;:,.()`'\n]*")
SET = re.compile(r"--set (\w+(?:\.\w+)?)=")


@lru_cache(maxsize=1)
def strings() -> list[tuple[str, str]]:
    """(where, text) of every string of the packages that is no docstring; what is formatted into one is X."""
    found = []
    for package in ("hybrid_ep", "megatron_patches", "recipes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree, name = ast.parse(path.read_text()), path.relative_to(ROOT)
            docstrings = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if id(node) in docstrings or id(node) in inside:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append((f"{name}:{node.lineno}", node.value))
                elif isinstance(node, ast.JoinedStr):
                    text = "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
                    found.append((f"{name}:{node.lineno}", text))
    return found


def matches(pattern: re.Pattern) -> list:
    return [pytest.param(text, match, id=where) for where, text in strings() for match in pattern.finditer(text)]


def extras() -> dict[str, str]:
    """{extra: its lines of pyproject.toml}."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return {name: body for name, body in re.findall(r"^(\w+) = (\[.*?\])$", text, re.M | re.S)}


# A name that a message may use for what an extra brings.
SAID_AS = {"megatron": ("megatron",)}


@pytest.mark.parametrize("text, match", matches(PIP))
def test_what_pip_is_to_install_is_a_package_or_an_extra_that_brings_it(text, match):
    wanted = match[2].strip("'")
    name, bracket, rest = wanted.partition("[")
    for extra in rest.partition("]")[0].split(",") if bracket and name in ("hybrid_ep", ".") else ():
        assert extra in extras(), f"{wanted}: no such extra"
        brought = [*re.findall(r'"([A-Za-z]+)', extras()[extra]), *SAID_AS.get(extra, ())]
        others = text.replace(match[0], "").lower() or "recipes"
        assert any(word.lower() in others for word in brought) or name == ".", f"{wanted} brings {brought}"
    assert re.fullmatch(r"\.|[A-Za-z][\w-]*(\[[\w,]+\])?([<>=!~][\w.,<>=]*)?|\.\[[\w,]+\]", wanted), wanted


def script_help(path: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / path), "--help"], cwd=ROOT, text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("text, match", matches(SCRIPT))
def test_scripts_are_there_and_have_the_flags(text, match):
    for flag in match[2].split():
        assert flag in script_help(match[1])
    assert (ROOT / match[1]).is_file()


@pytest.mark.parametrize("text, match", matches(MAKE))
def test_targets_of_make_are_there(text, match):
    assert re.search(rf"^{match[1]}:", (ROOT / "Makefile").read_text(), re.M), match[0]


@pytest.mark.parametrize("text, match", matches(COMMAND))
def test_commands_are_ones_that_the_parsers_take(text, match, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    words = []
    for word in shlex.split(match[0])[1:]:
        if not (word.startswith("--") or word in cli.COMMANDS or re.fullmatch(r"[A-Z_]{2,}|scaling", word)):
            break
        words.append(word)
    said = refusal(tuple(words), False)
    assert said is None or "expected" in said, f"{match[0]}: {said}"


@pytest.mark.parametrize("text, match", matches(SET))
def test_fields_of_recipes_are_there(text, match):
    section, dot, field = match[1].partition(".")
    if not dot:
        assert section in {f.name for f in dataclasses.fields(ClusterRun)}
    else:
        assert section in {f.name for f in dataclasses.fields(RunConfig)}


def test_there_are_some_of_each_kind():
    counts = {pattern.pattern[:12]: len(matches(pattern)) for pattern in (PIP, SCRIPT, MAKE, COMMAND, SET)}
    assert min(counts.values()) >= 1 and counts[PIP.pattern[:12]] >= 10, counts
