"""What a test leaves in /dev/shm. What stood there before is not its doing: a job that was killed may leave names."""

from __future__ import annotations

import os


class ShmNames:
    def __init__(self) -> None:
        self._before = set(self.now())

    @staticmethod
    def now() -> list[str]:
        """Every name of hybrid_ep's, also in a process of a world."""
        return [name for name in os.listdir("/dev/shm") if "hybrid_ep" in name]

    def new(self, names: list[str] | None = None) -> list[str]:
        """Those of `names` (by default of now) that were not there when this object was made."""
        return sorted(set(self.now() if names is None else names) - self._before)
