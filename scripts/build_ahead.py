"""Builds that stages of run_tests.py need, made one after another beside the stages before them, on what those leave of
the cores: most tests wait for one process at a time, or for a deadline."""

import contextlib
import os
import threading
import time
import traceback
from pathlib import Path

from stage_runner import BUILD, Ended, Runner, StageTimeout

LIMIT_S = 3600
IDLE, NORMAL = 19, 0


def set_nice(process, value):
    """For all processes of the session that a process leads. Linux weighs whole sessions against one another where it
    groups tasks by them (autogroup); there a process's own nice value counts inside its session alone."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, process.pid, value)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(value))


class QuietRunner(Runner):
    """Its commands give way to all others, and their output goes to a file."""

    def __init__(self, log):
        super().__init__(quick=False)
        self.deadline = time.monotonic() + LIMIT_S
        self.log, self.nice = log, IDLE

    def show(self, text):
        with open(self.log, "a") as log:
            log.write(text)

    def started(self, process):
        super().started(process)
        with self.lock:
            set_nice(process, self.nice)

    def hurry(self):
        """Somebody waits: what runs and what comes is as important as anything else."""
        with self.lock:
            self.nice = NORMAL
            if self.process:
                set_nice(self.process, NORMAL)


class Ahead:
    """Makes `builds`, {stage: function(runner)}, in their order. What fails is made again by its stage, which says why;
    so nothing is reported from here."""

    def __init__(self, builds):
        BUILD.mkdir(parents=True, exist_ok=True)
        self.waiting, self.name, self.runner = dict(builds), None, None
        self.changed, self.ended = threading.Condition(), False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        while build := self._next():
            start = time.monotonic()
            try:
                build(self.runner)
            except Ended:
                return
            except (Exception, SystemExit):
                self.runner.show(traceback.format_exc())
            self.runner.show(f"{time.monotonic() - start:.1f} s, {self.runner.cpu_s:.1f} s of CPU\n")

    def _next(self):
        """The build to make now; none where all are made."""
        with self.changed:
            self.name, build = next(iter(self.waiting.items()), (None, None))
            if build:
                del self.waiting[self.name]
                log = BUILD / f"{self.name}-ahead.log"
                log.write_text("")
                self.runner = QuietRunner(log)
            self.changed.notify_all()
            return build

    def leave_to(self, name, deadline):
        """A stage begins, and makes what is left of its build itself: waits while that is being made here, and takes it
        off the list where it is not begun. StageTimeout at the deadline, Ended where all is ended."""
        with self.changed:
            self.waiting.pop(name, None)
            if self.name != name:
                return
            self.runner.hurry()
            left_s = max(1.0, deadline - time.monotonic())
            if not self.changed.wait_for(lambda: self.ended or self.name != name, left_s):
                raise StageTimeout
            if self.ended:
                raise Ended

    def end(self):
        """Nothing of it runs on."""
        with self.changed:
            self.ended = True
            self.waiting.clear()
            if self.runner:
                self.runner.end()
            self.changed.notify_all()
        self.thread.join(LIMIT_S)
