"""The template configuration: what a buffer is laid out for, under deep_ep's field names.

Fields that tune deep_ep's kernels are accepted and kept, so that callers who set them run unchanged; those
with an effect here are the capacities, the block counts (preprocessing: of the exchange kernel), and the chunks of
dispatch and combine."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field, fields
from typing import Any

from hybrid_ep import _core

DEFAULT_CHUNK_TOKENS = _core.BufferShape.default_chunk_tokens  # of a rail message


class TokenDataType(enum.Enum):
    """Bytes of an element of hidden, as deep_ep names them."""

    UINT16 = 2
    UINT8 = 1


UINT8, UINT16 = TokenDataType.UINT8, TokenDataType.UINT16


@dataclass
class HybridEpConfigInstance:
    """Capacities and tuning of an operation. `plan` is set in the copy that a handle carries."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    pad_multiple: int = 0
    use_fp8: bool = False
    topk: int = 0  # deep_ep's routing by topk_idx, for which callers look here; ours takes it whatever this says
    num_of_blocks_dispatch_api: int = 1
    num_of_blocks_combine_api: int = 1
    num_of_blocks_preprocessing_api: int | None = None  # None: by the tokens of a call
    num_of_blocks_permute: int | None = None  # None: hardware.block_split; hosts: those of dispatch
    num_of_blocks_unpermute: int | None = None  # likewise, beside those of combine
    num_of_threads_per_block_preprocessing_api: int | None = None
    num_of_tokens_per_chunk_preprocessing_api: int | None = None
    num_of_tokens_per_chunk_dispatch_api: int | None = None
    num_of_tokens_per_chunk_combine_api: int | None = None
    num_of_stages_dispatch_api: int | None = None
    num_of_stages_permute_block_dispatch_api: int | None = None
    num_of_stages_g2s_combine_api: int | None = None
    num_of_stages_s2g_combine_api: int | None = None
    num_of_in_flight_s2g_dispatch_api: int | None = None
    num_of_in_flight_s2g_permute_block_dispatch_api: int | None = None
    num_of_additional_in_flight_s2g_dispatch_api: int | None = None
    num_of_additional_in_flight_s2g_combine_api: int | None = None
    num_of_tokens_per_group_combine_api: int | None = None
    forward_dispatch_api: bool = True
    backward_combine_api: bool = True
    device_side_sync_dispatch_api: bool = True
    device_side_sync_combine_api: bool = True
    plan: Any = field(default=None, repr=False, compare=False)

    @property
    def token_data_type(self) -> TokenDataType:
        """use_fp8 under deep_ep's name."""
        return UINT8 if self.use_fp8 else UINT16

    @token_data_type.setter
    def token_data_type(self, value: TokenDataType) -> None:
        if not isinstance(value, TokenDataType):
            raise ValueError(f"token_data_type={value!r} must be UINT8 or UINT16; or set use_fp8")
        self.use_fp8 = value is UINT8

    def is_valid(self, fuse_permute_dispatch: bool = False) -> bool:
        """Whether a dispatch can make room for it; deep_ep's callers ask before they use one."""
        counts = (
            self.hidden_dim,
            self.num_of_experts_per_rank,
            self.num_of_ranks_per_node,
            self.num_of_nodes,
            *self.tuned().values(),
        )
        return all(isinstance(n, int) and n >= 1 for n in counts) and self.max_num_of_tokens_per_rank >= 0

    def with_plan(self, plan: Any) -> HybridEpConfigInstance:
        """A copy for a handle."""
        config = object.__new__(type(self))
        words = self.__dict__.copy()  # an update of an empty one takes half as long again
        words["pad_multiple"], words["plan"] = plan.pad_multiple, plan
        config.__dict__ = words
        return config

    def chunk(self, op: str) -> int:
        """Tokens of a rail message in dispatch or combine."""
        return getattr(self, f"num_of_tokens_per_chunk_{op}_api") or DEFAULT_CHUNK_TOKENS

    def tuned(self) -> dict[str, int]:
        """Blocks and chunks as they are set; those that may be None only where they are not."""
        ops = ("dispatch", "combine")
        values = {
            f"num_of_{what}_{op}_api": getattr(self, f"num_of_{what}_{op}_api")
            for what in ("blocks", "tokens_per_chunk")
            for op in ops
        }
        own = {f"num_of_blocks_{op}": getattr(self, f"num_of_blocks_{op}") for op in ("permute", "unpermute")}
        return values | {name: value for name, value in own.items() if value is not None}

    def set(self, **overrides: Any) -> None:
        """Sets fields by name; ValueError for an unknown one."""
        known = {f.name for f in fields(self)} - {"plan"} | {"token_data_type"}
        for name, value in overrides.items():
            if name not in known:
                raise ValueError(f"{name}={value!r} is not a field of HybridEpConfigInstance; known: {sorted(known)}")
            setattr(self, name, value)


class Configurer:
    """Where deep_ep's callers find the template: buffer_config, and copies of it."""

    def __init__(self, buffer_config: HybridEpConfigInstance):
        self.buffer_config = buffer_config

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        """A copy of the template, to be changed freely; update_template_config sets fields."""
        return copy.copy(self.buffer_config)

    def adjust_template(self, config: HybridEpConfigInstance, fuse_permute_dispatch: bool = False) -> None:
        """Nothing to do: stages in shared memory are chosen at compile time."""
