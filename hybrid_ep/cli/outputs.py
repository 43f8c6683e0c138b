"""What every command writes beside its text, and under which flags: `--json FILE` and `--plot FOLDER`.

Both, and the files of other flags, are checked before any work is done, and what was written is said in one form:
`# written: PATH`. With `--json -` the document goes to stdout and the text for people to stderr."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.parser import warn_renamed

STDOUT = "-"
WIDTH = 120
_PICTURES = (".png", ".svg", ".pdf")


def add_json(parser: Any, *short: str) -> None:
    """The flag --json of commands whose answer is numbers. short: other names of it."""
    parser.add_argument(
        *short,
        "--json",
        metavar="FILE",
        help="write every number into FILE; - is stdout, and the text then goes to stderr",
    )


def add_plot(parser: Any, what: str) -> None:
    """The flag --plot. what: the pictures, e.g. "tokens/s over GPUs"."""
    parser.add_argument("--plot", metavar="FOLDER", help=f"draw {what} into FOLDER, as png and svg")


def check(args: argparse.Namespace, picture_files: bool = False) -> None:
    """UsageError where --json or --plot (if the command has them) name what cannot be written or drawn. picture_files:
    of a command whose --plot still takes FILE.png too."""
    to_json, to_plot = getattr(args, "json", None), getattr(args, "plot", None)
    _check_apart(args)
    if to_json is not None and to_json != STDOUT:
        check_file("--json", to_json)
    if to_plot:
        _check_parent("--plot", to_plot)
        if picture_files and Path(to_plot).suffix in _PICTURES:
            _check_writable(Path(to_plot))
        else:
            check_folder("--plot", to_plot)
        from hybrid_ep.cli.plotting import pyplot

        try:
            pyplot()
        except ValueError as error:
            raise UsageError(f"--plot: {error}") from None


def _check_apart(args: argparse.Namespace) -> None:
    """UsageError where two of the command's outputs have one place, and the second would take that of the first."""
    taken: dict[Path, str] = {}
    for name in ("json", "trace", "out", "plot", "sweep"):
        text = getattr(args, name, None)
        if not text or text == STDOUT:
            continue
        place = Path(text).resolve()
        if place.exists() and not (place.is_file() or place.is_dir()):  # /dev/null takes everything
            continue
        if place in taken:
            raise UsageError(f"--{name} {text}: is where {taken[place]} writes; give each a place of its own")
        taken[place] = f"--{name}"


def check_file(flag: str, path: str | None) -> None:
    """UsageError where `flag` names no file that could be, OSError where the system lets nobody write it; asked before
    the work that it is to hold."""
    if path is None:
        return
    _check_parent(flag, path)
    if not path or Path(path).is_dir():
        raise UsageError(f"{flag} {path or repr(path)}: is a folder; name a file in it")
    _check_writable(Path(path))


def check_folder(flag: str, path: str | None) -> None:
    """Likewise of a folder, which is made with its parents if it is not there."""
    if path is None:
        return
    if Path(path).exists() and not Path(path).is_dir():
        raise UsageError(f"{flag} {path}: is a file; name a folder, which is made if it is not there")
    there = _nearest(Path(path))
    if not there.is_dir():
        raise UsageError(f"{flag} {path}: {there} is a file; name a folder that can be made")
    _check_writable(Path(path))


def _check_parent(flag: str, path: str) -> None:
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{flag} {path}: no such folder; create it first")


def _check_writable(path: Path) -> None:
    if not os.access(_nearest(path), os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _nearest(path: Path) -> Path:
    """The path, or of what is not there yet the nearest above it that is."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def wrapped(line: str) -> str:
    """A # line broken at 120 columns."""
    return "\n".join(
        textwrap.wrap(line, WIDTH, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)
    )


# A command at the end of its line, and those that a sentence holds: their words stay together, to be copied.
_COMMAND = re.compile(r"(^(#\s+)?|: )hybrid-ep ")
_TOGETHER = re.compile(r"--set \S+|(?:git|pip) (?:clone|install) [^,;]+")


def narrowed(text: str, indent: str | None = None) -> str:
    """Lines of prose broken at 120 columns, the rest of each behind `indent`, or by two columns further in than it
    begins. A line that ends in a command of ours stays whole, and so do words that are to be copied together: --set and
    its value, a command that installs."""
    return "\n".join(_narrowed(line, indent) for line in text.splitlines())


def _narrowed(line: str, indent: str | None) -> str:
    if len(line) <= WIDTH or _COMMAND.search(line):
        return line
    if line.startswith("# ") and indent is None:
        return wrapped(line)
    words = _TOGETHER.sub(lambda found: found[0].replace(" ", "\0"), line)
    further = " " * (len(line) - len(line.lstrip()) + 2) if indent is None else indent
    broken = textwrap.wrap(words, WIDTH, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)
    return "\n".join(broken).replace("\0", " ")


def picture(folder: str, name: str) -> Path:
    """Where picture `name` of --plot goes, without suffix; the folder is made. FILE.png, which some commands took
    before all had folders, is FILE with a warning."""
    if Path(folder).suffix in _PICTURES:
        warn_renamed(f"--plot {folder}", f"--plot FOLDER (the picture is FOLDER/{name}.png)")
        return Path(folder).with_suffix("")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / name


@contextlib.contextmanager
def for_people(to_json: str | None) -> Iterator[None]:
    """Inside, print() goes to stderr if the document has stdout."""
    with contextlib.redirect_stdout(sys.stderr) if to_json == STDOUT else contextlib.nullcontext():
        yield


def write_json(path: str | None, document: Any, show: Callable[..., None] = print) -> None:
    """Writes the document where --json says; nothing without the flag. Call it outside of for_people. show: prints what
    was written, of a command whose stdout is something else."""
    if path is None:
        return
    text = json.dumps(document, indent=1) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)
        say_written([path], show)


def count(number: int, thing: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def say_written(paths: Iterable[str | Path], show: Callable[..., None] = print) -> None:
    """One line a file."""
    for path in paths:
        show(f"# written: {path}", flush=True)
