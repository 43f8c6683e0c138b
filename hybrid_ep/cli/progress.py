"""How far a command is, for a person who waits: a bar with the time that is left, or a sentence, on a terminal.

Both go to stderr and only where stderr is a terminal, so that no file and no pipe has them. The bar is rich's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with a bar named `what` while they last. It is drawn between two items and by no other thread, so
    that it takes no time from what is measured."""
    todo = list(items)
    if not sys.stderr.isatty() or len(todo) < 2:
        yield from todo
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        say(f"{what}: {len(todo)} to do; a bar with the time left needs rich: pip install 'hybrid_ep[bench]'")
        yield from todo
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        yield from bar.track(todo, description=what)


def say(sentence: str) -> None:
    """What is about to take long, before it does."""
    if sys.stderr.isatty():
        print(f"hybrid-ep: {sentence}", file=sys.stderr, flush=True)
