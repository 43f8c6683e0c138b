"""Every `hybrid-ep` command line of the README and the docs is one that the command's own parsers take. Dry runs of
`launch` are run too, for recipes refuse what parsers take, and so are questions to `simulate`, whose shapes refuse it,
by the model alone, which answers in seconds. No other is run.

Code (shell fences, indented blocks) must be complete: launchers, prompts, comments, continuations and pipes around it
are understood, `...` and `..` leave out what is required, and an UPPER word stands for any value. A `hybrid-ep ...` in
the text may be a part of a command line; what it has must exist."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from docs_pages import PAGES, ROOT, code_and_prose

from hybrid_ep import cli
from hybrid_ep.cli.parser import Parser
from hybrid_ep.perf import events
from recipes import launch_command

INLINE = re.compile(r"`(hybrid-ep\s(?:[^`\n]|\n(?!\n))+)`")
SEPARATOR = re.compile(r"[|;&]+|\d?[<>].*")
ELLIPSIS = ("...", "..", "…")
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*")


class CommandLine(NamedTuple):
    """words: behind `hybrid-ep`. whole: nothing that is required was left out."""

    line: int
    words: tuple[str, ...]
    whole: bool


def command_lines(text: str) -> Iterator[CommandLine]:
    code, prose = code_and_prose(text)
    start, joined = 1, ""
    for number, line in enumerate(code, 1):
        start = start if joined else number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        yield from _commands(start, joined + line, True)
        joined = ""
    text = "\n".join(prose)
    for match in INLINE.finditer(text):
        yield from _commands(text.count("\n", 0, match.start()) + 1, match[1], False)


def _commands(number: int, line: str, whole: bool) -> Iterator[CommandLine]:
    if not re.search(r"(^|\s)hybrid-ep(\s|$)", line):
        return
    command: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if not SEPARATOR.fullmatch(word):
            command.append(word)
            continue
        if "hybrid-ep" in command:
            words = command[command.index("hybrid-ep") + 1 :]
            said = tuple(w.split("|")[0] for w in words if w not in ELLIPSIS)
            yield CommandLine(number, said, whole and len(said) == len(words))
        command = []


class Refused(Exception):
    """What argparse said."""


def refusal(words: tuple[str, ...], whole: bool) -> str | None:
    """None, or why the parsers do not take the words."""
    said = _parse(words, whole)
    if not whole and said and "expected" in said:  # the text names an option without its value
        said = _parse((*words, "VALUE"), whole)
    return said


def _parse(words: tuple[str, ...], whole: bool) -> str | None:
    parser = cli.build_parser(only=words[0] if words else None)
    _prepare(parser, whole)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for kind in (argparse.ArgumentParser, Parser):  # Parser has an error() of its own
            patch.setattr(kind, "error", _refuse)
        for name in ("_get_value", "_check_value"):
            patch.setattr(argparse.ArgumentParser, name, _with_placeholders(name))
        try:
            parser.parse_args(words)
        except Refused as error:
            return str(error)
        except SystemExit:  # --help; errors end in _refuse
            pass
    return None


def _prepare(parser: argparse.ArgumentParser, whole: bool) -> None:
    """No abbreviations; nothing is required of a part."""
    parser.allow_abbrev = False
    for action in parser._actions:
        action.required = action.required and whole
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _prepare(inner, whole)


def _refuse(parser, message):
    raise Refused(message)


def _with_placeholders(name):
    original = getattr(argparse.ArgumentParser, name)

    def method(self, action, value):
        return value if isinstance(value, str) and PLACEHOLDER.fullmatch(value) else original(self, action, value)

    return method


@pytest.fixture(autouse=True)
def _launch(monkeypatch):
    """An entry point, which a source tree on PYTHONPATH has not."""
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))


FOUND = [
    pytest.param(found, id=f"{page.relative_to(ROOT)}:{found.line}")
    for page in PAGES
    for found in command_lines(page.read_text())
]


@pytest.mark.parametrize("found", FOUND)
def test_documented_command(found):
    said = refusal(found.words, found.whole)
    assert said is None, f"hybrid-ep {shlex.join(found.words)}: {said}"


def test_most_pages_have_some():
    assert len(FOUND) > 30


DRY_RUNS = {  # pages of results are records of their day, refusals among them
    tuple(sorted(p.values[0].words)): p
    for p in FOUND
    if {"launch", "--dry-run"} <= {*p.values[0].words} and not str(p.id).startswith("docs/results/")
}


@pytest.mark.parametrize("found", DRY_RUNS.values())
def test_a_dry_run_of_launch_is_a_script(found, capsys):
    assert launch_command.main(found.words[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


def test_dry_runs_of_three_pages_are_among_them():
    assert len({str(p.id).split(":")[0] for p in DRY_RUNS.values()}) > 2


QUESTIONS = {
    p.values[0].words: p
    for p in FOUND
    if p.values[0].words[:1] == ("simulate",)
    and len(p.values[0].words) > 1
    and not {"latency", "events"} & {*p.values[0].words}  # the event engine's, of minutes
    and not any(map(PLACEHOLDER.fullmatch, p.values[0].words))
    and refusal(p.values[0].words, True) is None  # the text may hold a part of one
    and not str(p.id).startswith("docs/results/")
}


@pytest.mark.parametrize("found", QUESTIONS.values())
def test_a_question_to_simulate_is_answered(found, monkeypatch, tmp_path, capsys):
    if "--sweep" in found.words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(events, "missing", lambda: "left out here")
    assert cli.main([*found.words]) == 0, capsys.readouterr().err


def test_questions_of_two_pages_are_among_them():
    assert len(QUESTIONS) > 7 and len({str(p.id).split(":")[0] for p in QUESTIONS.values()}) > 1


SAMPLE = """
Ask `hybrid-ep simulate --recommend`, or `hybrid-ep
balance report`; not `make bench`.

```bash
hybrid-ep bench --ranks 2 \\
    --tokens 64 > out.txt        # a comment; hybrid-ep is not called here
$ srun -n 4 hybrid-ep doctor --multi | hybrid-ep tune ...
# hybrid-ep bench (its output)
```

```python
hybrid-ep bench --of-another-language
```

    hybrid-ep report scaling RUN .. --ranks 3
"""


def test_what_is_found():
    assert list(command_lines(SAMPLE)) == [
        (6, ("bench", "--ranks", "2", "--tokens", "64"), True),
        (8, ("doctor", "--multi"), True),
        (8, ("tune",), False),
        (16, ("report", "scaling", "RUN", "--ranks", "3"), False),
        (2, ("simulate", "--recommend"), False),
        (2, ("balance", "report"), False),
    ]


@pytest.mark.parametrize(
    "line, why",
    [
        ("hybrid-ep bench --rank 2", "--rank"),  # no abbreviations
        ("hybrid-ep bench --ranks two", "invalid int value"),
        ("hybrid-ep bnech", "invalid choice"),
        ("hybrid-ep balance report", "required"),
        ("hybrid-ep balance report ... --epsize 4", "--epsize"),
        ("hybrid-ep simulate --cluster", "expected one argument"),
        ("hybrid-ep launch tiny_cpu --hardware abacus", "invalid choice"),
    ],
)
def test_a_wrong_line_is_refused(line, why):
    (found,) = command_lines(f"```bash\n{line}\n```\n")
    assert why in refusal(found.words, found.whole)


@pytest.mark.parametrize(
    "line",
    [
        "hybrid-ep bench --ranks N --cluster NAME",
        "hybrid-ep balance plan ... -o plan.yaml",
        "hybrid-ep balance report STATS --ep 4",
        "hybrid-ep tune --help",
    ],
)
def test_a_right_line_is_taken(line):
    (found,) = command_lines(f"    {line}\n")
    assert refusal(found.words, found.whole) is None


def test_a_wrong_part_of_a_line_is_refused():
    (found,) = command_lines("Try `hybrid-ep balance report --epsize 4`.")
    assert "--epsize" in refusal(found.words, found.whole)
