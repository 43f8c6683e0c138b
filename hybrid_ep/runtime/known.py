"""Calls known by their signature: what calls of one kind have in common is worked out once.

A call whose tensors have the shapes, types and devices of an earlier one, with the same flags and numbers and the same
configuration, passes the same checks, tells the other ranks the same header and needs no more room. What differs from
call to call is looked at in every one: addresses, and the choices where the host can read them. A tensor out of the
ordinary (a subclass, strided, unaligned, of a storage that ends too early) makes the call an unknown one, of which
every check is made before anything is sent; so a rank that refuses alone does so as it always did."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_ep import _core

if TYPE_CHECKING:
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.call import Call
    from hybrid_ep.runtime.routing import Given

_MOST = 256  # kinds of calls remembered at a time

# What a routed call asks of the configuration, beside its blocks.
_asked = operator.attrgetter(
    "max_num_of_tokens_per_rank",
    "hidden_dim",
    "num_of_experts_per_rank",
    "num_of_blocks_preprocessing_api",
    "num_of_tokens_per_chunk_dispatch_api",
    "num_of_tokens_per_chunk_combine_api",
)


_signature = _core.signature


class Known(NamedTuple):
    """Of a kind of routed call, in memory that has not grown since."""

    num_experts: int
    topk: int  # of the exchange
    header: _core.CallHeader
    at: Any  # the plan's arrays in its memory
    num_blocks: int  # of the exchange kernel
    chunks: dict[str, int]  # of rail messages, where the ranks' calls agree
    most_tokens: int  # that ranks may have, and elements of a row, before memory grows
    most_hidden: int


class KnownCalls:
    """Of one session, until its memory grows."""

    def __init__(self) -> None:
        self._by_key: dict[bytes | None, Known] = {}  # None is no key of any

    def find(
        self, call: Call, given: Given, map_width: int, config: HybridEpConfigInstance
    ) -> tuple[bytes | None, Known | None]:
        """(the call's key, None of a call out of the ordinary; what is known). map_width: the session's."""
        key = _signature(*call, *given, map_width, *_asked(config))
        return key, self._by_key.get(key)

    def add(self, key: bytes, known: Known) -> None:
        if len(self._by_key) >= _MOST:
            self._by_key.clear()
        self._by_key[key] = known

    def forget(self) -> None:
        self._by_key.clear()
