#!/usr/bin/env python
"""Times of hybrid_ep.moe's operators beside eager torch (and Transformer Engine's, when installed), with their bytes.

    python scripts/gpu_bench_moe.py                      on a GPU, shapes as in docs/moe_compute.md
    python scripts/gpu_bench_moe.py --device cpu --smoke    small shapes, to see that it runs; its times mean nothing

Prints Markdown: operator, bytes by the formulas of docs/moe_compute.md, median time, bytes over time, and the share of
the bandwidth that a plain copy of 1 GiB reaches on the same device in the same run. Not yet run on a GPU.
"""

import argparse
import functools
import importlib.util
import json
import statistics
import time

import torch

from hybrid_ep.moe import grouped_mm, inverse_map, unpermute, weighted_swiglu


def eager_swiglu(h, prob):
    """The same as separate torch operators."""
    gate, up = h.chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * prob[:, None]).to(h.dtype)


def seconds(run, device, repeats):
    """Median time of run(); on a GPU between events, after two calls to warm up."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def backward_of(make, *inputs):
    """A function that runs only the backward of make(), whose forward runs here."""
    out = make()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def operators(args, device):
    """(name, bytes, function) of each row."""
    dtype = torch.bfloat16
    n, f, hidden, t = args.tokens * args.topk, args.ffn, args.hidden, args.tokens
    torch.manual_seed(0)
    h = torch.randn(n, 2 * f, device=device, dtype=dtype, requires_grad=True)
    prob = torch.rand(n, device=device, requires_grad=True)
    yield "weighted SwiGLU, forward", 6 * n * f + 4 * n, lambda: weighted_swiglu(h.detach(), prob.detach())
    yield "eager SwiGLU, forward", 22 * n * f, lambda: eager_swiglu(h.detach(), prob.detach())
    yield "weighted SwiGLU, backward", 10 * n * f + 8 * n, backward_of(lambda: weighted_swiglu(h, prob), h, prob)
    yield "eager SwiGLU, backward", None, backward_of(lambda: eager_swiglu(h, prob), h, prob)
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        import transformer_engine_torch as te

        yield "Transformer Engine swiglu (no probability), forward", 6 * n * f, lambda: te.swiglu(h.detach(), None)
    rows = torch.randn(n, hidden, device=device, dtype=dtype)
    token = torch.arange(n, device=device) % t
    token = token[torch.randperm(n, device=device)]
    inverse = inverse_map(token, t, args.topk)
    yield "unpermute as a gather", 2 * t * hidden + 2 * n * hidden, lambda: unpermute(rows, inverse)
    yield (
        "index_add_ in bf16",
        2 * t * hidden + 6 * n * hidden,
        lambda: torch.zeros(t, hidden, device=device, dtype=dtype).index_add_(0, token, rows),
    )
    ends = torch.linspace(0, n, args.experts + 1, device=device).int()[1:]
    weights = torch.randn(args.experts, hidden, f, device=device, dtype=dtype)
    moved = 2 * (n * hidden + n * f + weights.numel())
    x, w = rows.requires_grad_(), weights.requires_grad_()
    for backend in ("torch", "triton") if device.type == "cuda" else ("torch",):
        multiply = functools.partial(grouped_mm, x, w, ends, backend=backend)
        yield f"grouped_mm in {backend}, forward", moved, multiply
        yield f"grouped_mm in {backend}, backward", 2 * moved, backward_of(multiply, x, w)
    yield from in_fp8(x, w, ends)


def in_fp8(x, w, ends):
    """The rows of products in fp8: each quantised alone, where there are kernels for it, and with what it is for."""
    nk, nf, kf = x.numel(), x.shape[0] * w.shape[2], w.numel()
    if x.device.type == "cuda":
        from hybrid_ep.moe import triton_block_scaled as kernels

        everyone = (0, ends.numel())
        yield "e4m3 of rows", 3 * nk, lambda: kernels.quantise_rows(x.detach(), ends, everyone)
        yield "e4m3 of weights", 3 * kf, lambda: kernels.quantise_weights([w.detach()])
        yield "e4m3 of weights, turned", 3 * kf, lambda: kernels.quantise_weights([w.detach().transpose(1, 2)])
        yield "e4m3 of columns", 3 * nk, lambda: kernels.quantise_columns(x.detach(), ends, everyone)
    backend = "triton" if x.device.type == "cuda" else "loop"
    multiply = functools.partial(grouped_mm, x, w, ends, backend=backend, precision="fp8")
    yield f"grouped_mm in fp8 in {backend}, forward", 4 * nk + 4 * kf + 2 * nf, multiply
    yield f"grouped_mm in fp8 in {backend}, backward", 6 * nk + 8 * nf + 6 * kf, backward_of(multiply, x, w)


def copy_rate(size, device, repeats):
    """Bytes a second, read and written, of a copy of `size` bytes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), device, repeats)


def main(argv=None):
    """Measure, print, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tokens", 8192),
        ("topk", 8),
        ("hidden", 7168),
        ("ffn", 2048),
        ("experts", 8),
        ("repeats", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="small shapes, few repeats")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    args = parser.parse_args(argv)
    if args.smoke:
        args.tokens, args.topk, args.hidden, args.ffn, args.repeats = 64, 2, 64, 32, 2
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu --smoke to see that the script runs")
    size = (1 << 20) if args.smoke else (1 << 30)
    copy = copy_rate(size, device, args.repeats)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"# {where}, torch {torch.__version__}; a copy moves {copy / 1e12:.3f} TB/s")
    print("| operator | bytes | microseconds | TB/s | of a copy |\n|---|---|---|---|---|")
    rows = []
    for name, moved, run in operators(args, device):
        took = seconds(run, device, args.repeats)
        rows.append({"operator": name, "bytes": moved, "seconds": took})
        rate = f"{moved / took / 1e12:.3f} | {moved / took / copy:.0%}" if moved else "- | -"
        print(f"| {name} | {moved or '-'} | {took * 1e6:.1f} | {rate} |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "device": where,
                    "torch": torch.__version__,
                    "copy_bytes_per_s": copy,
                    "arguments": vars(args),
                    "rows": rows,
                },
                file,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
