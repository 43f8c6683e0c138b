"""Every GPU recipe resolves to flags that the installed Megatron parses, validates and turns into a configuration; so
does the training of docs/first_hour.md."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import CLUSTER_RECIPES
from recipes.hardware import HARDWARE

pytest.importorskip("megatron.training.arguments", reason="megatron.training is not there", exc_type=ImportError)

# One process for all variants: importing Megatron is most of the time. Which GPU this is and
# which Transformer Engine are the only questions that get another answer than this machine's.
PROGRAM = """
import os, sys, types
from pathlib import Path
from recipes import CLUSTER_RECIPES
from recipes.hardware import HARDWARE
from recipes.megatron_arguments import environment, megatron_arguments
from megatron_patches import cpu, flags, graphs, parts, settings
cpu.install()
import torch
from megatron_patches.balance import check_supported as check_balance
from megatron_patches.experts import check_supported as check_experts
from megatron.training import arguments
arguments.add_megatron_arguments = flags.wrapper(parts.install_compute)
arguments.is_te_min_version = lambda *_, **__: True

def check(label, run, *more):
    major = 9 if run.hardware.name == "h100_8x400g" else 10
    torch.cuda.get_device_capability = lambda *_: (major, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=major, minor=0)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment(run), RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(run.num_gpus))
    sys.argv = ["pretrain_gpt.py", *megatron_arguments(run), *more]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    assert (args.num_experts, args.expert_model_parallel_size) == (run.architecture.num_experts, run.expert)
    assert args.hybrid_ep_ranks_per_node == run.domain
    print("ACCEPTED", label, flush=True)
    return args

for name, make in CLUSTER_RECIPES.items():
    for hardware in HARDWARE:
        check(name + " " + hardware, make(hardware))
small = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g")
for mode in ("exact", "slow", "both"):
    balanced = small.derive(balance=mode, precision="bf16", overlap=False)
    args = check(mode, balanced)
    now = settings.current()
    assert (now.balance.mode, now.experts.grouped, now.balance.spare_slots) == (mode, True, 1), now
    config = types.SimpleNamespace(**{**vars(args), "activation_func": torch.nn.functional.silu,
                                      "gated_linear_unit": True})
    check_balance(config, 1, mode, now.balance.clones, now.experts.grouped)
    check_experts(config)
turns = small.derive(balance="exact", precision="bf16", overlap=True)
args = check("exact with overlap", turns)
config = types.SimpleNamespace(**{**vars(args), "activation_func": torch.nn.functional.silu, "gated_linear_unit": True})
assert config.overlap_moe_expert_parallel_comm and config.delay_wgrad_compute
check_balance(config, 1, "exact", settings.current().balance.clones, settings.current().experts.grouped)
check_experts(config)
in_fp8 = small.derive(balance="exact", precision="fp8", overlap=False)
args = check("exact in fp8", in_fp8)
now = settings.current()
assert (args.fp8, args.fp8_recipe, now.experts.precision) == ("e4m3", "blockwise", "fp8"), (args.fp8, now)
config = types.SimpleNamespace(**{**vars(args), "activation_func": torch.nn.functional.silu, "gated_linear_unit": True})
check_balance(config, 1, "exact", now.balance.clones, now.experts.grouped)
check_experts(config, now.experts.precision)
static = small.derive(balance="exact", static_rows="drop", dispatch_dtype="fp8", precision="bf16", overlap=False)
check("static", static)
now = settings.current()
assert (now.balance.static_rows, now.exchange.dispatch_dtype) == ("drop", "fp8"), now
assert now.balance == static.balance_settings, (now.balance, static.balance_settings)
for mode in ("off", "exact"):
    graphed = small.derive(cuda_graphs="router", balance=mode, precision="bf16", overlap=False)
    args = check("graphs " + mode, graphed)
    assert graphs.with_dispatch(types.SimpleNamespace(**vars(args))) is None
    assert "moe_router" in graphs.with_router(types.SimpleNamespace(**vars(args)))
training = Path("docs/first_hour.md").read_text().partition("pretrain_gpt.py")[2].partition("```")[0]
training = " ".join(word for word in training.split() if word != chr(92))
for gpus in (1, 2, 4, 8):
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(gpus))
    sys.argv = ["pretrain_gpt.py", *training.replace("$GPUS", str(gpus)).split()]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    assert args.hybrid_ep and args.expert_model_parallel_size == gpus and args.transformer_impl == "local"
    print("FIRST HOUR", flush=True)
check("fsdp", small.derive(sharding="megatron_fsdp"))
try:
    check("unknown", small, "--no-such-flag")
except SystemExit as refusal:
    print("REFUSED", refusal.code, flush=True)
"""


@pytest.mark.usefixtures("megatron_flags")
def test_megatron_accepts_every_variant_and_no_flag_that_it_does_not_know():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env=environment,
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    balances_static_graphs_and_fsdp = 9
    assert done.stdout.count("FIRST HOUR") == 4
    assert done.stdout.count("ACCEPTED") == len(CLUSTER_RECIPES) * len(HARDWARE) + balances_static_graphs_and_fsdp
    assert "REFUSED 2" in done.stdout and "--no-such-flag" in done.stderr
