"""Roundings that are the same on every machine that runs Triton: fp32 to bf16, and products before sums.

fp32 to bf16 to the nearest, ties to even: Triton's own cast is cvt.rn on GPUs from compute capability 8.0 on, which is
this very rounding, but its interpreter cuts the low half off: results there are biased towards zero by up to a whole
unit in the last place. Integer arithmetic says the same everywhere, so that what the interpreter tests is what a GPU
computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of every launch with arithmetic. A product that is added is rounded first, as torch does it: by default Triton fuses
# the two up to 3.9 and does not from 3.10 on.
LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x fp32 -> dtype (bf16, fp16 or fp32); NaN stays NaN, what is beyond the largest value becomes infinite."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return tl.where(x != x, quiet_nan, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
