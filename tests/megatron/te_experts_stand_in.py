"""TEGroupedMLP's distributed-checkpoint entries without Transformer Engine: Megatron's own code over plain parameters.

TEGroupedMLP describes itself through TEGroupedLinear, whose class exists only where Transformer Engine does, since it
inherits from it. The methods that describe it use nothing of Transformer Engine, so they are taken out of Megatron's
source and run in its module, on a class that holds the same parameters by the same names.
"""

import ast
import inspect
import types

import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import TEGroupedMLP

DESCRIBING = ("_sharded_state_dict_grouped", "sharded_state_dict")
CLASSES = ("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")


class Parameters(torch.nn.Module):
    """What the describing methods ask of Transformer Engine's GroupedLinear: weight0, weight1, ... [out, in]."""

    use_bias = False

    def __init__(self, weights, groups):
        super().__init__()
        self.num_gemms, self._pg_collection, self._tp_group = len(weights), groups, groups.expt_tp
        for i, weight in enumerate(weights):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight.detach().clone()))

    def get_extra_state(self):
        return None  # Megatron's linears save None too; Transformer Engine fills it for fp8 only

    def set_extra_state(self, _state):
        pass

    def _split_extra_state(self, state):
        return [state] * self.num_gemms


def te_experts(sequential):
    """A module whose sharded_state_dict is TEGroupedMLP's, with the weights of a SequentialMLP."""
    _, column, row = _describing_classes()
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.expt_dp = sequential.ep_group, sequential.tp_group, sequential.dp_group
    groups.expt_dp_gtp_remat = sequential.dp_group  # from 0.19 on; the same group unless weights are rematerialised
    made = torch.nn.Module()
    for name, build in (("linear_fc1", column), ("linear_fc2", row)):
        made.add_module(name, build([getattr(e, name).weight for e in sequential.local_experts], groups))
    made.config, made.num_local_experts = sequential.config, sequential.num_local_experts
    made.ep_group, made.tp_group, made.dp_group = sequential.ep_group, sequential.tp_group, sequential.dp_group
    made.sharded_state_dict = types.MethodType(TEGroupedMLP.sharded_state_dict, made)
    return made


def _describing_classes():
    """Megatron's three classes, cut down to the methods that describe checkpoints, over Parameters."""
    found = {
        node.name: node
        for node in ast.walk(ast.parse(inspect.getsource(extension)))
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
    }
    namespace = dict(vars(extension), Parameters=Parameters)
    for name in CLASSES:
        node = found[name]
        node.body = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name in DESCRIBING]
        node.bases = [ast.Name("Parameters" if name == CLASSES[0] else CLASSES[0], ast.Load())]
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), extension.__file__, "exec"), namespace)
    return [namespace[name] for name in CLASSES]
