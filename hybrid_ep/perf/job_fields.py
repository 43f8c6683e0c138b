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
MOMENTS = ("fp32", "bf16")
FP8_PARAMS = ("auto", "yes", "no")
# Of Megatron's --recompute-modules those that known models can have.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
RECOMPUTE_REMEDY = f"use none, selective, full, or some of {','.join(RECOMPUTE_MODULES)}"
AT_LEAST_0 = ("imbalance", "cv_fast", "cv_slow", "fixed_us")


def check(fields: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> None:
    """ValueError names field, value and remedy. known: the words of further fields."""
    for name in WHOLE:
        _whole(name, fields[name], 1)
    if fields["mtp_layers"] is not None:
        _whole("mtp_layers", fields["mtp_layers"], 0)
    words_of = {"dtype": PRECISIONS, "dispatch_dtype": DTYPES, "moments": MOMENTS, "fp8_params": FP8_PARAMS, **known}
    for name, words in words_of.items():
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
    if fields["fp8_params"] == "yes" and fields["dtype"] == "bf16":
        raise ValueError("fp8_params='yes': weights in 8 bits need dtype=fp8 or mxfp8, not bf16")
    _recompute(fields["recompute"], fields["recompute_modules"])


def keeps_fp8_params(dtype: str, fp8_params: str) -> bool:
    """Whether weights are kept in 8 bits alone. NVIDIA's mixed-precision recipes do so with mxfp8 and not with blocks
    of 128."""
    return fp8_params == "yes" or (fp8_params == "auto" and dtype == "mxfp8")


def recompute_modules(text: str, latent: bool) -> tuple[str, ...]:
    """Megatron's names of what is recomputed by a text of none, full, selective (large and cheap to compute again) or
    modules; none where nothing or everything is. latent: whether the model has latent attention."""
    if text in ("none", "full"):
        return ()
    if text != "selective":
        return tuple(name.strip() for name in text.split(","))
    return ("layernorm", "moe_act", *(("mla_up_proj",) if latent else ()))


def modelled_recompute(text: str) -> str:
    """What the step model counts of it: none, moe or full. Modules but the MoE layer itself are cheap, and free there.
    ValueError names what is no module."""
    modules = recompute_modules(text, latent=False)
    if unknown := [name for name in modules if name not in RECOMPUTE_MODULES]:
        raise ValueError(f"{unknown[0]!r}: {RECOMPUTE_REMEDY}")
    return "full" if text == "full" else "moe" if "moe" in modules else "none"


def said_recompute(recompute: str, modules: tuple[str, ...], latent: bool) -> str:
    """The shortest text of which `modelled_recompute` and `recompute_modules` make these."""
    if modules == recompute_modules("selective", latent):
        return "selective"
    return ",".join(modules) or recompute


def _recompute(recompute: str, modules: tuple[str, ...]) -> None:
    if unknown := [name for name in modules if name not in RECOMPUTE_MODULES]:
        raise ValueError(f"recompute_modules={unknown[0]!r}: {RECOMPUTE_REMEDY}")
    counted = modelled_recompute(",".join(modules)) if modules else recompute
    if counted != recompute:
        raise ValueError(f"recompute_modules={','.join(modules)!r}: do not go with recompute={recompute!r}; say one")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
