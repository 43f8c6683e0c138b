"""What a session counts, through the engines that it has one after the other as its memory grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_ep.runtime.engine_clock import EngineClock

if TYPE_CHECKING:
    from hybrid_ep.runtime.options import Options


def summed(*lists: list[float]) -> list[float]:
    return [sum(of_rank) for of_rank in zip(*lists, strict=True)]


class Metered:
    """The part of a session that counts."""

    engine: Any
    options: Options
    _clock: EngineClock | None = None
    _past_launches = 0

    def __init__(self) -> None:
        self._past_traffic: dict[str, int] = {}
        self._past_waits: dict[str, list[float]] = {}

    def traffic(self) -> dict[str, int]:
        if (engine := self.engine) is None:  # memory grows, in another thread
            return dict(self._past_traffic)
        now = engine.traffic()
        return {name: value + self._past_traffic.get(name, 0) for name, value in now.items()}

    def wait_seconds(self) -> dict[str, list[float]]:
        """{kind of operation: for each rank of the group}."""
        if (engine := self.engine) is None:
            return self._past_waits
        now = {kind: [ns / 1e9 for ns in of_ranks] for kind, of_ranks in engine.waited_ns().items()}
        return {kind: summed(s, self._past_waits.get(kind, [0.0] * len(s))) for kind, s in now.items()}

    def num_launches(self) -> int:
        return self._past_launches + int(self.engine.num_launches)

    def kernel_seconds(self) -> float:
        """In launches since this was first asked."""
        if self._clock is None:
            self._clock = EngineClock(self.options.device.type == "cuda")
            self.engine = self._clock.around(self.engine)
        return self._clock.seconds()

    def reset_traffic(self) -> None:
        """And the waits."""
        self.engine.reset_traffic()  # which may refuse
        self._past_traffic, self._past_waits = {}, {}

    def keep_counts(self) -> None:
        """Before another engine takes this one's place."""
        self._past_traffic, self._past_launches = self.traffic(), self.num_launches()
        self._past_waits = self.wait_seconds()
