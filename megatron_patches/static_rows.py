"""The permuted rows of a rank as a constant of the configuration, where exact balancing levels ranks.

With a plan no rank computes more than (1 + epsilon) x the mean of tokens, and where every rank brings as many, the mean
is a rank's own (token, expert) pairs. So a layer's rows, and all activations that follow from them, have one size for
every micro-batch; rows behind the last expert's are zero. Ranks exceed it only where no plan was found. What happens
then is said beforehand (`--hybrid-ep-static-rows POLICY`), counted, and told in a warning once a layer:

    grow    this micro-batch has as many rows as its fullest ranks need: nothing is lost
    drop    rows that do not fit are dropped, of the last slots first; the handle's overflow flag is set
    raise   CapacityError, on every rank, before anything is sent

With "drop" no micro-batch differs from another on the host, which then asks nothing of a plan that kernels made: what
is counted stays on their device, and the warning comes when a count of it has arrived.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from hybrid_ep.balance.microbatch import PPM
from hybrid_ep.errors import CapacityError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from hybrid_ep.balance import MicrobatchPlan
    from megatron_patches.settings import Balance

ROUNDING = 16  # rows; a grouped GEMM works on tiles of rows, and a rounded number is easier to recognise


class StaticRows:
    """The constant of one layer, and how often it did not hold; counts are equal on all ranks."""

    def __init__(self, wanted: Balance, config: TransformerConfig) -> None:
        if getattr(config, "variable_seq_lengths", False):
            raise ValueError(
                "static_rows (--hybrid-ep-static-rows) does not work with --variable-seq-lengths, where ranks bring "
                "different numbers of tokens and no rank knows the mean: drop one of them"
            )
        self.epsilon_ppm, self.policy = round(wanted.epsilon * PPM), wanted.static_rows
        self._counts: torch.Tensor | None = None  # int64 [4], where plans are: see _count
        self._arrived: torch.Tensor | None = None  # the same on the host, as it was at some time since
        self._warned = False

    @property
    def micro_batches(self) -> int:
        """Micro-batches that trained so far, recomputed ones once. This and what follows wait for the device."""
        return self._counted(0)

    @property
    def overflows(self) -> int:
        """Those of them with a rank above the constant."""
        return self._counted(1)

    @property
    def rows_over(self) -> int:
        """Rows above it in these, over all ranks; with "drop" they were dropped."""
        return self._counted(2)

    def rows(self, num_pairs: int) -> int:
        """Rows of a rank, where every rank brings `num_pairs` (token, expert) pairs: the planner's target, rounded."""
        target = num_pairs + num_pairs * self.epsilon_ppm // PPM
        return target + -target % ROUNDING

    def admit(self, plan: MicrobatchPlan, rank: int, num_pairs: int) -> int:
        """Rows of this rank's dispatch by this plan. num_pairs: (token, expert) pairs that this rank brings.

        CapacityError where ranks have more than the constant and the policy is "raise"."""
        rows, load = self.rows(num_pairs), _load_of_ranks(plan)
        if self.policy == "drop":
            self._count(load, rows)
            if self._arrived is not None and int(self._arrived[1]):
                self._warn(plan, rows, int(self._arrived[3]), int(self._arrived[2]))
            return rows
        needed = load.tolist()
        over = sum(max(n - rows, 0) for n in needed)
        if over and self.policy == "raise":
            raise CapacityError(f"{_said(max(needed), rows)}: {_remedy(plan)}", needed, [rows] * len(needed))
        self._count(load, rows)
        if not over:
            return rows
        self._warn(plan, rows, max(needed), over)
        return max(rows, needed[rank] + -needed[rank] % ROUNDING)

    def _count(self, load: torch.Tensor, rows: int) -> None:
        """Of one micro-batch more that trains: itself, whether it is over, its rows over, its fullest rank."""
        if not torch.is_grad_enabled():
            return
        over = (load - rows).clamp(min=0).sum()
        if self._counts is None:
            self._counts = torch.zeros(4, dtype=torch.int64, device=load.device)
            self._arrived = torch.zeros(4, dtype=torch.int64, pin_memory=load.device.type == "cuda", device="cpu")
        assert self._arrived is not None  # made with the other
        self._counts[:3] += torch.stack([torch.ones_like(over), (over > 0).long(), over])
        self._counts[3] = torch.maximum(self._counts[3], load.max())
        self._arrived.copy_(self._counts, non_blocking=True)

    def _counted(self, n: int) -> int:
        return 0 if self._counts is None else int(self._counts[n])

    def _warn(self, plan: MicrobatchPlan, rows: int, fullest: int, over: int) -> None:
        """Once. With "drop" on a GPU the numbers are those of micro-batches some time ago."""
        if self._warned:
            return
        self._warned = True
        done = "are dropped" if self.policy == "drop" else "are kept, in a larger tensor for this micro-batch"
        text = f"{_said(fullest, rows)}: {over} rows of all ranks {done}, as in later ones, which are counted"
        warnings.warn(f"{text}: {_remedy(plan)}", stacklevel=4)


def _load_of_ranks(plan: MicrobatchPlan) -> torch.Tensor:
    """int64 [R]: tokens that each rank computes by the plan; on the host, or on the device of kernels that made it."""
    on_device = getattr(plan, "load_of_ranks", None)
    return torch.from_numpy(plan.tokens_of_ranks()) if on_device is None else on_device()


def _said(fullest: int, rows: int) -> str:
    return f"the fullest rank has {fullest} rows by the plan where --hybrid-ep-static-rows has {rows}"


def _remedy(plan: MicrobatchPlan) -> str:
    remedy = "give more --hybrid-ep-spare-slots, or a larger --hybrid-ep-balance-epsilon"
    if plan.options.within_node:
        remedy += ", or --hybrid-ep-balance-clones anywhere: clones on their owner's node do not level nodes"
    return remedy


def filled(counts: torch.Tensor, num_rows: int, num_owners: int, has_clones: bool) -> torch.Tensor:
    """Rows of each expert, int64 [experts and slots], with those behind the last expert's counted to it, so that the
    experts' tensors have num_rows rows in every micro-batch: they are zero, and so is what comes of them.

    has_clones: else only the first num_owners run, and the last of them takes the rest."""
    rest = torch.zeros_like(counts)
    rest[-1 if has_clones else num_owners - 1] = 1
    return counts + rest * (num_rows - counts.sum())
