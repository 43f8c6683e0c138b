"""What `hybrid-ep bench` tells of cores: ranks that share one wait for it, one that sleeps does not, and it is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_ep.cli import EXIT_OK, main
from hybrid_ep.cli.bench import cores
from hybrid_ep.cli.bench.session import MEMCPY

pytestmark = pytest.mark.skipif(cores.now() is None, reason="this system does not say how long threads wait for a core")

BUSY_S = 30  # the other one is ended before


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds  # of a core, however long it takes to get it
    while time.thread_time() < end:
        pass


def spent(call) -> tuple[float, float, float]:
    """(whole, running, queued) seconds of a call on a thread of its own."""
    found = []

    def body():
        before, start = cores.now(), time.perf_counter()
        call()
        whole, after = time.perf_counter() - start, cores.now()
        found.extend((whole, after.running - before.running, after.queued - before.queued))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return tuple(found)


def test_sleep_is_neither_and_work_is_running():
    whole, running, queued = spent(lambda: time.sleep(0.3))
    assert whole >= 0.3 and running < 0.1 and whole - running - queued > 0.15
    whole, running, _ = spent(lambda: spin(0.1))
    assert 0.1 <= running <= whole + 0.01


def test_two_that_share_a_core_wait_for_it():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # of this thread, and of those that it starts
    try:
        other = subprocess.Popen([sys.executable, "-c", f"import time\nwhile time.process_time() < {BUSY_S}: pass"])
        time.sleep(0.2)  # it is past its start
        whole, running, queued = spent(lambda: spin(0.3))
        other.kill()
        other.wait()
    finally:
        os.sched_setaffinity(0, allowed)
    assert running == pytest.approx(0.3, abs=0.05) and queued > 0.15
    assert running + queued == pytest.approx(whole, rel=0.2)


def test_another_system_says_nothing(monkeypatch, tmp_path):
    for place, text in ((tmp_path / "none", None), (tmp_path / "short", "0"), (tmp_path / "words", "a b c")):
        if text is not None:
            place.write_text(text)
        monkeypatch.setattr(cores, "_SCHEDSTAT", Path(place))
        assert cores.now() is None


def test_the_run_says_it_and_the_json_has_the_samples(tmp_path, capfd):
    """Two ranks on one core, which queue for it; in the JSON a sample a call, as of its time."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        words = "bench --ranks 2 --impl hybrid_ep --tokens 512 --hidden 512 --experts 8 --topk 4 -n 4 -w 1"
        assert main([*words.split(), "--json", str(tmp_path / "j.json")]) == EXIT_OK
    finally:
        os.sched_setaffinity(0, allowed)
    assert "# hybrid_ep dispatch: its ranks ran for " in capfd.readouterr().out
    (case,) = json.loads((tmp_path / "j.json").read_text())["cases"]
    of = {
        name: {(one["op"], one["implementation"]): one["by_rank"] for one in case[f"{name}_s"]}
        for name in ("samples", "running_samples", "queued_samples")
    }
    assert set(of["running_samples"]) == set(of["queued_samples"]) == set(of["samples"])
    assert ("copy", MEMCPY) in of["queued_samples"] and len(of["queued_samples"]["dispatch", "hybrid_ep"][1]) == 4
    queued = sum(map(sum, of["queued_samples"]["dispatch", "hybrid_ep"]))
    assert queued > 0.1 * sum(map(sum, of["samples"]["dispatch", "hybrid_ep"]))
