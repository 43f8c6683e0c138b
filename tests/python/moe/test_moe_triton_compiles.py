"""The Triton kernels of hybrid_ep.moe compiled to machine code for Hopper and Blackwell, which needs no GPU: no spills,
no local memory, 16-byte accesses to global memory, and no product fused into the sum of unpermute; grouped GEMM on the
tensor cores, fed by 16-byte copies into shared memory that one multiprocessor has."""

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

from hybrid_ep.moe import triton_activations, triton_grouped, triton_unpermute, triton_zero  # noqa: E402
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
    "ends_ptr": "*i32",
    "g_ptr": "*bf16",
    **{f"w{i}_ptr": "*bf16" for i in range(triton_grouped.MAX_STACKS)},
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


_STACKS = ("step0", "step1", "step2", "step3", "step_k", "step_f")
_ROWS_OF = {"EVEN_K": True, "BAND": 8, "GROUPS": 16, **triton_grouped.ROWS_TILE}
GROUPED = {
    "forward": (triton_grouped._rows_kernel, {**_ROWS_OF, "STACKS": 1, "step_k": 1}),
    "gradient of rows": (triton_grouped._rows_kernel, {**_ROWS_OF, "STACKS": 2, "step_f": 1}),
    "four stacks, a rest of K": (
        triton_grouped._rows_kernel,
        {**_ROWS_OF, "STACKS": 4, "EVEN_K": False, "GROUPS": 512, "step_k": 1},
    ),
    "gradient of weights": (triton_grouped._weights_kernel, dict(triton_grouped.WEIGHTS_TILE)),
}
SHARED_MEMORY = 227 << 10  # bytes a block may have on Hopper and data-centre Blackwell


def build(kernel, constants, capability, options=LAUNCH):
    """As a call with aligned pointers and widths that are multiples of 16 specialises it."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _ROWS.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] != "constexpr"
        and (n.endswith("_ptr") or n in ("f", "k", "hidden", "num_columns", "group_size", *_STACKS))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def examined(built, folder):
    """((registers, stack, local memory), SASS)."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage, sass = (
        subprocess.run([tools / tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
    )
    return [int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL")], sass


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name, capability, tmp_path):
    (registers, stack, local), sass = examined(build(*KERNELS[name], capability), tmp_path)
    assert (stack, local) == (0, 0) and registers <= 128
    assert re.search(r"STG\.E\S*\.128", sass), "stores are not 16 bytes wide"
    if name == "gather sum":
        assert "FMUL" in sass and "FFMA" not in sass
    if not name.startswith("zero"):
        assert re.search(r"LDG\.E\S*\.128", sass), "loads are not 16 bytes wide"


@pytest.mark.parametrize("capability, product", [(90, r"\bHGMMA\.64x256x16\.F32\.BF16"), (100, r"\bUTCHMMA\b")])
@pytest.mark.parametrize("name", GROUPED)
def test_machine_code_of_grouped_gemm(name, capability, product, tmp_path):
    built = build(*GROUPED[name], capability, triton_grouped.OPTIONS)
    (registers, stack, local), sass = examined(built, tmp_path)
    assert (stack, local) == (0, 0) and registers <= 255, "256 threads of a block have 256 registers each"
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert len(re.findall(product, sass)) >= triton_grouped.ROWS_TILE["BK"] // 16
    assert not re.search(r"\bHMMA\b|\bFFMA\b", sass), "part of a product is not on the tensor cores of this machine"
    assert re.search(r"STG\.E\S*\.128", sass), "stores are not 16 bytes wide"
    into_shared = re.findall(r"\bLDGSTS\S*", sass)
    assert into_shared and all(".128" in copy for copy in into_shared), "copies are not 16 bytes wide"
    assert built.metadata.shared <= SHARED_MEMORY
