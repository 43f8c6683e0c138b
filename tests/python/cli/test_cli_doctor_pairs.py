"""`hybrid-ep doctor --multi`: every pair once, and whoever is slow, silent or absent is named by rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from itertools import combinations
from pathlib import Path

import pytest

from hybrid_ep.cli import main
from hybrid_ep.cli.doctor import pairs
from hybrid_ep.cli.doctor.finding import FAIL, WARN

WORKER = Path(__file__).with_name("doctor_worker.py")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_nobody_is_in_two_places(num_ranks):
    schedule = pairs.rounds(num_ranks)
    assert sorted(p for pairs_ in schedule for p in pairs_) == sorted(combinations(range(num_ranks), 2))
    assert all(len({r for p in pairs_ for r in p}) == 2 * len(pairs_) for pairs_ in schedule)
    assert len(schedule) <= num_ranks


def results(num_ranks, slow=lambda a, b: False):
    return [
        {"ranks": [a, b], "latency_us": 50.0, "gb_per_s": 1.0 if slow(a, b) else 10.0}
        for a, b in combinations(range(num_ranks), 2)
    ]


def bad(findings):
    return [(f.check, f.status, f.text.partition(":")[0]) for f in findings if f.status in (WARN, FAIL)]


def test_one_slow_rank_is_one_line():
    found = pairs.judge(results(6, lambda a, b: 2 in (a, b)), ["h"] * 6, [], 1 << 20)
    assert bad(found) == [("slow", WARN, "rank 2 (h) with 5 of 5 peers")]


def test_a_slow_pair_is_named_as_a_pair_and_compared_with_its_kind():
    hosts = ["a", "a", "a", "b", "b", "b"]
    across = [
        {**p, "gb_per_s": p["gb_per_s"] / 4 if (hosts[p["ranks"][0]] != hosts[p["ranks"][1]]) else p["gb_per_s"]}
        for p in results(6)
    ]
    assert bad(pairs.judge(across, hosts, [], 1 << 20)) == []  # slower between hosts, as it should be
    across[0]["latency_us"] = 500.0
    assert bad(pairs.judge(across, hosts, [], 1 << 20)) == [("slow", WARN, "ranks 0 (a) and 1 (a)")]


def test_a_silent_rank_is_not_blamed_twice():
    said = [{**p, "error": "timed out"} if 3 in p["ranks"] else p for p in results(5)]
    assert bad(pairs.judge(said, ["h"] * 5, [3], 1)) == [("silent", FAIL, "rank 3 (h) fell silent")]
    assert bad(pairs.judge(said, ["h"] * 5, [], 1)) == [("broken", FAIL, "rank 3 (h) with 4 of 4 peers")]


def job(fault, victim, *flags, num_ranks=3):
    """(exit code, JSON report) of rank 0, the only one that speaks, of a job in which one rank has a fault."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, str(WORKER), str(num_ranks), fault, str(victim), "--json", "-", "--mib", "0.25", *flags]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=150, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_slow_rank_is_named():
    code, report = job("slow", 2, num_ranks=4)
    assert code == 0 and len(report["pairs"]) == 6
    slow = [f["text"].partition(":")[0] for f in report["findings"] if f["status"] == WARN]
    # A loaded machine may add a pair of its own, never before the rank that everybody complains about.
    assert slow[0] == f"rank 2 ({socket.gethostname()}) with 3 of 3 peers"


@pytest.mark.parametrize("fault, text", [("dies", "rank 1 ({}) fell silent"), ("absent", "ranks [1] did not come")])
def test_a_rank_that_dies_or_never_comes_is_named(fault, text):
    code, report = job(fault, 1, "--timeout", "2.5")
    assert code == 1
    (failure,) = [f["text"] for f in report["findings"] if f["status"] == FAIL]
    assert failure.startswith(text.format(socket.gethostname()))
    assert fault == "absent" or [p["ranks"] for p in report["pairs"] if "error" not in p] == [[0, 2]]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_alone(monkeypatch, capsys, rank, port, *flags):
    """(exit code, findings) of one rank of two whose store is at a port of this machine."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    code = main(["doctor", "--multi", "--json", "-", "--timeout", "1", *flags])
    return code, json.loads(capsys.readouterr().out)["findings"]


def test_a_store_that_nobody_serves_is_a_line_with_a_remedy(monkeypatch, capsys):
    port = free_port()
    code, (found,) = rank_alone(monkeypatch, capsys, 1, port)
    assert code == 1 and (found["check"], found["status"]) == ("rendezvous", FAIL)
    assert found["text"].startswith(f"rank 1 ({socket.gethostname()}), store at 127.0.0.1:{port}: no connection within")
    assert f"nc -vz 127.0.0.1 {port}" in found["remedy"]


def test_a_port_that_accepts_and_says_nothing_is_given_up(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        code, (found,) = rank_alone(monkeypatch, capfd, 1, mute.getsockname()[1])
    for thread in threading.enumerate():  # the one that was given up ends with the server
        if thread.name == "connect":
            thread.join(10)
    assert code == 1 and found["status"] == FAIL and "no answer of a store within 1 s" in found["text"]


def test_a_port_that_is_taken_is_said_by_the_rank_that_would_serve_it(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, (found,) = rank_alone(monkeypatch, capsys, 0, taken.getsockname()[1])
    assert code == 1 and found["status"] == FAIL and "this rank serves the store" in found["remedy"]


def test_a_silent_rank_0_is_said_by_those_who_wait_for_it(monkeypatch, capsys):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # served, and nobody calls the roll
    code, (found,) = rank_alone(monkeypatch, capsys, 1, store.port, "--timeout", "0.3")
    assert code == 1 and "rank 0 is silent at 'roll'" in found["text"] and found["remedy"]


@pytest.mark.parametrize("port", ["", "http", "0", "70000"])
def test_a_master_port_that_is_none_exits_2(monkeypatch, capsys, port):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--multi"]) == 2
    assert f"MASTER_PORT={port!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message", [([], "torchrun or srun"), (["--timeout", "0"], "--timeout 0"), (["--mib", "0"], "--mib 0")]
)
def test_bad_calls_exit_2(monkeypatch, capsys, flags, message):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--multi", *flags]) == 2
    assert message in capsys.readouterr().err
