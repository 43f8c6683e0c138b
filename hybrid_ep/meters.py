"""What a buffer counts: rows and bytes that it sent, seconds in its launches, and whom it waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_ep.runtime.metered import summed

if TYPE_CHECKING:
    from hybrid_ep.runtime.session import Session


WAITED_IN = ("exchange", "dispatch", "combine")


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

    def wait_seconds(self, during: str | None = None) -> list[float]:
        """For each rank of the group, the seconds that this rank waited for it to come to an operation, since
        construction or reset_traffic(). Whoever is late, for its experts took longer, say, is here with its delay on
        all others; itself it waits for nobody. `during`, None for all of them together:

        * "exchange": until that rank's counts were there, in each dispatch that is given a routing and in each
          plan_clones; of all ranks of the group.
        * "dispatch", "combine": until that rank had begun the same one, by a handle or not, of the ranks of this node.
          A combine follows the experts, so that a rank whose experts take longer is late for it. A rank of another node
          counts on its own node's ranks.

        Always counted: by the lane that waits, where it waits, in one block, from its first wait's begin until the rank
        came, so that ranks that are late together count each, and a row may add up to more than the time that passed.
        Where each rank has a lane of its own, on a GPU with one node (of up to 512 ranks in an exchange, 32 in a
        dispatch and a combine), all that are late count; a lane that looks at one after the other, as a host's, finds
        there whoever came while it waited for another, who then has 0, and between nodes an exchange charges a rank
        for what it takes beyond its node's. The latency path counts in dispatches that route. Not counted: what waits
        for rows, as all else on that path does. ValueError."""
        if during is not None and during not in WAITED_IN:
            raise ValueError(f"during={during!r} must be one of {WAITED_IN}, or None for all of them")
        waited = self._open_session().wait_seconds()
        return summed(*waited.values()) if during is None else waited[during]

    def kernel_seconds(self) -> float:
        """Seconds in this rank's launches since the first call of this method, which starts the clock; waits for those
        under way. On the host a launch is its kernel; on a GPU events around it tell."""
        return self._open_session().kernel_seconds()
