"""Times what happens inside one rank's own GPU, kernel by kernel, beside its floor, and writes raw JSON.

    python scripts/gpu_bench_stages.py [--executor cuda|host] [--quick] [--out FILE]

permute    the dispatch kernel of a rank alone, on the rows that one rank of 8 receives of 4096 tokens a rank, top-8 of
           256 experts, each drawn alike; hidden 7168; no arena. A quarter of the SMs store rows in the receive region,
           the others take them out of it as they land (num_blocks_permute). Floor: tokens and receive rows read once,
           receive rows and permuted rows written once, payload and scales alone, at the rate of a plain device copy of
           the same run.
unpermute  the combine kernel of that rank on the way back, SMs shared likewise (num_blocks_unpermute): permuted rows
           read, a partial a receive row written and read, its sum written. Floor likewise, at the same rate.
route      the exchange kernel of one rank of 64 (E 256, 4096 tokens, top-8): count, exchange, place, on 1 SM. The other
           63 are memory (scripts/lone_rank.py): nobody is waited for, and vectors go to 63 places in this GPU's memory.
           `host us` is the whole call as a blocking dispatch makes it, until the host has the counts. Beside it the
           bytes that a rank receives: count vectors, and what all-gathered routing maps, a byte a token and expert,
           would be.
host       the host's time in a call of a rank alone, which nobody waits for: a cached dispatch, one that routes without
           waiting (non_blocking), a combine.

Kernel times are of torch.profiler, median of the repetitions. --executor host tries the script; it has no kernels to
time, and its numbers mean nothing."""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from gpu_bench import Clock  # noqa: E402  (first: it sets CUDA's environment)

import torch  # noqa: E402  # isort: skip
from gpu_bench_moe import copy_rate  # noqa: E402
from gpu_peer_rank import kernel_us  # noqa: E402
from lone_rank import LoneRank  # noqa: E402

from hybrid_ep.runtime import devices  # noqa: E402
from hybrid_ep.testing import VirtualWorld  # noqa: E402

RANKS, EXPERTS, TOPK = 8, 256, 8  # of the world in which permute's and unpermute's rank lives
WORLDS_TO_ROUTE = ((1, 64), (8, 8))


def received_by_one(tokens: int, seed: int = 1) -> torch.Tensor:
    """int64 [M, TOPK]: of the tokens of all RANKS ranks those that choose an expert of rank 0, choices of other experts
    dropped (-1)."""
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(RANKS * tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK]
    idx = idx.masked_fill(idx >= EXPERTS // RANKS, -1)
    return idx[(idx >= 0).any(1)].contiguous()


def timed(call, named: str, on_gpu: bool, repeats: int) -> dict:
    """Microseconds of the host in the call, and of its kernel of this name."""
    clock = Clock(False)
    for _ in range(repeats + 3):
        clock.start()
        call()
        clock.stop()
        if on_gpu:
            torch.cuda.synchronize()
    kernel = kernel_us(call, on_gpu, repeats, f"{named}_entry") if named else None
    if kernel == 0:
        raise RuntimeError(f"torch.profiler saw no kernel {named}_entry")
    return {"host_us": statistics.median(clock.host[3:]), "kernel_us": kernel}


def of_floor(row: dict, num_bytes: int, copy: float) -> dict:
    """The row with its bytes and, where a kernel was timed, their share of the time that a copy of as many takes."""
    kernel = row["kernel_us"]
    return {
        **row,
        "bytes": num_bytes,
        "floor_us": 1e6 * num_bytes / copy,
        "share": None if kernel is None else 1e6 * num_bytes / copy / kernel,
    }


def local_pass(dtype: str, tokens: int, hidden: int, sms: int, executor: str, repeats: int, copy: float):
    """Rows for permute and, of bf16, unpermute with so many SMs each."""
    on_gpu, idx = devices.is_cuda(executor), received_by_one(tokens)
    device = devices.current() if on_gpu else torch.device("cpu")
    x, scales = torch.randn(len(idx), hidden, device=device), None
    x = x.bfloat16() if dtype == "bf16" else x.to(torch.float8_e4m3fn)
    if dtype == "fp8":
        scales = torch.rand(len(idx), hidden // 128, device=device)
    options = {
        "num_blocks_permute": sms - sms // 4,
        "num_blocks_unpermute": sms - sms // 4,
        "num_sms_dispatch_api": max(1, sms // 4),
        "num_sms_combine_api": max(1, sms // 4),
        "arena_mib": 0,  # rows that landed in the result would leave local work nothing to move
    }
    (buffer,) = VirtualWorld(1, 1).buffers(
        hidden, len(idx), EXPERTS // RANKS, executor=executor, timeout_s=20, **options
    )
    try:
        rows, _, _, _, handle = buffer.dispatch_with_permute(
            hidden=x, scaling_factor=scales, topk_idx=idx.to(device), num_of_experts=EXPERTS // RANKS
        )
        row_bytes = hidden * x.element_size() + (0 if scales is None else 4 * scales.shape[1])
        facts = {"dtype": dtype, "sms": sms, "recv_rows": len(idx), "permuted_rows": len(rows), "hidden": hidden}
        times = timed(
            lambda: buffer.dispatch_with_permute(
                hidden=x, scaling_factor=scales, handle=handle, num_permuted_tokens=len(rows)
            ),
            "dispatch",
            on_gpu,
            repeats,
        )
        yield of_floor({"stage": "permute", **facts, **times}, (3 * len(idx) + len(rows)) * row_bytes, copy)
        if dtype == "bf16":
            times = timed(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle), "combine", on_gpu, repeats)
            yield of_floor({"stage": "unpermute", **facts, **times}, (3 * len(idx) + len(rows)) * row_bytes, copy)
    finally:
        buffer.destroy()


def route(shape: tuple, num_experts: int, tokens: int, executor: str, repeats: int) -> dict:
    rank = LoneRank(*shape, num_experts, tokens, TOPK, peers="alike", executor=executor)
    g = torch.Generator().manual_seed(1)
    idx = torch.rand(tokens, num_experts, generator=g).argsort(1)[:, :TOPK].contiguous().to(rank.device)
    weights = torch.rand(tokens, TOPK, generator=g).to(rank.device)
    return {
        "stage": f"route {shape[0]}x{shape[1]}",
        "sms": 1,
        "num_experts": num_experts,
        "tokens": tokens,
        **timed(lambda: rank.route(idx, weights), "exchange", devices.is_cuda(executor), repeats),
        "bytes_of_exchange": rank.exchanged(),
    }


def host_calls(executor: str, repeats: int):
    """A small call: what it costs is launching."""
    on_gpu, tokens, hidden = devices.is_cuda(executor), 128, 1024
    device = devices.current() if on_gpu else torch.device("cpu")
    (buffer,) = VirtualWorld(1, 1).buffers(hidden, tokens, 8, executor=executor, timeout_s=20)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    routing = {
        "topk_idx": torch.arange(tokens * 2, device=device).view(tokens, 2) % 8,
        "num_of_experts": 8,
        "topk_weights": torch.ones(tokens, 2, device=device),
    }
    rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, **routing)
    calls = {
        "host cached dispatch": lambda: buffer.dispatch_with_permute(
            hidden=x, handle=handle, num_permuted_tokens=len(rows)
        ),
        "host non_blocking dispatch": lambda: buffer.dispatch_with_permute(
            hidden=x, **routing, num_permuted_tokens=len(rows), non_blocking=True
        ),
        "host combine": lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle),
    }
    try:
        for name, call in calls.items():
            yield {"stage": name, **timed(call, "", on_gpu, repeats)}
    finally:
        buffer.destroy()


def stages(executor: str, quick: bool, repeats: int, copy: float):
    """(title, function that yields rows) of every part."""
    tokens, hidden = (16, 256) if quick else (4096, 7168)
    most = torch.cuda.get_device_properties(0).multi_processor_count if devices.is_cuda(executor) else 4
    for dtype, sms in [("bf16", n) for n in ((2,) if quick else (32, 64))] + [("bf16", most), ("fp8", most)]:
        yield f"permute {dtype} {sms}", lambda d=dtype, n=sms: local_pass(d, tokens, hidden, n, executor, repeats, copy)
    for shape in WORLDS_TO_ROUTE:
        yield f"route {shape}", lambda s=shape: [route(s, EXPERTS, 64 if quick else 4096, executor, repeats)]
    yield "host", lambda: host_calls(executor, 3 * repeats)


def line(row: dict) -> str:
    kernel = "-" if row.get("kernel_us") is None else f"{row['kernel_us']:.1f}"
    floor = f"{row['floor_us']:.1f}" if "floor_us" in row else "-"
    share = "-" if row.get("share") is None else f"{row['share']:.1%}"
    moved = row.get("bytes_of_exchange")
    note = f"  receives {moved['received']:,} B; as maps {moved['received_as_maps']:,} B" if moved else ""
    what = f"{row['stage']:<27} {row.get('dtype', '-'):<5} {row.get('sms', '-'):>4}"
    return f"{what} {kernel:>10} {floor:>9} {share:>7} {row['host_us']:>8.1f}{note}"


def main(argv=None):
    """Measure, print, and return 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="cuda", help="cuda, or host to try the script itself")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="raw JSON")
    args = parser.parse_args(argv)
    on_gpu = devices.is_cuda(args.executor)
    copy = copy_rate((1 << 20) if args.quick else (1 << 30), torch.device("cuda" if on_gpu else "cpu"), args.repeats)
    print(f"a copy of the device moves {copy / 1e12:.3f} TB/s, read and written")
    print(f"{'stage':<27} {'dtype':<5} {'SMs':>4} {'kernel us':>10} {'floor us':>9} {'share':>7} {'host us':>8}")
    found, device = [], torch.cuda.get_device_name() if on_gpu else "host"
    for title, part in stages(args.executor, args.quick, args.repeats, copy):
        try:
            for row in part():
                found.append(row)
                print(line(row), flush=True)
        except Exception as error:  # a part that fails is a result; the others still count
            found.append({"stage": title, "error": f"{type(error).__name__}: {error}"})
            print(f"{title:<27} {found[-1]['error'][:100]}", flush=True)
        if args.out:  # now: who is cut off leaves what there is
            args.out.write_text(
                json.dumps(
                    {"device": device, "torch": torch.__version__, "copy_bytes_per_s": copy, "rows": found}, indent=1
                )
                + "\n"
            )
    return int(any("error" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
