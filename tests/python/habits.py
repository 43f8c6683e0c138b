"""Habits of training scripts that must not change a result, each one small context manager or one form of an argument.

    with HABITS["default dtype bfloat16"].around():
        results = operations.run(..., form=HABITS[...].form)

What a process can only be born with (interpreter flags, an environment) is in test_habits_process.py;
variables of the environment are in test_habits_environment.py."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Habit:
    """around: the state of the process or thread during the calls. form: an argument, by name, as an equal one.
    in_thread: the calls are made there. gradients: autograd is possible."""

    around: Callable[[], AbstractContextManager] = nullcontext
    form: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x
    in_thread: bool = False
    gradients: bool = True
    reference: bool = True  # torch's own object collectives, which the reference is made of, work with it

    def run(self, work: Callable[[], Any]) -> Any:
        """work(), with the habit."""

        def body() -> Any:
            with self.around():
                return work()

        if not self.in_thread:
            return body()
        answer: list[Any] = []
        thread = threading.Thread(target=lambda: answer.append(body()))
        thread.start()
        thread.join()
        return answer[0]


# ---- state of the process
@contextlib.contextmanager
def setting(set_to: Callable[[Any], Any], before: Any, value: Any):
    """A global setting of torch's, and back again."""
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


@contextlib.contextmanager
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def ticking_signal():
    """A handler that does harmless work, every millisecond, in whatever wait it meets."""
    ticks: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(len(ticks)))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticks


@contextlib.contextmanager
def children_that_end():
    """SIGCHLD again and again, as workers that end send it."""
    ended: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: ended.append(1))
    stop = threading.Event()

    def bother() -> None:
        while not stop.wait(0.001):
            os.kill(os.getpid(), signal.SIGCHLD)

    thread = threading.Thread(target=bother)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGCHLD, before)
    assert ended


@contextlib.contextmanager
def collector_at_every_allocation():
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def folder_that_is_gone():
    """The working folder was removed, and no folder for temporary files is there either; nobody else may read files."""
    before, mask = os.getcwd(), os.umask(0o077)
    named = {name: os.environ.get(name) for name in ("TMPDIR", "HOME")}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    os.environ.update(dict.fromkeys(named, folder))
    try:
        yield
    finally:
        os.chdir(before)
        os.umask(mask)
        for name, value in named.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# ---- forms of an argument
def strided(name: str, x: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger tensor."""
    base = x.new_empty((*x.shape, 2))
    base[..., 0].copy_(x)
    return base[..., 0]


def transposed(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        return x
    base = x.new_empty(x.shape[::-1])
    base.t().copy_(x)
    return base.t()


def offset(name: str, x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but beginning one element behind an aligned address."""
    base = x.new_empty(x.numel() + 1)
    return base[1:].view(x.shape).copy_(x)


def negated(name: str, x: torch.Tensor) -> torch.Tensor:
    """A view with the negative bit: the memory holds -x."""
    return torch._neg_view(x.neg()) if x.dtype in FLOATS else x


def learned(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_() if x.dtype in FLOATS else x


def parameter(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(x.detach().clone()) if x.dtype in FLOATS else x


def computed(name: str, x: torch.Tensor) -> torch.Tensor:
    """Inside a graph of autograd's, no leaf of it."""
    return learned(name, x) * 1 if x.dtype in FLOATS else x


def inference_tensor(name: str, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def narrow(dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, x: x.to(dtype) if name == "topk_idx" else x


def byte_map(name: str, x: torch.Tensor) -> torch.Tensor:
    """0 or 7: everything but 0 is a choice."""
    return x.to(torch.uint8) * 7 if name == "routing_map" else x


def _dtype(dtype: torch.dtype) -> Habit:
    return Habit(lambda: setting(torch.set_default_dtype, torch.float32, dtype))


HABITS = {
    "default dtype bfloat16": _dtype(torch.bfloat16),
    "default dtype float16": _dtype(torch.float16),
    "default dtype float64": _dtype(torch.float64),
    "default device meta, as a context": Habit(lambda: torch.device("meta"), reference=False),
    "default device meta": Habit(lambda: setting(torch.set_default_device, None, "meta"), reference=False),
    "inference_mode": Habit(torch.inference_mode, gradients=False),
    "no_grad": Habit(torch.no_grad, gradients=False),
    "set_grad_enabled": Habit(lambda: torch.set_grad_enabled(False), gradients=False),
    "deterministic algorithms": Habit(lambda: setting(torch.set_deterministic_debug_mode, "default", "error")),
    "autocast bfloat16": Habit(lambda: torch.autocast("cpu", torch.bfloat16)),
    "anomaly detection": Habit(lambda: torch.autograd.set_detect_anomaly(True)),
    "flop counter": Habit(lambda: FlopCounterMode(display=False)),
    "flush denormals": Habit(lambda: setting(torch.set_flush_denormal, False, True)),
    "two threads of torch's": Habit(lambda: setting(torch.set_num_threads, 1, 2)),
    "warnings as errors": Habit(warnings_are_errors),
    "another thread": Habit(in_thread=True),
    "a signal that ticks": Habit(ticking_signal),
    "children that end": Habit(children_that_end),
    "garbage collection at every allocation": Habit(collector_at_every_allocation),
    "a folder that is gone, no TMPDIR, umask 077": Habit(folder_that_is_gone),
    "strided arguments": Habit(form=strided),
    "transposed arguments": Habit(form=transposed),
    "unaligned arguments": Habit(form=offset),
    "negated arguments": Habit(form=negated),
    "arguments that require grad": Habit(form=learned),
    "parameters": Habit(form=parameter),
    "arguments inside a graph": Habit(form=computed),
    "inference tensors": Habit(form=inference_tensor, gradients=False),
    "topk_idx int32": Habit(form=narrow(torch.int32)),
    "topk_idx int16": Habit(form=narrow(torch.int16)),
    "routing_map uint8": Habit(form=byte_map),
}
