"""Every remedy of the doctor, of the messages that name a command, and of the troubleshooting page stands in one of two
tables: which test does what it says, or why none can. A remedy that is in neither fails here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

import pytest
from docs_pages import ROOT
from test_remedies import MAKE, PIP, SCRIPT, SET, strings

RUN = "docs/test_remedies_run.py::"
FEATURES, HABITS, FAULTS = "test_buffer_features.py::", "habits/test_habits_process.py::", "runtime/test_faults.py::"
TOPOLOGY, MEGATRON = "runtime/test_topology.py::", "../megatron/"
LAUNCH = "recipes/test_recipes_launch_command.py::"

# {what the remedy says: the test that does it}; of the troubleshooting page `exception: message` is matched.
DONE = {
    # of messages that name a command
    r"plan_file.py: pip|statistics.py: pip|report/runs.py: pip|plotting.py: pip|progress.py: pip|recipes/plots.py: pip"
    r"|cli/balance.py: pip|bench_peer_megatron.py: pip|software.py: .*hybrid_ep\[megatron\]": RUN
    + "test_the_pip_command_of_a_message_brings_what_was_missing",
    r"launch_checks.py: --set (data_path|tokenizer|train_steps)|--set apex=": RUN
    + "test_apex_is_left_out_and_data_are_given",
    r"launch_checks.py: --set megatron_path": LAUNCH
    + "test_mock_data_and_what_is_missing_here_are_said_before_anything_starts",
    # of the doctor
    r"machine.py: registered buffers live there": RUN + "test_dev_shm_is_enlarged_by_the_doctor_s_own_command",
    r"machine.py: find ": RUN + "test_segments_of_killed_jobs_are_removed_by_the_doctor_s_own_command",
    r"software.py: write X, or unset": "cli/test_cli_doctor.py::"
    "test_a_misspelt_variable_is_a_warning_with_the_name_that_was_meant",
    r"software.py: unset ": RUN + "test_a_variable_that_is_unset_is_right_again",
    # of the troubleshooting page
    r"ValueError: an argument's name": FEATURES + "test_a_budget_that_is_too_small_raises_on_every_rank_alike",
    r"ValueError: ranks ... of group": "habits/test_habits_environment.py::test_habits_nonsense_on_some_ranks",
    r"ValueError: ... must be the same": FEATURES + "test_ranks_that_disagree_about_a_call_are_named",
    r"ValueError: the group's ranks lie": TOPOLOGY + "test_a_domain_may_span_hosts_and_a_host_may_hold_domains",
    r"ValueError: tuning=": RUN + "test_hybrid_ep_tune_writes_a_tuning_file_again",
    r"ValueError: environment variable": RUN + "test_a_variable_that_is_unset_is_right_again",
    r"ValueError: nodes: rank 3": LAUNCH + "test_ranks_on_cpus_must_share_a_machine",
    r"BootstrapError: rank 3": FAULTS + "test_a_rank_that_never_comes_to_the_constructor",
    r"BootstrapError: ranks ... could not": RUN + "test_each_thing_that_may_be_lowered_makes_a_buffer_fit",
    r"RuntimeWarning: in some node": "runtime/test_arena_apart.py::test_the_heap_of_nvshmem_has_its_arena_beside_it",
    r"MemoryError: ": RUN + "test_dev_shm_is_enlarged_by_the_command_of_the_error",
    r"CapacityError: the ranks receive": RUN + "test_a_capacity_is_raised_or_rows_are_dropped",
    r"CapacityError: num_permuted": RUN + "test_a_budget_of_rows_is_raised_or_none_or_dropped",
    r"ReentrantCallError: ": RUN + "test_every_thread_has_a_buffer_of_its_own",
    r"BufferFailedError: this buffer failed earlier": RUN + "test_a_failed_buffer_is_replaced_on_all_ranks",
    r"BufferFailedError: this buffer belongs": HABITS + "test_habits_data_loader_with_forked_workers",
    r"TypeError: a HybridEPBuffer": RUN + "test_a_module_s_state_is_saved_without_its_buffer",
    r"TypeError: a handle": RUN + "test_a_routing_is_saved_in_place_of_a_handle",
    r"RouterError: ": MEGATRON
    + "test_moe_router_guard.py::test_a_gate_of_zeros_is_caught_before_the_first_step_and_after_loading",
    r"RuntimeError: no expert was moved": MEGATRON
    + "test_balance_slow.py::test_a_move_that_one_rank_cannot_prepare_happens_nowhere",
    r"RankFailed: ": MEGATRON + "test_pretrain_run.py::test_a_killed_rank_ends_the_run",
    r"SIGABRT: terminate called": "recipes/test_recipes_rank.py::test_a_rank_leaves_with_all_that_was_said_and_begun",
    r"Slurm log: pre-flight": "../slurm/test_slurm.py::test_gpus_are_granted_and_a_failing_pre_flight_starts_no_rank",
    r"Slurm log: 3 starts": "recipes/test_recipes_cluster.py::test_a_job_that_gets_no_further_gives_up",
    r"verdict.py: make pretrain": MEGATRON + "test_pretrain_run.py::test_resuming_gives_the_same_run_bit_for_bit",
}

BUILDS = "it builds the library, minutes of a compiler: scripts/wheel_check.py does it before a release"
GPU = "it needs a GPU, its driver or its network card; the line itself is tested on a made-up machine"
OTHERS = "it is a look at another process, host, switch or cable, which a person takes"
DOWNLOADS = "it downloads a package that this machine lacks"
WORDS = "it tells what the finding means; there is nothing to run"
NOT_DONE = {
    r"pip install \.|force-reinstall|'\.\[megatron": BUILDS,
    r"scripts/build_core.py": "each test machine has run it: the core that these tests import was built by it",
    r"scripts/build_cuda.py|make cuda|needed to build only|nvshmem.py: pip|used between nodes": "it needs nvcc and "
    "some minutes: the stage cuda of scripts/run_tests.py runs it",
    r"launch_command.py: pip|hooks.py: pip": "PyYAML and megatron-core are brought by other commands, which are run",
    r"pretrain.py: make pretrain": "it makes an environment of 6 GB; a release is tried by it",
    r"ImportError: hybrid_ep's compiled core": BUILDS,
    r"transformer-engine": "its wheels need a CUDA compiler and a GPU (docs/compatibility.md)",
    r"fabric.py: |machine.py: (?!registered|find|nothing)|RuntimeError: no kind|UserWarning: |'cuda library'": GPU,
    r"machine.py: nothing|the message says why|torch's own collectives|stand-in|train a few steps|another backend"
    r"|hybrid_ep needs Linux": WORDS,
    r"install torch|torch built with|install one of those|use one of those|use that|HookError: ": DOWNLOADS,
    r"pairs.py: ": OTHERS,
    r"BootstrapError: rank 0 lost": "a process is to be kept; tests/python/runtime/test_faults.py ends it",
}


@lru_cache(maxsize=1)
def remedies() -> tuple[str, ...]:
    """`file or exception: what is to be done` of all."""
    found = [
        f"{'/'.join(where.split(':')[0].split('/')[-2:])}: {match[0].lstrip('(:or ')}" for where, match in _commands()
    ]
    return tuple(dict.fromkeys([*found, *_of_the_doctor(), *_of_the_page()]))


def _commands() -> Iterator[tuple[str, re.Match]]:
    for pattern in (PIP, SCRIPT, MAKE, SET):
        for where, text in strings():
            yield from ((where, match) for match in pattern.finditer(text))


def _text(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "X" for p in parts)


def _of_the_doctor() -> Iterator[str]:
    """What stands at the place of a remedy: third of what a check yields, last of a Finding or a Part."""
    for path in sorted((ROOT / "hybrid_ep" / "cli" / "doctor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            places: list[ast.expr] = []
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
                places = [node.value.elts[2]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Finding", "Part"):
                places = node.args[3:][-1:]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "remedy":
                places = [node.value]
            for place in places:
                inside = {id(v) for j in ast.walk(place) if isinstance(j, ast.JoinedStr) for v in j.values}
                for part in ast.walk(place):
                    if isinstance(part, (ast.JoinedStr, ast.Constant)) and id(part) not in inside:
                        if len(said := _text(part)) > len("--nvshmem"):
                            yield f"{path.name}: {said}"


def _of_the_page() -> Iterator[str]:
    table = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) >= 4 and cells[0] not in ("exception", "---"):
            yield f"{cells[0].strip('`')}: {cells[1]}"


@pytest.mark.parametrize("remedy", remedies())
def test_a_remedy_is_done_by_a_test_or_has_a_reason(remedy):
    done = [rule for rule in DONE if re.search(rule, remedy)]
    reasons = [rule for rule in NOT_DONE if re.search(rule, remedy)]
    assert done or reasons, f"{remedy!r} is done by no test: add it to DONE, or to NOT_DONE with a reason"
    assert not (done and reasons), f"{remedy!r} is in both tables: {done}, {reasons}"


@pytest.mark.parametrize("rule", [*DONE, *NOT_DONE])
def test_no_rule_is_about_nothing(rule):
    for part in rule.split("|") if "(" not in rule else [rule]:
        assert any(re.search(part, remedy) for remedy in remedies()), part


@pytest.mark.parametrize("test", sorted(set(DONE.values())))
def test_the_tests_that_do_them_are_there(test):
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / "python" / path).read_text()


def test_there_are_as_many_as_there_were():
    assert len(remedies()) > 80
