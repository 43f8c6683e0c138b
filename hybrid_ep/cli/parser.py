"""The argument parser of every `hybrid-ep` command: one-line errors of the command that was meant, no idle defaults.

argparse itself prints up to 25 lines of usage before its sentence, reports a subcommand's unknown flag with the
parent's usage, and writes "(default: None)" beside flags whose help already says what happens without them."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_MOST_SEED = 2**32 - 1


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends "(default: X)" only where there is an X and the help does not name a default by itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        idle = action.default is None or action.default is False or action.default in ((), [])
        if idle or "default" in (action.help or "") or not action.option_strings:
            return action.help
        return super()._get_help_string(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Names in a help, hybrid-ep-blog say, are not broken at their hyphens: they are to be copied."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)


class Parser(argparse.ArgumentParser):
    """Ends with exit code 2 and one line on stderr when a command line is wrong; subparsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})
        self.renamed: dict[str, str] = {}
        """Flags by the names that they had: each still works, with a warning."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by whether a namespace is given
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse has it, but what is unknown is the error of the parser that met it, not of its parent."""
        found, unknown = super().parse_known_args(
            [*map(self._new_name, args or ())] if self.renamed else args, namespace
        )
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _new_name(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        if flag not in self.renamed:
            return word
        warn_renamed(f"{self.prog.removeprefix('hybrid-ep ')} {flag}", self.renamed[flag])
        return self.renamed[flag] + equals + value

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own drops what cannot be written, and a help that nobody got would be a success."""
        (file or sys.stderr).write(message or "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def one_of(names: Iterable[str], what: str) -> dict[str, Any]:
    """Options of a flag with many choices, which argparse would write without a break into usage and help."""
    names = tuple(names)
    return {"choices": names, "metavar": "NAME", "help": f"{what}: one of {', '.join(names)}"}


def seed(text: str) -> int:
    """The type of --seed, as every generator of random numbers takes it."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {_MOST_SEED}")
    return value


def warn_renamed(old: str, new: str) -> None:
    """Says on stderr that an old spelling still works and what to write from now on."""
    print(f"hybrid-ep: warning: {old} still works, write {new} from now on", file=sys.stderr)
