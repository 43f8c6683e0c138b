"""What a job of the step model may be asked with, field by field; what fields say together is `step_time.Job`'s."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

from hybrid_ep.perf.shape import DTYPES

PRECISIONS = ("bf16", "fp8", "mxfp8")
WHOLE = ("gpus", "ep", "pp", "virtual_pp", "tokens", "sequence", "micro_batches", "num_sms", "tensor")
SHARES = ("overlap", "grad_overlap")
AT_LEAST_0 = ("imbalance", "cv_fast", "cv_slow", "fixed_us")


def check(fields: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> None:
    """ValueError names field, value and remedy. known: the words of further fields."""
    for name in WHOLE:
        _whole(name, fields[name], 1)
    if fields["mtp_layers"] is not None:
        _whole("mtp_layers", fields["mtp_layers"], 0)
    for name, words in {"dtype": PRECISIONS, "dispatch_dtype": DTYPES, **known}.items():
        if fields[name] not in words:
            raise ValueError(f"{name}={fields[name]!r}: use one of {', '.join(words)}")
    for name in SHARES:
        if not 0 <= fields[name] <= 1:
            raise ValueError(f"{name}={fields[name]!r} must be in 0 .. 1")
    for name in AT_LEAST_0:
        if not 0 <= fields[name] < math.inf:
            raise ValueError(f"{name}={fields[name]!r} must be a finite number of at least 0")
    share = fields["efficiency"]
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"efficiency={share!r} must be in (0, 1]")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
