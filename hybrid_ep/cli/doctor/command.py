"""`hybrid-ep doctor`: is this machine fit to train on? One line a check, OK, WARN, FAIL or SKIP, with its remedy.

A check is a function that returns or yields findings; an exception in one is a FAIL of that check and no other. Nothing
is changed: versions, the GPUs, NICs and their driver, memory limits, the grouped GEMM's behaviour and a small dispatch
and combine inside this process, on the host and on the GPU. With --require-gpu a machine that cannot train on GPUs
fails; without it, that is a warning. With --multi, under torchrun or srun, every pair of ranks is timed
instead (`pairs`). Exit code 0, or 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence

from hybrid_ep.cli import EXIT_OK, EXIT_WRONG, UsageError, outputs
from hybrid_ep.cli.doctor import fabric, machine, selftest, software
from hybrid_ep.cli.doctor.finding import FAIL, STATES, Finding, Found
from hybrid_ep.cli.parser import warn_renamed

CHECKS: dict[str, Callable[..., Found]] = {
    "python": software.python,
    "environment": software.environment,
    "torch": software.torch,
    "core": software.core,
    "megatron": software.megatron,
    "optional": software.optional,
    "gpu": machine.gpu,
    "cuda library": machine.cuda_library,
    "nvlink": machine.nvlink,
    "device memory": machine.device_memory,
    "driver": fabric.check_driver,
    "nvcc": machine.nvcc,
    "nic": fabric.check_nics,
    "gpu and nic": fabric.check_pairs,
    "gpudirect": fabric.check_gpudirect,
    "shared memory": machine.shared_memory,
    "locked memory": machine.locked_memory,
    "grouped gemm": selftest.grouped_gemm,
    "loopback": selftest.loopback,
    "gpu loopback": selftest.gpu_loopback,
}
# Checks that take required=True: what they miss is a FAIL.
OF_A_GPU_NODE = ("gpu", "cuda library", "megatron", "optional")


_BARE_JSON = "--json without a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=_BARE_JSON,
        help="write the findings into FILE; - is stdout, and the text then goes to stderr",
    )
    parser.add_argument(
        "--require-gpu",
        action="store_true",
        help="for nodes that train recipes on GPUs: no GPU, no "
        "CUDA library of ours, no Megatron-Core or no Transformer Engine is a FAIL",
    )
    parser.add_argument(
        "--multi",
        action="store_true",
        help="under torchrun or srun: time every pair of ranks and name the slow and the silent",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="with --multi: how long a rank may stay silent  (default: 60)"
    )
    parser.add_argument("--mib", type=float, help="with --multi: size of the large message  (default: 8)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.json == _BARE_JSON:
        args.json = outputs.STDOUT
        warn_renamed("doctor --json", "--json - (for stdout) or --json FILE")
    outputs.check(args)
    for flag in ("timeout", "mib"):
        if getattr(args, flag) is not None and not args.multi:
            raise UsageError(
                f"--{flag} {getattr(args, flag):g} without --multi: it is of the pairs of ranks; add --multi"
            )
    if args.multi:
        if args.require_gpu:
            raise UsageError(
                "--require-gpu with --multi: pairs exchange host memory; run doctor --require-gpu by "
                "itself, on every node"
            )
        from hybrid_ep.cli.doctor import pairs

        try:
            report = pairs.examine(
                60.0 if args.timeout is None else args.timeout, int((8.0 if args.mib is None else args.mib) * 2**20)
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        if report is None:  # another rank speaks
            return EXIT_OK
        findings, more = report
    else:
        findings, more = examine(args.require_gpu), {}
    show(findings, args.json, more)
    return EXIT_WRONG if any(f.status == FAIL for f in findings) else EXIT_OK


def show(findings: Sequence[Finding], to_json: str | None, more: dict) -> None:
    """Prints the report with its count; `more` goes into the JSON object beside the findings."""
    counts = {status: sum(f.status == status for f in findings) for status in STATES}
    with outputs.for_people(to_json):
        for finding in findings:
            print(finding)
        print(f"# {findings[0].host}: " + ", ".join(f"{number} {status}" for status, number in counts.items()))
    outputs.write_json(to_json, {"findings": [dataclasses.asdict(f) for f in findings], "counts": counts, **more})


def examine(require_gpu: bool = False) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    findings = []
    for name, check in CHECKS.items():
        if require_gpu and name in OF_A_GPU_NODE:
            check = functools.partial(check, required=True)
        try:
            findings += [Finding(name, *found) for found in check()]
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            findings.append(Finding(name, FAIL, text, "this check itself failed; the message says why"))
    return findings
