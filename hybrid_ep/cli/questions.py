"""Commands that answer several questions: a flag that the one asked has no use for is refused, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.parser import Parser


def refuse(flag: str, value: Any, takers: Collection[str], remedy: str) -> None:
    """UsageError: a flag that belongs to something else, named in `takers`."""
    given = flag if value is True else f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
    *most, last = takers
    verb = "take" if most else "takes"
    raise UsageError(f"{given}: only {' and '.join([*([', '.join(most)] if most else []), last])} {verb} it{remedy}")


def refuse_idle(
    args: argparse.Namespace,
    add_arguments: Callable[[Any], None],
    asked: str,
    takers: Mapping[str, Sequence[str]],
    words: Sequence[str] = (),
) -> None:
    """UsageError where a flag is not at its default and the question asked does not look at it. add_arguments: of the
    command, which knows the defaults; words: what it cannot be parsed without. takers: {flag: the questions that look
    at it}; those that are not in it belong to all."""
    parser = Parser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(words))
    for flag, questions in takers.items():
        name = flag[2:].replace("-", "_")
        value = getattr(args, name)
        if asked not in questions and value != defaults[name]:
            refuse(flag, value, questions, f", {asked} does not; leave it out")
