"""A bench case of one rank: three tokens of ones, each to experts 0 and 1 of four."""

import torch

from hybrid_ep.cli.bench.implementations import Case


def one_rank_case(**changes) -> Case:
    x = torch.ones(3, 64).bfloat16()
    idx = torch.tensor([[0, 1]] * 3)
    facts = dict(
        group=None,
        rank=0,
        num_ranks=1,
        num_local_ranks=1,
        num_experts=4,
        topk=2,
        max_tokens=3,
        num_sms=20,
        permute=False,
        route_as="topk",
        executor="cuda",
        dtype="bf16",
        timeout_s=1.0,
        x=x,
        scales=None,
        sum_dtype=torch.bfloat16,
        topk_idx=idx,
        topk_weights=torch.ones(3, 2),
        routing_map=None,
        probs=None,
    )
    return Case(**(facts | changes))  # fmt: skip
