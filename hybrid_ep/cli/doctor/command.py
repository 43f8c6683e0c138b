"""`hybrid-ep doctor`: is this machine fit to train on? One line a check, OK, WARN or FAIL, each with its remedy.

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
import json
from collections.abc import Sequence

from hybrid_ep.cli import EXIT_OK, EXIT_WRONG, UsageError
from hybrid_ep.cli.doctor import fabric, machine, selftest, software
from hybrid_ep.cli.doctor.finding import FAIL, OK, WARN, Finding

CHECKS = {
    "python": software.python, "environment": software.environment, "torch": software.torch, "core": software.core,
    "megatron": software.megatron, "optional": software.optional, "gpu": machine.gpu,
    "cuda library": machine.cuda_library, "nvlink": machine.nvlink, "device memory": machine.device_memory,
    "driver": fabric.check_driver, "nvcc": machine.nvcc,
    "nic": fabric.check_nics, "gpu and nic": fabric.check_pairs, "gpudirect": fabric.check_gpudirect,
    "shared memory": machine.shared_memory, "locked memory": machine.locked_memory,
    "grouped gemm": selftest.grouped_gemm, "loopback": selftest.loopback,
    "gpu loopback": selftest.gpu_loopback,
}
OF_A_GPU_NODE = ("gpu", "cuda library")  # checks that take required=True: what they miss is a FAIL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, one object")
    parser.add_argument("--require-gpu", action="store_true",
                        help="for nodes that train on GPUs: no GPU, or no CUDA library of ours, is a FAIL")
    parser.add_argument("--multi", action="store_true",
                        help="under torchrun or srun: time every pair of ranks and name the slow and the silent")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
                        help="with --multi: how long a rank may stay silent")
    parser.add_argument("--mib", type=float, default=8.0, help="with --multi: size of the large message")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.multi:
        if args.require_gpu:
            raise UsageError("--require-gpu with --multi: pairs exchange host memory; run doctor --require-gpu by "
                             "itself, on every node")
        from hybrid_ep.cli.doctor import pairs

        try:
            report = pairs.examine(args.timeout, int(args.mib * 2**20))
        except ValueError as error:
            raise UsageError(str(error)) from error
        if report is None:  # another rank speaks
            return EXIT_OK
        findings, more = report
    else:
        findings, more = examine(args.require_gpu), {}
    show(findings, args.json, more)
    return EXIT_WRONG if any(f.status == FAIL for f in findings) else EXIT_OK


def show(findings: Sequence[Finding], as_json: bool, more: dict) -> None:
    """Prints the report; `more` goes into the JSON object beside the findings."""
    if as_json:
        counts = {status: sum(f.status == status for f in findings) for status in (OK, WARN, FAIL)}
        print(json.dumps({"findings": [dataclasses.asdict(f) for f in findings], "counts": counts, **more}, indent=2))
    else:
        for finding in findings:
            print(finding)


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
