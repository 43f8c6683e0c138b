"""`python -m megatron_patches [--hook deep_ep] SCRIPT ARGS...`: run a Megatron-LM script through hybrid_ep.

The script sees itself as `__main__`, its own directory first on sys.path, and Megatron's parser with our
flags. Under torchrun: `torchrun --nproc-per-node 8 -m megatron_patches pretrain_gpt.py --hybrid-ep ...`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import megatron_patches
from megatron_patches import hooks

USAGE = """usage: python -m megatron_patches [--hook token_dispatcher|deep_ep] SCRIPT ARGS...
       python -m megatron_patches --status

SCRIPT is a Megatron-LM script, e.g. pretrain_gpt.py; ARGS are its flags, and with the hook token_dispatcher (the
default) those below. The hook deep_ep serves hybrid_ep to Megatron as the package deep_ep and adds no flags.
Megatron-LM's training loop needs a GPU; docs/megatron.md says how to try all this on a CPU."""


def usage() -> str:
    """USAGE, and every flag that the hook token_dispatcher adds to Megatron's parser."""
    from megatron_patches import flags

    parser = argparse.ArgumentParser(prog="megatron_patches", usage=argparse.SUPPRESS, add_help=False)
    return f"{USAGE}\n\n{flags.add_arguments(parser).format_help().strip()}"


def _show(text: str) -> int:
    """0, or 141 when the reader of a pipe has gone, `| head -1` say, of which Python would print a traceback."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _refuse(why: str) -> int:
    print(f"megatron_patches: {why}", file=sys.stderr)
    return 2


def main(argv: list[str]) -> int:
    """Apply the patch, then run the script. Returns only after it has ended; 2 for a usage error."""
    hook = "token_dispatcher"
    if argv[:1] == ["--status"]:
        return _show(str(megatron_patches.status()))
    if argv[:1] in (["--hook"], ["--seam"]) and len(argv) > 1:
        hook = hooks.renamed(argv[1])
        if hook not in hooks.HOOKS:
            return _refuse(f"{argv[0]} {argv[1]}: no such hook; choose one of {', '.join(hooks.HOOKS)}")
        argv = argv[2:]
    if argv[:1] in (["-h"], ["--help"]):
        return _show(usage())
    if argv and argv[0].startswith("-"):
        known = "--hook NAME, --status or --help"
        return _refuse(f"{argv[0]}: not known before the script; give {known}, or SCRIPT and its flags behind it")
    if not argv:
        print(USAGE, file=sys.stderr)
        return 2
    script = argv[0]
    if not os.path.isfile(script):
        return _refuse(f"no such script: {script}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = argv
    megatron_patches.apply(hook, command_line=hook == "token_dispatcher")
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
