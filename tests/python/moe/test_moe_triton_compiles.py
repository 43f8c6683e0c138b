"""The Triton kernels of hybrid_ep.moe compiled to machine code for Hopper and Blackwell, which needs no GPU: no spills,
no local memory, 16-byte accesses to global memory, and no product fused into the sum of unpermute; grouped GEMM on the
tensor cores, of 16 bits or of fp8, fed by 16-byte copies into shared memory that one multiprocessor has."""

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
from hybrid_ep.moe import triton_block_scaled as block_scaled  # noqa: E402
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
_PRODUCT = {"GROUPS": 16, "BK": block_scaled.BLOCK, **block_scaled.TILE}
BLOCK_SCALED = {
    "rows": (block_scaled._rows_kernel, {**_PRODUCT, "BAND": 8}),
    "rows of 512 groups": (block_scaled._rows_kernel, {**_PRODUCT, "BAND": 8, "GROUPS": 512}),
    "rows of one group": (block_scaled._rows_kernel, {**_PRODUCT, "BAND": 8, "GROUPS": 1, "num_groups": 1}),
    "gradient of weights": (block_scaled._weights_kernel, _PRODUCT),
    "gradient of one": (block_scaled._weights_kernel, {**_PRODUCT, "GROUPS": 1, "num_groups": 1}),
}
_BLOCK = {"BK": block_scaled.BLOCK}
QUANTISING = {
    "rows": (block_scaled._quantise_rows_kernel, {**_BLOCK, "BM": block_scaled.ROWS}),
    "weights": (block_scaled._quantise_weights_kernel, {**_BLOCK, "step_inner": 1}),
    "weights, turned": (block_scaled._quantise_weights_kernel, {**_BLOCK, "step_row": 1}),
    "columns": (block_scaled._quantise_columns_kernel, {**_BLOCK, "BN": block_scaled.COLUMNS, "GROUPS": 16}),
    "columns of one group": (
        block_scaled._quantise_columns_kernel,
        {**_BLOCK, "BN": block_scaled.COLUMNS, "GROUPS": 1, "past_group": 1},
    ),
}
_SCALES = {n: "*fp32" for n in ("scales_ptr", "x_scales_ptr", "w_scales_ptr", "g_scales_ptr")}
_E4M3 = {**_SCALES, **{n: "*fp8e4nv" for n in ("x_ptr", "w_ptr", "g_ptr")}}
_INTO_E4M3 = {**_SCALES, "w_ptr": "*bf16", "q_ptr": "*u8"}
# Widths, and steps between rows and between experts, which are multiples of 16 where those are.
_ALIGNED = ("f", "k", "hidden", "num_columns", "group_size", *_STACKS)
_ALIGNED_E4M3 = (*_ALIGNED, "filled", "places", "columns", "apart", "inner", "step_row", "step_inner")
SHARED_MEMORY = 227 << 10  # bytes a block may have on Hopper and data-centre Blackwell


def build(kernel, constants, capability, options=LAUNCH, types=_ROWS, aligned_names=_ALIGNED):
    """As a call with aligned pointers and widths that are multiples of 16 specialises it."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] != "constexpr" and (n.endswith("_ptr") or n in aligned_names)
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


# A block of 128 is four instructions; the compiler may have the step twice.
@pytest.mark.parametrize("capability, product", [(90, r"\bQGMMA\.64x128x32\.F32\.E4M3\.E4M3\b"), (100, r"\bUTCQMMA\b")])
@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_machine_code_of_products_in_fp8(name, capability, product, tmp_path):
    options = block_scaled.OPTIONS
    built = build(*BLOCK_SCALED[name], capability, options, _ROWS | _E4M3, _ALIGNED_E4M3)
    (registers, stack, local), sass = examined(built, tmp_path)
    assert (stack, local) == (0, 0) and registers <= 255
    assert not re.search(r"\b(STL|LDL)\b", sass)
    steps, rest = divmod(len(re.findall(product, sass)), block_scaled.BLOCK // 32)
    assert steps and not rest
    assert not re.search(r"\b(HMMA|HGMMA|UTCHMMA|QMMA)\b", sass), "part of a product is not on the fp8 tensor cores"
    # A thread has 64 of the 128 x 128 sums: each is scaled and added once a block; Blackwell does two at a time.
    added = len(re.findall(r"\bFFMA\b", sass)) + 2 * len(re.findall(r"\bFFMA2\b", sass))
    assert added == 64 * steps, "blocks are not scaled and added once"
    assert re.search(r"STG\.E\S*\.128", sass), "stores are not 16 bytes wide"
    into_shared = re.findall(r"\bLDGSTS\S*", sass)
    assert into_shared and all(".128" in copy for copy in into_shared), "copies are not 16 bytes wide"
    assert built.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", QUANTISING)
def test_machine_code_of_quantising(name, capability, tmp_path):
    kernel, constants = QUANTISING[name]
    # Rows of a weight are a width of the model; how many tokens there are is not known to be a multiple of anything.
    aligned = (*_ALIGNED_E4M3, *(["num_rows"] if name.startswith("weights") else []))
    built = build(kernel, constants, capability, block_scaled.QUANTISING, _ROWS | _INTO_E4M3, aligned)
    (registers, stack, local), sass = examined(built, tmp_path)
    assert (stack, local) == (0, 0) and registers <= 255 and not re.search(r"\b(STL|LDL)\b", sass)
    assert re.search(r"LDG\.E\S*\.128", sass), "loads are not 16 bytes wide"
    assert re.search(r"STG\.E\S*\.128", sass), "stores are not 16 bytes wide"
    assert not re.search(r"LDG\.E\S*\.(U8|U16)\b|STG\.E\S*\.U8\b", sass), "some accesses are a value wide"
