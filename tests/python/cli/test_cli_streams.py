"""A stdout that takes no more, and files that the system refuses: one line and the documented exit code, or silence
where a reader has gone; of commands with ranks too, whose other ranks have nothing to say of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_ep import cli
from hybrid_ep.cli import launch

ROOT = Path(__file__).parents[3]
RANKS = ["--ranks", "2", "--tokens", "16", "-n", "1", "-w", "0"]
TALKERS = {
    "simulate": ["simulate", "--sources"],
    "help": ["bench", "--help"],
    "bench": ["bench", *RANKS, "--op", "dispatch"],
    "tune": ["tune", *RANKS, "--num-sms", "1", "--chunk", "16"],
}


def run(argv, **options):
    command = [sys.executable, "-m", "hybrid_ep", *argv]
    return subprocess.run(command, cwd=ROOT, text=True, timeout=240, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("talker", TALKERS)
def test_a_reader_that_has_gone_ends_it_quietly(talker):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(TALKERS[talker], stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (cli.EXIT_PIPE_CLOSED, "")


@pytest.mark.parametrize("talker", TALKERS)
def test_a_full_disk_under_stdout_is_one_line(talker):
    with open("/dev/full", "w") as full:
        done = run(TALKERS[talker], stdout=full)
    assert (done.returncode, done.stderr) == (cli.EXIT_FAILED, "hybrid-ep: output: No space left on device\n")


def test_a_closed_stdout_is_refused_before_the_work():
    done = run(["simulate", "--sources"], preexec_fn=lambda: os.close(1))
    assert done.returncode == cli.EXIT_FAILED
    assert done.stderr.startswith("hybrid-ep: stdout is closed; redirect it") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["/proc/new.json", "/dev/full", "/" + "x" * 300])
def test_a_file_that_the_system_refuses_is_one_line_that_names_it(path, capsys):
    assert cli.main(["simulate", "--nodes", "2", "--json", path]) == cli.EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("hybrid-ep: ") and error.count("\n") == 1 and (path in error or path == "/dev/full")


def test_an_error_that_is_no_answer_of_a_file_system_keeps_its_traceback_and_is_a_failure(monkeypatch, capsys):
    def broken(args, argv):
        raise ConnectionResetError(104, "reset")

    monkeypatch.setattr("hybrid_ep.cli.simulate.command.run", broken)
    assert cli.main(["simulate"]) == cli.EXIT_FAILED
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and said[-1].startswith("ConnectionResetError: ")


def test_what_ranks_print_is_handed_on_whole(monkeypatch, capfd):
    """The last words of a rank, too, and of ranks whose number is not 0."""
    monkeypatch.setattr(launch, "_rank_environment", lambda rank, *_: os.environ | {"RANK": str(rank)})
    real = subprocess.Popen
    program = "import os; print('x' * 300_000, os.environ['RANK'])"
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda _, **options: real([sys.executable, "-c", program], **options)
    )
    assert launch.run_ranks(["bench"], 2, 60.0, 1) == 0
    printed = capfd.readouterr().out
    assert printed.count("x") == 600_000 and {"0", "1"} < {*printed}


def test_no_rank_sees_another_end():
    """All stand still before the first one is ended."""
    sent = []

    class Rank:
        def poll(self):
            return None

        def send_signal(self, number):
            sent.append(number)

        def wait(self, timeout):
            return 0

    launch._end([Rank(), Rank()])
    assert sent == [signal.SIGSTOP] * 2 + [signal.SIGTERM] * 2 + [signal.SIGCONT] * 2
