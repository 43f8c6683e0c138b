"""What the launcher of local ranks says of those that its deadline finds."""

import signal
import subprocess
import sys

from hybrid_ep.cli import launch

WITH_TRACEBACKS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_that_had_not_begun_are_told_from_those_with_a_traceback(capfd):
    with (
        subprocess.Popen(["sleep", "600"]) as early,
        subprocess.Popen([sys.executable, "-c", WITH_TRACEBACKS], stdout=subprocess.PIPE) as begun,
    ):
        try:
            assert begun.stdout.readline() == b"ready\n"
            assert launch._catches(begun.pid, signal.SIGUSR1) and not launch._catches(early.pid, signal.SIGUSR1)
            launch._explain({0: early, 2: begun}, 4.0)
            said = capfd.readouterr().err
            assert "ranks [0, 2] still run after 4 s; ranks [0] still imported torch and had not begun" in said
            assert "; where the others are:\n" in said and 'File "<string>"' in said
            launch._explain({0: early}, 4.0)
            said = capfd.readouterr().err
            assert "all of them still imported torch" in said and "where" not in said and said.count("\n") == 1
            assert early.poll() is None
        finally:
            early.kill()
            begun.kill()
