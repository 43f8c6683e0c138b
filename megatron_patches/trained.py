"""Whether any rank of an expert-parallel group trains a layer's experts, which decides for all of them whether its
backward brings gradients home: others wait for what comes from a rank whose own experts are frozen, by its tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous


class SomeTrain:
    """Of one layer. Ranks ask each other once, in its first forward with gradients, and do not look again: experts that
    are frozen on all of them are thawed on all of them together."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._said: bool | None = None

    def ask(self, owners: Iterable[torch.nn.Parameter]) -> bool:
        """owners: this rank's experts. The first call is collective; DeadlineError where a rank does not come."""
        if self._said is None:
            mine = any(owner.requires_grad for owner in owners)
            self._said = any(Rendezvous(GroupView.of(self._group), self._timeout_s).exchange("trained experts", mine))
        return self._said
