"""Megatron-LM's own unit tests for MoE, with our dispatcher in place of their backends, on a CPU.

    python scripts/megatron_unit_tests.py PATH_OF_A_MEGATRON_LM_CHECKOUT [--route ours|deep_ep|theirs] [--out FILE]

Fetches nothing and holds nothing of theirs: give a checkout of the tag that the results name. Their tests are written
for 8 ranks; with fewer, the parallel sizes that they are called with are halved until they fit, and ids keep theirs.
A world of gloo ranks runs the tests in order; after a failure it is replaced, since ranks that failed apart wait for
each other. A test passes when it passes on every rank.

* ours: allgather, alltoall and flex cases all get `megatron_patches`' dispatcher; deep_ep: Megatron's own HybridEP
  manager over hybrid_ep served as the package deep_ep; theirs: nothing of ours, the control.
* --limit-s S: stop after the first test that ends later than that; results then say that they are not complete.
* --expect FILE: exit code 1 unless every test that passes in FILE passes again."""

import argparse
import collections
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import megatron_unit_rank  # noqa: E402

from hybrid_ep.local_ranks import LOOPBACK, Ended, LocalRanks  # noqa: E402

MOE = "tests/unit_tests/transformer/moe"
FILES = tuple(
    f"{MOE}/test_{name}.py"
    for name in (
        "token_dispatcher",
        "a2a_token_dispatcher",
        "moe_layer",
        "latent_moe_layer",
        "shared_experts",
        "sequential_mlp",
        "routers",
        "aux_loss",
        "qb_routing",
        "router_replay",
        "upcycling",
        "moe_layer_discrepancy",
    )
)
SILENCE_S = 150.0  # longest time without news from a world
GRACE_S = 3.0  # for the other ranks, once one has failed

# What a failure's text says -> whose it is. First match wins.
REASONS = (
    (r"[Tt]ransformer[ _]?[Ee]ngine|\bTE\b|TENorm|fused_permute|te_\w+ is|NoneType.*TE", "needs Transformer Engine"),
    (r"'NoneType' object is not callable", "needs Transformer Engine"),  # its layer specs hold None without it
    (r"not supported by torch LayerNorm|[Aa]pex", "needs Apex or Transformer Engine (sequence-parallel LayerNorm)"),
    (r"CUDA|cuda|Triton|triton|nvcc|no NVIDIA", "needs CUDA"),
    (r"world.?size|not divisible by", "needs another number of ranks"),
    (r"No module named '(\w+)'", "needs a package that is not installed"),
)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="root of a Megatron-LM checkout")
    parser.add_argument("--route", choices=megatron_unit_rank.ROUTES, default="ours")
    parser.add_argument("--ranks", type=int, default=4, help="Megatron's CI has 8 (default 4)")
    parser.add_argument("--out", type=Path, help="write results as JSON")
    parser.add_argument("--expect", type=Path, help="results of an earlier run, to be reached again")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no test after so many seconds")
    parser.add_argument("-k", default=None, metavar="REGEX", help="only tests whose id matches")
    parser.add_argument("tests", nargs="*", help=f"files or test ids (default: {len(FILES)} files of {MOE})")
    args = parser.parse_intermixed_args(argv)
    checkout = args.checkout.resolve()
    tests = args.tests or [file for file in FILES if (checkout / file).exists()]
    if not tests or not (checkout / MOE).is_dir():
        parser.error(f"{checkout} has no {MOE}: give the root of a Megatron-LM checkout")
    os.environ.update(
        OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", HYBRID_EP_TIMEOUT_S="60", TORCHINDUCTOR_COMPILE_THREADS="1"
    )
    megatron_unit_rank.prepare(checkout, args.ranks, args.route)
    results, not_run = run(checkout, args.ranks, tests, args.k, time.monotonic() + args.limit_s)
    report = summary(checkout, args, results, not_run)
    print(table(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return verdict(results, args.expect)


# ---- worlds


def run(checkout, num_ranks, tests, pattern, until=float("inf")):
    """{test id: (outcome, text, seconds)} and ids that had no time; worlds are replaced as tests fail."""
    found, results = World(checkout, 1, tests, collect_only=True).collect(), {}
    todo = [node for node in found if found[node] is None and (pattern is None or re.search(pattern, node))]
    results |= {node: ("failed", text, 0.0) for node, text in found.items() if text is not None}
    while todo and time.monotonic() < until:
        done = World(checkout, num_ranks, todo).results(say, until)
        if not done:
            raise SystemExit(f"a world of {num_ranks} ranks ended before {todo[0]}")
        results |= done
        todo = [node for node in todo if node not in results]
    return results, todo


def say(node, outcome, text, seconds):
    first = text.splitlines()[0][:150] if text else ""
    print(f"{outcome:8s} {seconds:6.1f} s  {node.removeprefix(MOE + '/')}  {first}", flush=True)


class World:
    """Ranks of one pytest run, forked from this process, which has imported Megatron."""

    def __init__(self, checkout, num_ranks, nodes, collect_only=False):
        self.nodes = nodes
        context = multiprocessing.get_context("fork")
        self.ranks = LocalRanks(context, num_ranks, _rank, (checkout, _free_port(), nodes, collect_only))

    def collect(self):
        """{test id: None, or why its file could not be read}."""
        found = {}
        for kind, *news in self._news(SILENCE_S):
            if kind == "collected":
                found |= dict.fromkeys(news[0])
            elif kind == "not collected":
                found[news[0]] = news[1]
        self.ranks.kill()
        return found

    def results(self, say, until):
        """{test id: (outcome, text, seconds)} up to the first failure, which is the last of them."""
        said, results, running, wait = collections.defaultdict(list), {}, None, SILENCE_S
        for kind, node, *rest in self._news(lambda: wait):  # noqa: B023  (read when it is called)
            if kind == "start" and running is None and results and time.monotonic() > until:
                break
            if kind == "start":
                running = running or node
            elif kind in ("passed", "failed", "skipped", "not collected"):
                said[node].append(("failed" if kind == "not collected" else kind, rest[0]))
                wait = wait if _goes_on(said[node][-1]) else GRACE_S
            elif kind == "end":
                said[node, "ends"].append(rest[0])
                if len(said[node, "ends"]) == len(self.ranks.processes) and all(map(_goes_on, said[node])):
                    results[node] = (*_merged(said[node]), max(said[node, "ends"]))
                    say(node, *results[node])
                    running = None
        self.ranks.kill()
        failed = [node for node in self.nodes if node not in results and any(k == "failed" for k, _ in said[node])]
        if failed or running:
            node = failed[0] if failed else running
            texts = said[node] if failed else [("failed", f"no news for {SILENCE_S:.0f} s")]
            results[node] = (*_merged(texts), max(said[node, "ends"], default=0.0))
            say(node, *results[node])
        return results

    def _news(self, wait):
        """Messages of all ranks until all have ended, or nobody says anything for `wait` seconds."""
        while self.ranks.open:
            news = self.ranks.receive(wait() if callable(wait) else wait)
            if not news:
                return
            for _, message in news:
                if message is not Ended:
                    yield message if len(message) > 1 else (*message, "")


def _goes_on(said):
    """Whether a world survives this outcome of a test on a rank."""
    return said[0] != "failed" or megatron_unit_rank.SAME_EVERYWHERE.search(said[1])


def _merged(said):
    """(outcome, text) of a test over its ranks: failed if one failed, else passed if one passed."""
    for outcome in ("failed", "passed", "skipped"):
        texts = [text for kind, text in said if kind == outcome]
        if texts:  # the rank that knows most: a lost connection is another rank's failure
            return outcome, min(texts, key=lambda text: "Connection closed" in text or "Timed out" in text)
    return "failed", "ended without a result"


def _free_port():
    """For Megatron's tests, which meet anew in every test: no store of ours would serve that."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _rank(job, checkout, port, nodes, collect_only):
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        megatron_unit_rank.run(checkout, job.rank, job.num_ranks, port, nodes, collect_only, job.pipe.send)
    finally:
        job.pipe.close()
        os._exit(0)


# ---- report


def reason(text):
    """Whose a failure is, by its text; "unexplained" where no rule knows."""
    return next((why for pattern, why in REASONS if re.search(pattern, text)), "unexplained")


def summary(checkout, args, results, not_run):
    import torch

    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    top = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    own = Path(top.stdout.strip() or "/").resolve() == checkout
    package = (checkout / "megatron/core/package_info.py").read_text()
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", package, re.M))
    return {
        "megatron_core": version,
        "commit": commit.stdout.strip() if own else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "ranks": args.ranks,
        "route": args.route,
        "date": time.strftime("%Y-%m-%d"),
        "complete": not not_run,
        "not_run": len(not_run),
        "tests": {
            node.removeprefix(MOE + "/"): {
                "outcome": outcome,
                "seconds": round(seconds, 1),
                **({"text": text[:300]} if outcome != "passed" and text else {}),
                **({"reason": reason(text)} if outcome == "failed" else {}),
            }
            for node, (outcome, text, seconds) in results.items()
        },
    }


def table(report):
    """Files by outcomes, as Markdown, then failures by reason and what had no time."""
    files, reasons = collections.defaultdict(collections.Counter), collections.Counter()
    for node, test in report["tests"].items():
        files[node.split("::")[0]][test["outcome"]] += 1
        if test["outcome"] == "failed":
            reasons[test["reason"]] += 1
    lines = ["| file | passed | failed | skipped |", "|---|---|---|---|"]
    lines += [f"| {file} | {n['passed']} | {n['failed']} | {n['skipped']} |" for file, n in files.items()]
    lines += [""] + [f"{number} failed: {why}" for why, number in reasons.most_common()]
    lines += [f"{report['not_run']} not run: the limit of time"] if report["not_run"] else []
    return "\n".join(lines)


def verdict(results, expected):
    if expected is None:
        return 0
    passed = {node.removeprefix(MOE + "/") for node, (outcome, *_) in results.items() if outcome == "passed"}
    before = json.loads(expected.read_text())["tests"]
    lost = [node for node, test in before.items() if test["outcome"] == "passed" and node not in passed]
    print("\n".join(f"passed before, not now: {node}" for node in lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
