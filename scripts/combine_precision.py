"""Where the router's probability belongs and in what the combine must add: errors of an MoE layer against fp64.

    python scripts/combine_precision.py [--experts 16] [--topk 8] [--hidden 512] [--ffn 512] [--tokens 256] [--seeds 3]

One layer (w1, weighted SwiGLU, w2, combine) in bf16, computed in six ways. Prints a Markdown table with the root mean
square of the error relative to that of the result, mean over seeds, and the mean shrinkage (a bias towards zero, which
rounding to nearest does not have). Ours is the first row. Deterministic: the same table on the same machine.
"""

import argparse

import torch

from hybrid_ep.moe import grouped_mm, inverse_map, unpermute, weighted_swiglu

WAYS = {
    "before w2, fp32 inside the activation; fp32 sum": ("before", "fp32"),
    "before w2, three bf16 roundings (eager); fp32 sum": ("eager", "fp32"),
    "after w2, fp32 product; fp32 sum": ("after", "fp32"),
    "before w2, fp32 inside the activation; bf16 sum": ("before", "bf16"),
    "after w2, fp32 product rounded; bf16 sum": ("after", "bf16"),
    "after w2, bf16 product; bf16 sum": ("after_bf16", "bf16"),
}


def layer(args, seed):
    """Inputs of a layer whose results are of size 1: x, w1 [E, H, 2F], w2 [E, F, H], experts and probs [T, K]."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(args.tokens, args.hidden, generator=g)
    w1 = torch.randn(args.experts, args.hidden, 2 * args.ffn, generator=g) / args.hidden**0.5
    w2 = torch.randn(args.experts, args.ffn, args.hidden, generator=g) / args.ffn**0.5
    probs, experts = torch.randn(args.tokens, args.experts, generator=g).softmax(1).topk(args.topk)
    return [t.bfloat16() for t in (x, w1, w2)], experts, probs


def permuted(experts, probs, num_experts):
    """(token of each row, fp32 prob of each row, offsets), rows by expert, then token."""
    order = torch.sort(experts.flatten(), stable=True)
    offsets = torch.bincount(order.values, minlength=num_experts).cumsum(0)
    return order.indices // experts.shape[1], probs.flatten()[order.indices], offsets


def exact(tensors, experts, probs):
    x, w1, w2 = (t.double() for t in tensors)
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, k = (experts == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[e]).chunk(2, -1)
        rows = torch.nn.functional.silu(gate) * up @ w2[e]
        out.index_add_(0, token, rows * probs[token, k, None].double())
    return out


def computed(tensors, experts, probs, placement, accumulate):
    (x, w1, w2), topk = tensors, experts.shape[1]
    token, prob, offsets = permuted(experts, probs, w1.shape[0])
    h = grouped_mm(x[token], w1, offsets)
    if placement == "before":
        act = weighted_swiglu(h, prob)
    elif placement == "eager":
        gate, up = h.chunk(2, -1)
        act = torch.nn.functional.silu(gate) * up * prob.bfloat16()[:, None]
    else:
        act = weighted_swiglu(h)
    rows = grouped_mm(act, w2, offsets)
    inverse = inverse_map(token, x.shape[0], topk)
    if accumulate == "fp32":
        return unpermute(rows, inverse, prob if placement == "after" else None)
    if placement == "after":
        rows = (rows.float() * prob[:, None]).bfloat16()
    elif placement == "after_bf16":
        rows = rows * prob.bfloat16()[:, None]
    out = torch.zeros_like(x)
    for k in range(topk):  # a rounding at every addition, as adding into a bf16 tensor does
        out += rows[inverse[:, k]]
    return out


def table(args):
    """[(way, relative rms, shrinkage)]"""
    errors = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        tensors, experts, probs = layer(args, seed)
        want = exact(tensors, experts, probs)
        for way, how in WAYS.items():
            got = computed(tensors, experts, probs, *how).double()
            relative = ((got - want).square().mean() / want.square().mean()).sqrt()
            shrinkage = 1 - (got * want).sum() / want.square().sum()
            errors[way].append((float(relative), float(shrinkage)))
    return [(way, *(sum(column) / args.seeds for column in zip(*e, strict=True))) for way, e in errors.items()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("experts", 16), ("topk", 8), ("hidden", 512), ("ffn", 512), ("tokens", 256), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    print("| prob and sum | relative rms error | shrinkage |\n|---|---|---|")
    for way, relative, shrinkage in table(args):
        print(f"| {way} | {relative:.2e} | {shrinkage:+.1e} |")


if __name__ == "__main__":
    main()
