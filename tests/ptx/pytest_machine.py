"""pytest tests/gpu --ptx-machine: every test runs on the PTX machine, and fails when the machine reports anything."""

from __future__ import annotations

import contextlib
import functools

import processes
import pytest
import torch_cuda
import world
from ptx_machine import Choices

# What the machine cannot run, and why; the page says the same.
LEFT_OUT = {"test_expandable.py": "PyTorch's own allocator", "test_nvshmem.py": "NVSHMEM"}
# Tests of who waits for whom: torch's operations join their streams there, in place of waiting for them.
QUEUED = (
    "test_calls_queued_behind_one",
    "test_a_blocking_call_synchronises_nothing",
    "test_sync_free_calls_do_not_wait_for_the_device",
    "test_layers_that_are_queued_do_not_wait",
    "test_whatever_is_late_is_waited_for",
    "test_each_of_the_waits_is_needed",
    "test_a_layer_may_be_used_on_several_streams",
)
BAD_CALLS_LEFT_OUT = {"hidden is sparse"}  # the machine has no sparse tensors of a device
# Deadlines of tests are a second or two. The host waits by its clock, the kernels by the machine's: with this speed it
# is not the host that gives up first where the process gets a fifth of a core.
CLOCK_SPEED = 5
# The files that CI runs, by the architecture whose PTX they run.
EVERYDAY = {
    90: (
        "test_host_tests.py",
        "test_by_lines.py",
        "test_streams.py",
        "test_faults.py",
        "test_arena.py",
        "test_registered.py",
        "test_clones.py",
        "test_weight_pushes.py",
        "test_turns.py",
        "test_travelling_weights.py",
    ),
    100: (
        "test_graph.py",
        "test_exact_layer.py",
        "test_waits.py",
        "test_by_lines.py",
        "test_streams.py",
        "test_faults.py",
        "test_arena.py",
        "test_registered.py",
        "test_clones.py",
        "test_weight_pushes.py",
    ),
}


class Plugin:
    def __init__(self, config):
        choices = Choices(
            seed=config.getoption("--ptx-seed"),
            races=config.getoption("--ptx-races"),
            target=config.getoption("--ptx-target"),
            clock_speed=CLOCK_SPEED,
            apart=True,
        )
        self.cuda = torch_cuda.install(choices)
        world._main = functools.partial(processes.main, choices)

    @staticmethod
    def pytest_ignore_collect(collection_path, config):
        """Files of which nothing would run: one of them imports Megatron."""
        everyday = config.getoption("--ptx-everyday") and collection_path.name.startswith("test_")
        return True if everyday and collection_path.name not in EVERYDAY[config.getoption("--ptx-target")] else None

    def pytest_collection_modifyitems(self, config, items):
        if config.getoption("--ptx-everyday"):
            mine = [i for i in items if i.path.name in EVERYDAY[config.getoption("--ptx-target")]]
            config.hook.pytest_deselected(items=[i for i in items if i not in mine])
            items[:] = mine
        for item in items:
            if item.name == "test_bad_calls":
                item.module.OTHERWISE.update(BAD_CALLS_LEFT_OUT)
            for name, why in LEFT_OUT.items():
                if name in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=f"not on the PTX machine: {why}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        queued = self.cuda.queued() if any(name in item.nodeid for name in QUEUED) else contextlib.nullcontext()
        with self.cuda.modes(), queued:
            result = yield
        if reports := self.cuda.reports():
            self.cuda.forget_reports()
            pytest.fail("the PTX machine reports:\n" + "\n".join(reports[:10]), pytrace=False)
        return result

    def pytest_terminal_summary(self, terminalreporter):
        counts = self.cuda.counts()
        terminalreporter.write_line(
            f"PTX machine: seed {self.cuda.choices.seed}, {counts['launches']} launches, "
            f"{counts['thread_instructions'] / 1e6:.0f} M thread instructions; no GPU took part"
        )
