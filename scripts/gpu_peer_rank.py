"""One rank of gpu_peer.py: makes the inputs, drives the adapter, and times it. See there."""

import importlib
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_bench import Case as Shape  # noqa: E402
from gpu_bench import Clock, inputs  # noqa: E402

from hybrid_ep.cli.bench import built_in, deep_ep  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.cli.bench.implementations import Case, Setting  # noqa: E402

KINDS = {kind.name: kind for kind in (built_in.HybridEp, *deep_ep.ADAPTERS)}
VERBS = ("dispatch", "combine")


def shapes(ranks, quick):
    """bf16 and fp8, over SM counts; 8 experts a rank, but 32 at least, so that a group of one still routes."""
    tokens, hidden, experts = (32, 512, 32) if quick else (4096, 7168, max(32, 8 * ranks))
    return [
        Shape("peer", ranks, ranks, tokens, hidden, experts, 8, dtype, sms)
        for dtype in ("bf16", "fp8")
        for sms in ((8,) if quick else (8, 16, 24))
    ]


def case_of(shape, rank, group, executor, permute):
    device = torch.device("cpu") if executor == "host" else torch.device("cuda", torch.cuda.current_device())
    mine = inputs(shape, rank, device)
    idx, weights = mine["topk_idx"], mine["topk_weights"]
    routing = torch.zeros(shape.tokens, shape.num_experts, dtype=torch.bool, device=device).scatter_(1, idx, True)
    probs = torch.zeros(shape.tokens, shape.num_experts, device=device).scatter_(1, idx, weights)
    return Case(
        group=group,
        rank=rank,
        num_ranks=shape.num_ranks,
        num_local_ranks=shape.num_ranks,
        num_experts=shape.num_experts,
        topk=shape.topk,
        max_tokens=shape.tokens,
        num_sms=shape.num_sms,
        permute=permute,
        route_as="topk",
        executor=executor,
        dtype=shape.dtype,
        timeout_s=60.0,
        x=mine["hidden"],
        scales=mine["scaling_factor"],
        sum_dtype=torch.bfloat16,
        topk_idx=idx,
        topk_weights=weights,
        routing_map=routing,
        probs=probs,
    )


def kernel_us(call, on_gpu, repeats, named=""):
    """Median GPU time of the kernels of one call, of those with this in their name; None without a GPU."""
    if not on_gpu:
        return None
    found = []
    for _ in range(repeats):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        found.append(sum(e.self_device_time_total for e in profile.key_averages() if named in e.key))
    return statistics.median(found)


def time_verb(call, on_gpu, repeats):
    clock = Clock(on_gpu)
    for i in range(repeats + 3):
        dist.barrier()
        if i >= 3:
            clock.start()
        call()
        if i >= 3:
            clock.stop()
        if on_gpu:
            torch.cuda.synchronize()
    times = clock.times()
    return {"api_us": statistics.median(times), "api_times_us": times, "kernel_us": kernel_us(call, on_gpu, 3)}


def run_shape(kind, shape, executor, repeats):
    """One row: the shape, and the times of both verbs on this rank, or why there are none."""
    row = asdict(shape)
    permute = kind.ordered  # V1 and V2 deliver rows as received, in an order of their own, and nothing else
    setting = Setting(
        shape.num_ranks,
        shape.tokens,
        shape.topk,
        shape.hidden * 2,
        permute,
        shape.dtype,
        executor if kind is built_in.HybridEp else "cuda",
    )  # a peer's stand-in may move host tensors
    if reason := kind.unavailable(setting):
        return {**row, "skipped": reason}
    case = case_of(shape, dist.get_rank(), dist.group.WORLD, executor, permute)
    implementation = kind(case)
    try:
        done = implementation.dispatch()
        rows = implementation.expert_output(done)
        calls = {"dispatch": implementation.dispatch, "combine": lambda: implementation.combine(done, rows)}
        on_gpu = executor != "host"
        return {
            **row,
            "permute": permute,
            "received_rows": int(done.rows.shape[0]),
            **{verb: time_verb(calls[verb], on_gpu, repeats) for verb in VERBS},
        }
    finally:
        implementation.close()


def be_rank(args):
    """One rank; rank 0 writes what it measured."""
    if args.executor != "host":
        torch.cuda.set_device(args.rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if args.executor == "host" else "nccl",
        rank=args.rank,
        world_size=args.ranks,
        init_method=f"tcp://127.0.0.1:{args.port}",
    )
    kind, rows = KINDS[args.name], []
    broken = args.path and cannot_import()
    for shape in () if broken else shapes(args.ranks, args.quick):
        try:
            rows.append(run_shape(kind, shape, args.executor, args.repeats))
        except Exception as error:  # a shape that fails is a result; the others still count
            rows.append({**asdict(shape), "error": f"{type(error).__name__}: {error}"})
    if args.rank == 0:
        said = summary(args, rows) | ({"skipped": broken} if broken else {})
        args.out.write_text(json.dumps(said, indent=1) + "\n")
    dist.destroy_process_group()


def cannot_import():
    """Why the peer's package does not load here, whatever it raises; None when it does."""
    try:
        importlib.import_module("deep_ep")
    except Exception as error:
        return f"deep_ep does not load: {type(error).__name__}: {error}"
    return None


def summary(args, rows):
    module = sys.modules.get("deep_ep")
    device = "host" if args.executor == "host" else torch.cuda.get_device_name()
    said = {
        "name": args.name,
        "path": str(args.path or ""),
        "device": device,
        "torch": torch.__version__,
        "from": getattr(module, "__file__", None),
        "rows": rows,
    }
    reasons = {row.get("skipped") for row in rows}
    return {**said, "skipped": reasons.pop()} if len(reasons) == 1 and None not in reasons else said
