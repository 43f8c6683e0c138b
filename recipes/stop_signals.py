"""The signals that ask a run to stop, and when one that comes again asks anew: who asks twice ends the run at once."""

from __future__ import annotations

import signal
import time

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_S = (
    1.0  # timeout(1) sends its signal to the command and to its group, and make hands on its own: all mean it once
)


class StopRequests:
    """Of one run."""

    def __init__(self) -> None:
        self._first = 0.0

    def is_new(self, number: int) -> bool:
        """Of a signal that has come: whether somebody asks by it who has not been heard. A terminal that has gone asks
        for nothing new: systemd sends SIGHUP behind SIGTERM, shells one more of it."""
        now = time.monotonic()
        if self._first and (number == signal.SIGHUP or (number == signal.SIGTERM and now - self._first < _SAME_S)):
            return False
        self._first = self._first or now
        return True
