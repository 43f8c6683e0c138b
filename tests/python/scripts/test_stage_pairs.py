"""Stages of run_tests.py that run two at a time, in a /dev/shm of their own where they look at all of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from test_run_tests import real_runner, until

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import run_tests
import stage_pairs
import stage_runner


@pytest.fixture
def pairs(monkeypatch):
    """Runs names two at a time, on as many cores as are said, with a work(name, runner); a list of who gave up."""
    monkeypatch.setattr(stage_runner, "KILL_AFTER_S", 5)
    gave_up = []

    def run(names, work, after=None, cores=2, beside=()):
        monkeypatch.setattr(stage_pairs, "usable_cores", lambda: cores)

        def runner(its_own):
            return stage_runner.LateRunner(stage_runner.Runner(False, its_own))

        return stage_pairs.two_at_a_time(names, after or {}, beside, runner, work, lambda: gave_up.append(True))

    run.gave_up = gave_up
    return run


def test_stages_run_two_at_a_time_in_order_and_print_one_after_the_other(pairs, capsys):
    """a ends once b and c have said something, and c once a has ended."""
    begun, events = [], {name: threading.Event() for name in "abcd"}
    waits_for = {"a": "bc", "c": "a"}

    def work(name, runner):
        begun.append(name)
        runner.show(f"{name} begins\n")
        if name != "a":
            events[name].set()
        for other in waits_for.get(name, ""):
            assert events[other].wait(60)
        runner.show(f"{name} ends\n")
        events[name].set()
        return name.upper()

    assert pairs("abcd", work) == dict(zip("abcd", "ABCD", strict=True))
    assert begun == ["a", "b", "c", "d"]
    said = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("...")]
    blocks = [said[i : i + 3] for i in range(0, len(said), 3)]
    assert sorted(blocks) == [[f"=== {name}", f"{name} begins", f"{name} ends"] for name in "abcd"]


def test_a_stage_begins_when_the_one_that_it_needs_has_ended(pairs):
    order = []

    def work(name, runner):
        order.append(f"{name} begins")
        if name == "cuda":
            end = time.monotonic() + 20
            while "cpp begins" not in order:
                assert time.monotonic() < end
                time.sleep(0.01)
        order.append(f"{name} ends")

    pairs(["cuda", "ptx", "cpp"], work, {"ptx": ("cuda",), "cpp": ("not among them",)})
    assert order.index("cpp begins") < order.index("cuda ends") < order.index("ptx begins")


def test_a_stage_begins_when_all_that_it_needs_have_ended(pairs):
    """Whichever of the two is the last."""
    for last in ("short", "long"):
        ended = []

        def work(name, runner, last=last, ended=ended):
            if name == "late":
                assert set(ended) == {"short", "long"}
            elif name == last:
                until(lambda: ended)
                time.sleep(0.2)
            ended.append(name)

        pairs(["short", "long", "late"], work, {"late": ("short", "long")})
        assert ended[-1] == "late"


def test_a_stage_that_waits_takes_no_core_from_two_others(pairs):
    meet = threading.Barrier(3)

    def work(name, runner):
        if name != "last":
            meet.wait(60)

    pairs(["slurm", "cpp", "cuda", "last"], work, beside={"slurm"})  # all three wait for one another


@pytest.mark.parametrize("cores, at_once, each", [(1, 1, 1), (2, 2, 1), (16, 2, 2)])
def test_cores_are_shared_out(pairs, cores, at_once, each):
    running, most, has = [], [], []

    def work(name, runner):
        running.append(name)
        time.sleep(0.05)
        most.append(len(running))
        has.append(runner.cores)
        running.remove(name)

    pairs("abcd", work, cores=cores)
    assert max(most) == at_once and has == [each] * 4


def test_a_stage_that_raises_ends_the_other_and_what_it_said_is_shown(pairs, capsys):
    begun = time.monotonic()

    def work(name, runner):
        if name == "bad":
            time.sleep(0.5)
            raise KeyboardInterrupt
        runner.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(50)"])

    with pytest.raises(KeyboardInterrupt):
        pairs(["long", "bad", "never"], work)
    said = capsys.readouterr().out
    assert time.monotonic() - begun < 30 and pairs.gave_up == [True]
    assert "=== long\n+ " in said and "never" not in said


def test_stages_are_grouped_where_the_first_of_a_group_stands(monkeypatch):
    monkeypatch.setattr(run_tests, "TOGETHER", (("slow", "quick"), ("other",)))
    assert run_tests.groups(["lint", "quick", "python", "slow", "other"]) == [
        ["lint"],
        ["slow", "quick"],
        ["python"],
        ["other"],
    ]
    assert run_tests.groups(["lint", "slow", "python", "quick"], {"slow"}) == [
        ["lint"],
        ["slow"],
        ["python"],
        ["quick"],
    ]
    assert run_tests.groups(["quick", "slow", "python"], {"slow"}) == [["quick"], ["slow"], ["python"]]


def test_every_stage_of_a_group_is_one_and_begins_after_those_of_its_group():
    for group in run_tests.TOGETHER:
        assert set(group) <= set(run_tests.STAGES)
    for later, earlier in run_tests.AFTER.items():
        group = next(group for group in run_tests.TOGETHER if later in group)
        assert all(group.index(name) < group.index(later) for name in earlier)


@pytest.fixture
def own_shm():
    return stage_runner.own_shm() or pytest.skip("this system lets nobody mount a /dev/shm of its own")


def test_what_runs_in_a_shm_of_its_own_sees_no_segment_of_others_and_leaves_none(own_shm):
    """A file of this process, and one of the command's, which a command of another stage may not see."""
    name = f"hybrid_ep.test.{os.getpid()}"
    program = f"import os; print(os.listdir('/dev/shm')); open('/dev/shm/{name}.own', 'w').write('x')"
    runner = real_runner()
    mine = Path("/dev/shm", name)
    mine.touch()
    try:
        assert name in runner.run([sys.executable, "-c", program.replace(".own", "")])[1]
        runner.within = own_shm
        assert runner.run([sys.executable, "-c", program]) == (0, "[]")
        assert runner.late().run([sys.executable, "-c", program]) == (0, "[]")
        size = "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)"
        assert runner.run([sys.executable, "-c", size])[1] == real_runner().run([sys.executable, "-c", size])[1]
        assert not Path(f"{mine}.own").exists()
    finally:
        mine.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_in_a_shm_of_its_own_ends_with_its_stage(own_shm, monkeypatch, number):
    """It is the process that the runner knows, not a child of one; and it is killed where it ignores interrupts."""
    monkeypatch.setattr(stage_runner, "KILL_AFTER_S", 5 if number == signal.SIGINT else 0.2)
    runner = real_runner(seconds=2)
    runner.within = own_shm
    handler = "SIG_DFL" if number == signal.SIGINT else "SIG_IGN"
    program = f"import signal, time; signal.signal(signal.SIGINT, signal.{handler}); time.sleep(50)"
    with pytest.raises(stage_runner.StageTimeout):
        runner.run([sys.executable, "-c", program])
    assert runner.process.returncode == -number


@pytest.mark.parametrize("can", [True, False])
def test_stages_that_look_at_shm_run_beside_others_where_each_has_its_own(monkeypatch, can):
    words = ["in", "its", "own"] if can else []
    monkeypatch.setattr(run_tests, "own_shm", lambda: words)
    monkeypatch.setattr(run_tests, "TOGETHER", (("looks", "too", "other"),))
    monkeypatch.setattr(run_tests, "LOOK_AT_SHM", {"looks", "too"})
    monkeypatch.setattr(run_tests, "BUILDS", {})
    running, beside, within = set(), {}, {}

    def stage(name):
        def work(runner):
            running.add(name)
            time.sleep(0.3)
            beside[name], within[name] = running - {name}, runner.within
            running.remove(name)
            return run_tests.Result("passed")

        return work

    for name in ("looks", "too", "other"):
        monkeypatch.setitem(run_tests.STAGES, name, (stage(name), 1, True))
    monkeypatch.setattr(stage_pairs, "usable_cores", lambda: 2)
    run_tests.run_stages(["looks", "too", "other"], False, 60)
    assert within == {"looks": words, "too": words, "other": []}
    assert any(beside.values()) == can


def test_where_nothing_may_be_mounted_nobody_has_a_shm_of_its_own(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert stage_runner.own_shm() == []


def test_results_are_in_the_order_of_the_stages_whoever_ended_first(monkeypatch):
    monkeypatch.setattr(run_tests, "TOGETHER", (("slow", "quick"),))
    seconds = {"lint": 0, "quick": 0, "slow": 0.3, "late": 0.9}

    def stage(name):
        return lambda runner: time.sleep(seconds[name]) or run_tests.Result("passed", note=name)

    for name in seconds:
        monkeypatch.setitem(run_tests.STAGES, name, (stage(name), 0.01, True))
    monkeypatch.setattr(run_tests, "BUILDS", {})
    results = run_tests.run_stages(["lint", "quick", "slow", "late"], False, 60)
    assert list(results) == ["lint", "quick", "slow", "late"]
    assert [result.note for result in results.values()] == ["lint", "quick", "slow", "late"]
    assert results["slow"].seconds > results["quick"].seconds
    spent = run_tests.run_stages(["quick", "slow"], False, -1)
    assert [result.note for result in spent.values()] == ["not run: the time budget is spent"] * 2
