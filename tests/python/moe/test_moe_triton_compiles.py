"""The Triton kernels of hybrid_ep.moe compiled to machine code for Hopper and Blackwell, which needs no GPU: no spills,
no local memory, 16-byte accesses to global memory, and no product fused into the sum of unpermute."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hybrid_ep.moe import triton_activations, triton_unpermute, triton_zero  # noqa: E402
from hybrid_ep.moe.triton_rounding import LAUNCH  # noqa: E402

_ROWS = {
    "h_ptr": "*bf16",
    "out_ptr": "*bf16",
    "grad_ptr": "*bf16",
    "dh_ptr": "*bf16",
    "rows_ptr": "*bf16",
    "x_ptr": "*bf16",
    "prob_ptr": "*fp32",
    "dprob_ptr": "*fp32",
    "weights_ptr": "*fp32",
    "inverse_ptr": "*i64",
    "offsets_ptr": "*i32",
}
_SWIGLU = {"KIND": 0, "GATED": True, "WEIGHTED": True, "BLOCK": 1024}
KERNELS = {
    "forward": (triton_activations._forward_kernel, _SWIGLU),
    "backward": (triton_activations._backward_kernel, {**_SWIGLU, "DPROB": True}),
    "forward, exact gelu": (triton_activations._forward_kernel, {**_SWIGLU, "KIND": 4}),
    "backward, plain relu2": (
        triton_activations._backward_kernel,
        {**_SWIGLU, "KIND": 3, "GATED": False, "WEIGHTED": False, "DPROB": False},
    ),
    "gather sum": (triton_unpermute._gather_sum_kernel, {"WEIGHTED": True, "BLOCK": 1024}),
    "zero tail": (triton_zero._zero_tail_kernel, {"BLOCK": 1024}),
    "zero empty groups": (triton_zero._zero_empty_groups_kernel, {"BLOCK": 1024}),
}


def build(kernel, constants, capability):
    """As a call with aligned pointers and widths that are multiples of 16 specialises it."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _ROWS.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in ("f", "hidden", "num_columns", "group_size")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=LAUNCH)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name, capability, tmp_path):
    built = build(*KERNELS[name], capability)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage, sass = (
        subprocess.run([tools / tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
    )
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))
    assert (stack, local) == (0, 0) and registers <= 128, usage
    assert re.search(r"STG\.E\S*\.128", sass), "stores are not 16 bytes wide"
    if name == "gather sum":
        assert "FMUL" in sass and "FFMA" not in sass
    if not name.startswith("zero"):
        assert re.search(r"LDG\.E\S*\.128", sass), "loads are not 16 bytes wide"
