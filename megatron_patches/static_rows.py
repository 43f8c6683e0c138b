"""The permuted rows of a rank as a constant of the configuration, where exact balancing levels ranks.

With a plan no rank computes more than (1 + epsilon) x the mean of tokens, and where every rank brings as many, the mean
is a rank's own (token, expert) pairs. So a layer's rows, and all activations that follow from them, have one size for
every micro-batch; rows behind the last expert's are zero. Ranks exceed it only where no plan was found. What happens
then is said beforehand (`--hybrid-ep-static-rows POLICY`), counted, and told in a warning once a layer:

    grow    this micro-batch has as many rows as its fullest ranks need: nothing is lost
    drop    rows that do not fit are dropped, of the last slots first; the handle's overflow flag is set
    raise   CapacityError, on every rank, before anything is sent
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
    """The constant of one layer, and how often it did not hold.

    micro_batches: that trained so far, recomputed ones once. overflows: those of them with a rank above the constant.
    rows_over: rows above it in these, over all ranks; with "drop" they were dropped. All are equal on all ranks.
    """

    def __init__(self, wanted: Balance, config: TransformerConfig) -> None:
        if getattr(config, "variable_seq_lengths", False):
            raise ValueError(
                "static_rows (--hybrid-ep-static-rows) does not work with --variable-seq-lengths, where ranks bring "
                "different numbers of tokens and no rank knows the mean: drop one of them"
            )
        self.epsilon_ppm, self.policy = round(wanted.epsilon * PPM), wanted.static_rows
        self.micro_batches = self.overflows = self.rows_over = 0
        self._warned = False

    def rows(self, num_pairs: int) -> int:
        """Rows of a rank, where every rank brings `num_pairs` (token, expert) pairs: the planner's target, rounded."""
        target = num_pairs + num_pairs * self.epsilon_ppm // PPM
        return target + -target % ROUNDING

    def admit(self, plan: MicrobatchPlan, rank: int, num_pairs: int) -> int:
        """Rows of this rank's dispatch by this plan. num_pairs: (token, expert) pairs that this rank brings.

        CapacityError where ranks have more than the constant and the policy is "raise"."""
        rows, load, count = self.rows(num_pairs), plan.tokens_of_ranks(), torch.is_grad_enabled()
        over = int((load - rows).clip(min=0).sum())
        self.micro_batches += count
        if not over:
            return rows
        said = (
            f"the fullest rank has {int(load.max())} rows by the plan ({plan.imbalance():.3f} above the mean) where "
            f"--hybrid-ep-static-rows has {rows}"
        )
        remedy = "give more --hybrid-ep-spare-slots, or a larger --hybrid-ep-balance-epsilon"
        if plan.options.within_node:
            remedy += ", or --hybrid-ep-balance-clones anywhere: clones on their owner's node do not level nodes"
        if self.policy == "raise":
            raise CapacityError(f"{said}: {remedy}", load.tolist(), [rows] * len(load))
        self.overflows += count
        self.rows_over += over if count else 0
        if not self._warned:
            self._warned = True
            done = "are dropped" if self.policy == "drop" else "are kept, in a larger tensor for this micro-batch"
            text = f"{said}: {over} rows of all ranks {done}, as in later ones, which are counted: {remedy}"
            warnings.warn(text, stacklevel=3)
        needed = int(load[rank])
        return rows if self.policy == "drop" else max(rows, needed + -needed % ROUNDING)


def filled(counts: torch.Tensor, num_rows: int, num_owners: int, has_clones: bool) -> torch.Tensor:
    """Rows of each expert, int64 [experts and slots], with those behind the last expert's counted to it, so that the
    experts' tensors have num_rows rows in every micro-batch: they are zero, and so is what comes of them.

    has_clones: else only the first num_owners run, and the last of them takes the rest."""
    rest = torch.zeros_like(counts)
    rest[-1 if has_clones else num_owners - 1] = 1
    return counts + rest * (num_rows - counts.sum())
