"""The `hybrid-ep` command: one program, one subcommand per module, each loaded only when it is called.

A subcommand is a module with `add_arguments(parser)` and `run(args, argv) -> int` (the exit code); one of another
package also has SUMMARY, a string literal.
Exit codes of every subcommand: 0 fine, 1 a wrong result, 2 bad usage or bad input, 3 a failure or a deadline that
passed, or a file or stdout that the system does not let it read or write (a full disk); and as shells have it 130 after
Ctrl-C (of launch also 143 after SIGTERM, 129 after SIGHUP), 141 when the reader of a pipe has gone (`hybrid-ep doctor |
head -1`).
"""

from __future__ import annotations

# A Ctrl-C before main() runs is a traceback: the rest is imported in functions.
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybrid_ep import __version__

if TYPE_CHECKING:
    import argparse

EXIT_OK, EXIT_WRONG, EXIT_USAGE, EXIT_FAILED = 0, 1, 2, 3
EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE
# What a file system says of the paths it is given, and of its space: one line. Other errors keep their traceback.
_REFUSED = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class UsageError(ValueError):
    """The caller's fault: names flag, value and remedy."""


class Failure(RuntimeError):
    """Ends the command with EXIT_FAILED and its message, one line; without a message, all has been said."""


class Command(NamedTuple):
    """Where a subcommand lives and what it is for, known without importing it. summary "": see declared_summary()."""

    module: str
    summary: str = ""


COMMANDS = {
    "balance": Command("hybrid_ep.cli.balance", "expert loads: report imbalance, plan placements"),
    "bench": Command("hybrid_ep.cli.bench.command", "time dispatch and combine, check every value"),
    "doctor": Command("hybrid_ep.cli.doctor.command", "is this machine fit: versions, limits, a loopback exchange"),
    "report": Command("hybrid_ep.cli.report.command", "strong and weak scaling from runs or from the simulator"),
    "simulate": Command("hybrid_ep.cli.simulate.command", "predict dispatch and combine on a cluster that is not here"),
    "tune": Command("hybrid_ep.cli.tune.command", "find the best blocks, chunks and path, write them for buffers"),
}


def commands() -> dict[str, Command]:
    """COMMANDS and those of other packages: entry points of the group hybrid_ep.commands, not imported."""
    from importlib.metadata import entry_points

    others = entry_points(group="hybrid_ep.commands")
    return {**{e.name: Command(e.value) for e in others}, **COMMANDS}


def declared_summary(module: str) -> str:
    """A module's SUMMARY, read from its file: to import it for a line of --help can cost seconds (torch). What it
    lacks is said in its place."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    package, *inner = module.split(".")
    spec = find_spec(package)  # of a top-level name: nothing is imported
    if spec is None:
        return f"{module}: not installed"
    if inner:
        places = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    else:
        files = [Path(spec.origin or "")]
    source = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)
    if source is None:
        return f"{module}: not installed"
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if "SUMMARY" in [getattr(target, "id", "") for target in node.targets]:
            return str(node.value.value)
    return f"{module}: has no SUMMARY"


def build_parser(only: str | None = None, known: dict[str, Command] | None = None) -> argparse.ArgumentParser:
    """The parser with the flags of subcommand `only` (the others appear by name and summary alone). known: commands(),
    where the caller has them: to find them takes a look at every package that is installed."""
    from hybrid_ep.cli.parser import Parser

    parser = Parser(prog="hybrid-ep", description="Expert-parallel dispatch and combine.")
    parser.add_argument("--version", action="version", version=f"hybrid-ep {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in (commands() if known is None else known).items():
        shown = only in (None, name)  # else nobody sees its summary
        summary = command.summary or (declared_summary(command.module) if shown else "")
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == only:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hybrid-ep ARGV` and return its exit code; the console script's entry point."""
    if sys.stdout is None:  # and the next file to be opened would be it
        print("hybrid-ep: stdout is closed; redirect it, to /dev/null where nobody reads it", file=sys.stderr)
        return EXIT_FAILED
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # argparse has printed a help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a closed pipe is noticed here, not when the interpreter ends
        return code
    except KeyboardInterrupt:
        print("hybrid-ep: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE_CLOSED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _REFUSED:
            print(f"hybrid-ep: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        else:  # Python's own exit code for it, 1, would be that of a wrong result
            import traceback

            traceback.print_exception(error)
        _drop_output()
        return EXIT_FAILED


def has_words(error: Exception) -> bool:
    """Whether main() has one line, or silence, for this error; others get a traceback."""
    return isinstance(error, UsageError | BrokenPipeError) or getattr(error, "errno", None) in _REFUSED


def _drop_output() -> None:
    """What is left in the buffer goes nowhere; the interpreter flushes stdout once more on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    known = commands()
    chosen = argv[0] if argv and argv[0] in known else None
    args = build_parser(chosen, known).parse_args(argv)
    try:
        return importlib.import_module(known[args.command].module).run(args, argv)
    except UsageError as error:
        print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Failure as error:
        if str(error):
            print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
