"""Where the experts of one layer live: a permutation of logical experts over the owner slots of the ranks.

Slot r * L + i is the i-th owner slot of rank r, L = experts / ranks. Buffers, shapes and optimizer shards belong to
slots and never change; which expert fills a slot does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hybrid_ep.balance import inputs


class Owners:
    """expert_of_slot, slot_of: int tuples of length E, inverse to each other; rank_of: int32 [E]; is_identity."""

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        num_experts = inputs.integer("num_experts", num_experts, 1)
        num_ranks = inputs.integer("num_ranks", num_ranks, 1)
        if num_experts % num_ranks:
            raise ValueError(f"num_experts is {num_experts}: give a multiple of the {num_ranks} ranks")
        self.num_ranks, self.per_rank = num_ranks, num_experts // num_ranks
        self.assign(range(num_experts))

    def assign(self, expert_of_slot: Iterable[int]) -> None:
        """Put a new permutation in force. ValueError unless every expert has exactly one slot."""
        size = self.per_rank * self.num_ranks
        given = expert_of_slot if hasattr(expert_of_slot, "shape") else list(expert_of_slot)
        remedy = "every expert exactly one slot"
        experts = tuple(inputs.integers("expert_of_slot", given, (size,), 0, size - 1, remedy).tolist())
        if sorted(experts) != list(range(size)):
            raise ValueError(f"expert_of_slot is {experts}: give every expert exactly one slot")
        self.expert_of_slot = experts
        self.slot_of = tuple(int(s) for s in np.argsort(experts))
        self.rank_of = np.array(self.slot_of, dtype=np.int32) // self.per_rank
        self.is_identity = experts == tuple(range(len(experts)))
        self._columns: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._host_columns: dict[int, np.ndarray] = {}

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The experts that live on a rank, in the order of its slots."""
        return self.expert_of_slot[rank * self.per_rank : (rank + 1) * self.per_rank]

    def host_columns(self, spare_slots: int) -> np.ndarray:
        """int64 [E]: `columns` for the planner."""
        if spare_slots not in self._host_columns:
            slots = np.array(self.slot_of, dtype=np.int64)
            self._host_columns[spare_slots] = slots + slots // self.per_rank * spare_slots
        return self._host_columns[spare_slots]

    def columns(self, spare_slots: int, device: torch.device) -> torch.Tensor:
        """int64 [E]: column of each expert's owner in a map over physical slots, `spare_slots` after each rank's."""
        key = (spare_slots, device)
        if key not in self._columns:
            with torch.inference_mode(False):  # a training that comes later saves it for its backward
                self._columns[key] = torch.from_numpy(self.host_columns(spare_slots)).to(device)
        return self._columns[key]
