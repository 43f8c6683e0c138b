"""The gates of real Megatron routers: zeros are caught at the first forward, also after loading."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from types import SimpleNamespace
import torch
from megatron_patches import cpu
cpu.install()
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from hybrid_ep.moe import RouterError
from megatron_patches import router_guard

def router(**options):
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, num_moe_experts=8,
                               moe_router_topk=2, moe_router_load_balancing_type="none", add_bias_linear=False,
                               use_cpu_initialization=True, **options)
    return TopKRouter(config, SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))

def refused(module, x):
    try:
        module(x)
    except RouterError as error:
        return str(error)

model = torch.nn.ModuleDict({"mlp": router()})
gate, x = model["mlp"], torch.randn(4, 1, 16)
assert router_guard.attach([model]) == router_guard.attach(model) == ("mlp",)
good = {k: v.clone() if torch.is_tensor(v) else v for k, v in model.state_dict().items()}
gate.weight.data.zero_()
said = refused(gate, x)
assert said and said.count("mlp has all weights equal") == 1, said
model.load_state_dict(good)
assert refused(gate, x) is None and gate(x)[1].sum() == 8
gate.weight.data.zero_()
assert refused(gate, x) is None                      # checked once: training pays nothing
model.load_state_dict({**good, "mlp.weight": torch.zeros_like(good["mlp.weight"])})
assert "all weights equal" in refused(gate, x)       # a checkpoint of zeros
for nothing in (torch.nn.Linear(2, 2), router(moe_router_force_load_balancing=True)):
    try:
        router_guard.attach(nothing)
    except ValueError as error:
        assert "no TopKRouter" in str(error)
    else:
        raise AssertionError("attached to nothing")
print("guarded")
"""


@pytest.mark.version_free
def test_a_gate_of_zeros_is_caught_before_the_first_step_and_after_loading():
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("guarded"), done.stderr[-3000:]
