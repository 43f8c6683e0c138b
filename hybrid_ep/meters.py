"""What a buffer counts: rows and bytes that it sent, seconds in its launches, and whom it waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_ep.runtime.session import Session


class Meters:
    """The part of a buffer that counts."""

    def _open_session(self) -> Session:
        raise NotImplementedError

    def traffic(self) -> dict[str, int]:
        """Exact counters of rows and bytes this rank sent since construction or reset_traffic(): rows once for each
        token handed over, bytes as often as they were stored; copied_rows, copied_bytes: stored again by this rank,
        where results had no room in the arena (and, on GPUs, for a token's second expert here and on); partial_rows:
        sums that combine formed here first, of rows that it could not read where they lay, see empty()."""
        return self._open_session().traffic()

    def reset_traffic(self) -> None:
        """Counts traffic() and wait_seconds() from here on."""
        self._open_session().reset_traffic()

    def wait_seconds(self) -> list[float]:
        """For each rank of the group, the seconds that this rank's exchanges of counts waited for it since construction
        or reset_traffic(): from when this rank was ready until that one's counts were there. They wait for every rank,
        in each dispatch that is given a routing and in each plan_clones, so that whoever is late for them, for its
        experts took longer, say, is here with its delay on all others; itself it waits for nobody.

        Always counted: by the lane that waits, where it waits. A rank that came while another was waited for counts in
        full where each has a lane of its own, on a GPU with one node of up to 512 ranks; elsewhere for what it took
        beyond the other, so that on a host, whose lane looks at one after the other, it may have 0. Not counted: calls
        by a handle and the latency path, which exchange no counts, and what waits for rows."""
        return self._open_session().wait_seconds()

    def kernel_seconds(self) -> float:
        """Seconds in this rank's launches since the first call of this method, which starts the clock; waits for those
        under way. On the host a launch is its kernel; on a GPU events around it tell."""
        return self._open_session().kernel_seconds()
