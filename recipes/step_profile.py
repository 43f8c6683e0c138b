"""What one training step launches: operators with their calls and CPU time, and on GPUs the kernels behind them.

How often things are launched says what launches cost: experts one by one show as products in numbers of experts,
grouped ones as one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

_T = TypeVar("_T")


def profiled(step: Callable[[], _T]) -> tuple[_T, dict[str, Any]]:
    """step()'s result, and {"wall_ms", "ops": [[name, calls, self CPU ms]], "kernels": [[name, launches, ms]]}, each by
    time, the longest first. Operators inside others count once, in their own time."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as measured:
        start = time.perf_counter()
        result = step()
        wall_ms = (time.perf_counter() - start) * 1e3
    ops: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in measured.events():
        of_host = event.device_type == DeviceType.CPU
        entry = (ops if of_host else kernels)[event.name]
        entry[0] += 1
        entry[1] += (event.self_cpu_time_total if of_host else event.device_time_total) / 1e3
    return result, {"wall_ms": wall_ms, "ops": _by_time(ops), "kernels": _by_time(kernels)}


def _by_time(found: dict[str, list[float]]) -> list[list[Any]]:
    return sorted(([name, int(calls), ms] for name, (calls, ms) in found.items()), key=lambda row: -row[2])


def markdown(step: int, taken: dict[str, Any], rows: int | None = None) -> str:
    """Both tables, or the first `rows` of each; shares are of the time in the table, which threads may share."""
    calls = sum(row[1] for row in taken["ops"])
    launches = sum(row[1] for row in taken["kernels"])
    lines = [
        f"Step {step}, rank 0: {taken['wall_ms']:,.1f} ms under the profiler, {calls:,} operators of "
        f"{len(taken['ops'])} kinds, {launches:,} kernels"
    ]
    for title, head, name in (("operator", "calls | self CPU ms", "ops"), ("kernel", "launches | GPU ms", "kernels")):
        found = taken[name]
        if not found:
            continue
        total = max(sum(row[2] for row in found), 1e-9)
        lines += ["", f"| {title} | {head} | share |", "|---|---:|---:|---:|"]
        lines += [f"| `{op[:90]}` | {n:,} | {ms:,.2f} | {ms / total:.1%} |" for op, n, ms in found[:rows]]
    return "\n".join(lines)
