"""Writes docs/results/simulator-model.md and its plots: every published row with its residual, peers, weights against
tokens, end-to-end rows, the event engine beside the model (--events; else as it stands). Deterministic; minutes.

    python scripts/simulate_tables.py [--events] [--out docs/results]
"""

import argparse
import sys
from pathlib import Path

from hybrid_ep.cli import plotting
from hybrid_ep.cli.plotting import BLUE, GREEN, INK, MUTED, PALE, RED
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import dwdp, end_to_end, events, model, models, peers, published, step_time
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.step_time import Job

_PEER_SIZES = [("h100_8x400g", r) for r in (8, 16, 32, 64, 128, 256)] + [("gb200_nvl72", r) for r in (8, 16, 32, 64)]
# cluster, nodes, ranks a node, tokens, SMs that feed links, SMs for local work beside them
_CHECKED = [
    ("h100_8x400g", 1, 8, 1024, 8, 8),
    ("h100_8x400g", 1, 8, 1024, 8, 32),
    ("h100_8x400g", 1, 8, 1024, 24, 24),
    ("h100_8x400g", 1, 8, 4096, 8, 8),
    ("h100_8x400g", 1, 8, 4096, 8, 0),
    ("h100_8x400g", 2, 8, 1024, 8, 8),
    ("h100_8x400g", 2, 8, 1024, 8, 0),
    ("h100_8x400g", 2, 8, 1024, 24, 24),
    ("h100_8x400g", 2, 8, 4096, 8, 8),
    ("h100_8x400g", 4, 8, 512, 8, 8),
    ("gb200_nvl36", 1, 12, 1024, 16, 16),
    ("gb200_nvl36", 1, 36, 1024, 16, 16),
]


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(c) for c in row) + " |" for row in rows)])


def fitted_table():
    rows = [(g, n, f"{published.fit(g, n):.4g}", source) for (g, n), source in clusters.FITTED_FROM.items()]
    return table(("generation", "number", "value", "the one row it is fitted to"), rows)


def summary_table(found):
    rows = []
    for gpu in ("H100", "B200", "GB200"):
        for dtype, op in (("bf16", "dispatch"), ("bf16", "combine"), ("fp8", "dispatch")):
            for scope in ("kernel", "api"):
                chosen = [
                    a
                    for a in found
                    if a.row.own_kernels and (a.row.gpu, a.row.dtype, a.row.op, a.row.scope) == (gpu, dtype, op, scope)
                ]
                median, worst = published.spread(chosen)
                rows.append((gpu, f"{op} {dtype}", scope, len(chosen), f"{median:.1%}", f"{worst:.1%}"))
    median, worst = published.spread(published.floor_rows(found))
    rows.append(("**H100**", "**all bf16**", "**both**", 36, f"**{median:.1%}**", f"**{worst:.1%}**"))
    return table(("GPU", "rows", "scope", "number", "median residual", "worst"), rows)


def all_rows(found):
    header = ("source", "GPU", "op", "dtype", "ranks", "SMs", "scope", "published GB/s", "model", "residual", "binds")
    said = (
        "*model* is of the published kernels, which leave permute to others. *ours* and what binds it are of this\n"
        "library's in their place, with permute in the launch, as many SMs for links and the library's blocks for\n"
        "local work beside them; in API time the exchange of routing too. Nothing of *ours* was measured.\n\n"
    )
    return said + table(
        (*header, "ours", "binds ours"),
        [
            (
                a.row.source.split(" (")[0],
                a.row.gpu,
                a.row.op,
                a.row.dtype,
                a.row.ranks,
                a.row.num_sms,
                a.row.scope,
                f"{a.row.gb_per_s:g}",
                f"{a.gb_per_s:.1f}",
                f"{a.residual:+.1%}",
                a.binds,
                f"{ours.gb_per_s:.1f}",
                ours.binds,
            )
            for a in found
            for ours in (published.answer(a.row, impl=HYBRID_EP),)
        ],
    )


def claims_table():
    rows = []
    for claim, name, ranks, local, link, counts in (
        ("8 SMs fill NVLink on 8 H100", "h100_8x400g", 8, 8, "nvlink", (4, 8, 12)),
        ("about 4 SMs near the NIC's peak on 32 H100", "h100_8x400g", 32, 8, "rail", (2, 4, 8)),
        ("16 SMs fill NVLink on NVL36", "gb200_nvl36", 36, 36, "nvlink", (8, 16, 24)),
    ):
        c = clusters.get(name)
        for sms in counts:
            shares = []
            for op in model.OPS:
                got = model.predict(op, Shape(ranks, local, 4096, 8192, 8, 2 * ranks), c, num_sms=sms, impl=PUBLISHED)
                shares.append(got.physical[link] / (c.gpu.nvlink_rate if link == "nvlink" else c.nic.rate))
            rows.append((claim, sms, f"{shares[0]:.0%}", f"{shares[1]:.0%}"))
    return table(("claim", "SMs", "dispatch, of what the link can do", "combine"), rows)


def peers_table(plt, out):
    rows, points = [], []
    for name, ranks in _PEER_SIZES:
        c = clusters.get(name)
        shape = Shape(ranks, min(ranks, 64 if c.ranks_per_node > 8 else 8), 4096, 7168, 8, 256)
        total = {n: sum(peers.compare(op, shape, c)[n].us for op in model.OPS) for n in peers.NAMES}
        full = sum(peers.hybrid(op, shape, c, num_sms=64).us for op in model.OPS)
        rows.append(
            (
                name,
                ranks,
                *(f"{total[n]:.0f}" for n in peers.NAMES),
                f"{full:.0f}",
                f"{total['flat'] / total['hybrid_ep']:.2f}",
                f"{total['node_dedup'] / total['hybrid_ep']:.2f}",
                f"{total['flat'] / full:.2f}",
            )
        )
        points.append((name, ranks, total, full))
    figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.1), layout="constrained", width_ratios=(6, 4))
    for panel, name in zip(panels, ("h100_8x400g", "gb200_nvl72"), strict=True):
        chosen = [p for p in points if p[0] == name]
        labels = {
            "flat": ("flat, no dedup", MUTED),
            "node_dedup": ("node dedup, phases in turn", GREEN),
            "hybrid_ep": ("hybrid_ep, 24 + 24 SMs", BLUE),
        }
        width = 0.2
        for i, (key, (label, colour)) in enumerate(labels.items()):
            panel.bar(
                [x + (i - 1.5) * width for x in range(len(chosen))],
                [p[2][key] / 1e3 for p in chosen],
                width,
                color=colour,
                label=label,
            )
        panel.bar(
            [x + 1.5 * width for x in range(len(chosen))],
            [p[3] / 1e3 for p in chosen],
            width,
            color=PALE,
            label="hybrid_ep, 64 + 64 SMs",
        )
        panel.set_xticks(range(len(chosen)), [str(p[1]) for p in chosen])
        panel.set_xlabel(f"EP size, {name}")
        panel.grid(axis="x", visible=False)
    panels[0].set_ylabel("dispatch + combine (ms)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    plotting.save(figure, out / "simulator-peers")
    return table(
        (
            "cluster",
            "EP",
            "flat us",
            "node dedup us",
            "hybrid_ep 24 + 24 SMs us",
            "64 + 64 SMs us",
            "flat / 24 SMs",
            "node dedup / 24 SMs",
            "flat / 64 SMs",
        ),
        rows,
    )


def dwdp_table():
    deepseek, gb200 = models.get("deepseek_v3"), clusters.get("gb200_nvl72")
    rows = []
    for tokens, ratio in dwdp.PUBLISHED_COMPUTE_OVER_PREFETCH.items():
        at = dwdp.layer(deepseek, gb200, tokens, dwdp.PUBLISHED_GROUP)
        a, b = at.compute_us / at.prefetch_us, at.dep_us / at.dwdp_us
        want = dwdp.PUBLISHED_DEP_OVER_DWDP[tokens]
        residual = "fitted" if tokens in (16384, 32768) else f"{a / ratio - 1:+.0%}"
        rows.append((tokens, ratio, f"{a:.2f}", residual, want, f"{b:.2f}", f"{b / want - 1:+.0%}"))
    crossings = []
    for m in models.MODELS.values():
        ranks = 8
        crossings.append(
            (
                m.name,
                ranks,
                f"{dwdp.byte_crossover(m, ranks, 'bf16'):,.0f}",
                f"{dwdp.byte_crossover(m, ranks, 'bf16', training=True):,.0f}",
            )
        )
    hidden = dwdp.hiding_crossover(deepseek, gb200, dwdp.PUBLISHED_GROUP)
    return "\n\n".join(
        (
            table(
                (
                    "tokens per rank",
                    "T_compute/T_prefetch published",
                    "model",
                    "residual",
                    "T_DEP/T_DWDP published",
                    "model",
                    "residual",
                ),
                rows,
            ),
            f"Compute hides the prefetch (DeepSeek-V3, NVFP4, 4 GB200) from {hidden:,} tokens per rank. Moving weights "
            "takes fewer bytes than moving tokens, bf16:",
            table(
                ("model", "ranks", "forward alone, tokens per rank from", "training, tokens per rank from"), crossings
            ),
        )
    )


def end_to_end_table():
    fixed = end_to_end.fixed_cost_check()
    note = (
        f"\n\nawslabs, Qwen3-235B, EP32: the pair at micro-batch 4 says {fixed.fixed_us:.0f} us of fixed cost a "
        f"call beside the bytes; with it the pair at micro-batch 1 should differ by {fixed.predicted_s:.1f} s, "
        f"published {fixed.published_s:.1f} s. Bytes alone have the wrong sign."
    )
    calibration = (
        "What compute takes, and how far nodes differ, is set in this table by the rows that say `calibrates`, so "
        "that the others test the exchange. `hybrid-ep launch`, `report scaling` and `simulate --recommend` do not "
        "go by it: they take the four numbers fitted to [published training steps](training-residuals.md), and no "
        "value here is a prediction of theirs.\n\n"
    )
    return calibration + _pairs() + note


def _pairs():
    return table(
        ("source", "model", "cluster", "GPUs", "EP", "dispatcher", "published", "model", "residual", "note"),
        [
            (
                r.source,
                r.job.model.name,
                r.job.cluster.name,
                r.job.gpus,
                r.job.ep,
                r.job.dispatcher,
                f"{r.value:g} {r.unit}",
                f"{r.predicted:.0f}",
                "calibrates" if r.calibrates else f"{r.residual:+.1%}",
                r.note,
            )
            for r in end_to_end.published_rows()
        ],
    )


def scale_table(plt, out):
    figure, panels = plt.subplots(1, 3, figsize=(8.2, 2.5), sharex=True, sharey=True, layout="constrained")
    lines = []
    plans = (
        ("deepseek_v3", "gb200_nvl72", 64, 4, BLUE),
        ("qwen3_235b_a22b", "h100_8x400g", 32, 8, RED),
        ("qwen3_30b_a3b", "b200_8x400g", 8, 1, GREEN),
    )
    for panel, (name, cluster, ep, pp, colour) in zip(panels, plans, strict=True):
        sizes = [n for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) if n % (ep * pp) == 0]
        rates = []
        for gpus in sizes:
            # the variation between nodes of the torchtitan rows
            job = Job(
                models.get(name),
                clusters.get(cluster),
                gpus,
                ep,
                pp=pp,
                virtual_pp=4,
                cv_slow=0.034,
                num_sms=32,
                efficiency=0.3,
            )
            rates.append(step_time.step(job))
        shares = [r.tokens_per_s_per_gpu / rates[0].tokens_per_s_per_gpu for r in rates]
        panel.plot(sizes, shares, marker="o", markersize=3.5, color=colour)
        panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (6, 3)))
        panel.annotate(f"{shares[-1]:.2f}", (sizes[-1], shares[-1]), (0, -12), textcoords="offset points", ha="center")
        panel.set_title(f"{name}\nEP{ep} PP{pp}, {cluster}")
        panel.set(xscale="log", ylim=(0, 1.1), xlabel="GPUs")
        plotting.label_ticks(panel.xaxis, (8, 64, 512, 4096), (8, 64, 512, 4096))
        lines += [
            (
                name,
                cluster,
                gpus,
                f"EP{ep} PP{pp}",
                f"{r.tokens_per_s_per_gpu:.0f}",
                f"{r.tflops_per_gpu:.0f}",
                ", ".join(f"{k} {v:.0%}" for k, v in r.shares.items() if v >= 0.005),
            )
            for gpus, r in zip(sizes, rates, strict=True)
        ]
    panels[0].set_ylabel("tokens/s/GPU\nof the smallest job's")
    plotting.save(figure, out / "simulator-scale")
    return table(("model", "cluster", "GPUs", "layout", "tokens/s/GPU", "TFLOPS/GPU", "where the time goes"), lines)


def events_table():
    rows = []
    for name, nodes, local, tokens, sms, permute in _CHECKED:
        c = clusters.get(name)
        shape = Shape(nodes * local, local, tokens, 7168, 8, 288 if local % 12 == 0 else 256)
        got = events.measure(shape, c, num_sms=sms, permute_sms=permute, row_budget=2 * events.rows(shape))
        skew = c.gpu.skew_us.value if nodes > 1 else 0.0
        for op in model.OPS:
            us = model.predict(op, shape, c, num_sms=sms, permute_sms=permute).kernel_us - skew
            by_events = got.kernel_us[op]
            numbers = f"{by_events:.0f}", f"{us:.0f}", f"{us / by_events - 1:+.1%}"
            rows.append((c.gpu.name, f"{nodes} x {local}", tokens, f"{sms} + {permute}", op, *numbers))
    header = ("GPU", "EP", "tokens", "SMs: links + local", "op", "events us", "model us", "model against events")
    return table(header, rows) + "\n\nThe kernel alone: without the exchange of routing, and without nodes' skew."


def draw_residuals(plt, out, found):
    from matplotlib import ticker

    figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.4), layout="constrained")
    for panel, gpus, limits in ((panels[0], ("H100",), (25, 95)), (panels[1], ("B200", "GB200"), (180, 900))):
        for (op, dtype), colour, mark in (
            (("dispatch", "bf16"), BLUE, "o"),
            (("combine", "bf16"), RED, "s"),
            (("dispatch", "fp8"), GREEN, "^"),
        ):
            chosen = [
                a for a in found if a.row.own_kernels and a.row.gpu in gpus and (a.row.op, a.row.dtype) == (op, dtype)
            ]
            for scope, fill in (("kernel", colour), ("api", "none")):
                part = [a for a in chosen if a.row.scope == scope]
                panel.scatter(
                    [a.row.gb_per_s for a in part],
                    [a.gb_per_s for a in part],
                    s=16,
                    marker=mark,
                    facecolors=fill,
                    edgecolors=colour,
                    linewidths=0.9,
                    label=f"{op} {dtype}, {scope}",
                )
        panel.plot(limits, limits, color=INK, linewidth=0.8)
        panel.fill_between(
            limits, [0.75 * x for x in limits], [1.25 * x for x in limits], color=INK, alpha=0.08, linewidth=0
        )
        panel.set(
            xlim=limits,
            ylim=limits,
            xscale="log",
            yscale="log",
            xlabel="published GB/s (logical)",
            title=" and ".join(gpus),
        )
        ticks = (30, 40, 50, 60, 80) if gpus == ("H100",) else (200, 300, 400, 600, 800)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(ticker.FixedLocator(ticks))
            axis.set_minor_locator(ticker.NullLocator())
            axis.set_major_formatter("{x:.0f}")
    panels[0].set_ylabel("model GB/s (logical)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    plotting.note(figure, "Line: the model agrees with what was published.  Band: 25 % to either side of it.")
    plotting.save(figure, out / "simulator-residuals")


def kept(path, title):
    """A section of the page as it stands, where this run does not make it."""
    page = path.read_text() if path.is_file() else ""
    _, found, rest = page.partition(f"\n## {title}\n\n")
    return rest.partition("\n\n## ")[0].rstrip() if found else "Not run: `scripts/simulate_tables.py --events`."


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--events", action="store_true", help="run the event engine too (a minute)")
    args = parser.parse_args(argv)
    plt = plotting.pyplot()
    args.out.mkdir(parents=True, exist_ok=True)
    found = published.answers()
    draw_residuals(plt, args.out, found)
    path = args.out / "simulator-model.md"
    events_part = events_table() if args.events else kept(path, "Event engine beside the model")
    sections = {
        "Fitted numbers": fitted_table(),
        "Residuals in short": summary_table(found) + "\n\n![residuals](simulator-residuals.svg)",
        "The blog's claims": claims_table(),
        "Event engine beside the model": events_part,
        "Peers": peers_table(plt, args.out) + "\n\n![peers](simulator-peers.svg)",
        "Weights instead of tokens": dwdp_table(),
        "End to end": end_to_end_table(),
        "Steps at scale": "Compute is put at 30 % of the GPU's peak in every row, launches included.\n\n"
        + scale_table(plt, args.out)
        + "\n\n![scale](simulator-scale.svg)",
        "Every published row": all_rows(found),
    }
    text = (
        "# Performance model: tables\n\nWritten by `scripts/simulate_tables.py`; what they mean is in "
        "[performance_model.md](../performance_model.md). Predictions, not measurements of this library.\n"
    )
    text += "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items())
    path.write_text(text)
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
