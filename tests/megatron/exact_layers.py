"""Layers with exact balancing for ranks that are threads, on hosts and on a GPU. Managers, balancer and grouped experts
are those of training; the router stands for itself as two tensors a layer."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_patches import balance, experts, settings

H, F, L, T, K = 64, 32, 2, 40, 2  # hidden sizes, experts a rank, tokens, top-k


class Experts(experts.GroupedExperts):
    """Megatron's way to make them needs its process groups."""

    def __init__(self, group, config, number, device):
        torch.nn.Module.__init__(self)
        self.config, self.kind, self.num_local_experts = config, "swiglu", L
        self._delayed, self._when_made = [], []
        wanted = settings.current().experts
        self.backend, self.precision, self.ep_group = wanted.backend, wanted.precision or "params", group
        random = torch.Generator().manual_seed(100 * number + group.rank())
        for name, shape in (("weight1", (L, 2 * F, H)), ("weight2", (L, H, F))):
            weight = torch.randn(shape, generator=random).mul_(0.2).bfloat16().to(device)
            self.register_parameter(name, torch.nn.Parameter(weight))
            getattr(self, name).main_grad = torch.zeros(shape, device=device)


class Layers:
    """MoE layers of a rank, one behind the other. They read maps bool [T, E] and probs fp32 [T, E], each its own, and
    hidden and gradient bf16 [T, H]."""

    def __init__(self, group, num_layers, device="cpu", cuda_graph_impl="none", takes_turns=False):
        num_experts = L * group.size()
        config = SimpleNamespace(
            num_moe_experts=num_experts,
            moe_router_topk=K,
            hidden_size=H,
            params_dtype=torch.bfloat16,
            cuda_graph_impl=cuda_graph_impl,
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
            moe_apply_probs_on_input=False,
            fp8=None,
            overlap_moe_expert_parallel_comm=takes_turns,
            delay_wgrad_compute=False,
            recompute_granularity=None,
        )
        self.managers, self.experts, self.maps, self.probs = [], [], [], []
        for number in range(num_layers):
            self.managers.append(balance.ExactManager(group, L, num_experts, K, config))
            self.experts.append(Experts(group, config, number, device))
            self.managers[-1].attach(self.experts[-1])
            self.maps.append(torch.zeros(T, num_experts, dtype=torch.bool, device=device))
            self.probs.append(torch.zeros(T, num_experts, device=device, requires_grad=True))
        self.hidden = torch.zeros(T, H, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.gradient = torch.zeros(T, H, device=device, dtype=torch.bfloat16)
        self.parameters = {f"{n} {name}": p for n, e in enumerate(self.experts) for name, p in e.named_parameters()}

    def put(self, seed: int) -> None:
        """Another micro-batch. Of every second one experts of the first rank are hot."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for map_, probs in zip(self.maps, self.probs, strict=True):
                scores = torch.rand(map_.shape, generator=random)
                scores[:, :L] += 0.7 * (seed % 2)
                chosen = torch.zeros(map_.shape, dtype=torch.bool).scatter_(1, scores.topk(K).indices, True)
                map_.copy_(chosen)
                probs.copy_(torch.rand(map_.shape, generator=random) * chosen)
            for tensor in (self.hidden, self.gradient):
                tensor.copy_(torch.randn(T, H, generator=random))

    def forward(self) -> torch.Tensor:
        x = self.hidden
        for manager, expert, map_, probs in zip(self.managers, self.experts, self.maps, self.probs, strict=True):
            manager.setup_metadata(map_, probs)
            rows, row_probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
            outputs, _ = expert(rows, manager.get_number_of_tokens_per_expert(), row_probs)
            x = x + manager.combine(outputs)
        return x
