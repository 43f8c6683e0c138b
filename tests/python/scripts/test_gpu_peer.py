"""gpu_check's peer mode, on the host: a package that stands for DeepEP is given by path and timed beside hybrid_ep, in
processes of its own, on the same routing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_check  # noqa: E402

STAND_IN = '''
import json, os, torch
from pathlib import Path

class ElasticBuffer:
    """Moves nothing on one rank; writes down what it was called with and where it may build."""
    def __init__(self, group, **rest):
        self.log = Path(__file__).with_name("calls.jsonl").open("a")
        self.say("init", rest)
    def say(self, name, facts):
        facts = {k: v if isinstance(v, (int, bool, type(None))) else [list(v.shape), float(v.double().sum())]
                 for k, v in facts.items() if k != "handle"}
        caches = {n: os.environ[n] for n in ("TORCH_EXTENSIONS_DIR", "EP_JIT_CACHE_DIR", "HOME")}
        self.log.write(json.dumps([name, facts, caches]) + "\\n")
        self.log.flush()
    def dispatch(self, x, handle=None, **rest):
        self.say("dispatch", rest)
        return x, None, None, "handle", None
    def combine(self, x, handle, **rest):
        return x, None, None
'''


@pytest.fixture
def steps(tmp_path):
    return gpu_check.Steps(tmp_path / "out", 300, set())


def peer(tmp_path: Path, name: str, source: str) -> Path:
    package = tmp_path / name / "deep_ep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return package.parent


def test_a_peer_given_by_path_is_timed_on_the_same_routing_and_a_broken_one_is_skipped(tmp_path, steps, capsys):
    steps.out.mkdir()
    good = peer(tmp_path, "good", STAND_IN)
    broken = peer(tmp_path, "broken", "raise OSError('libnccl.so.9: cannot open shared object file')")
    found = gpu_check.time_peers(
        steps,
        {"deep_ep-v2": good, "deep_ep-v1": broken},
        "--quick",
        "--executor",
        "host",
        "--ranks",
        "1",
        "--repeats",
        "2",
    )
    results = {name: (step["result"], step["note"]) for name, step in steps.results.items()}
    assert results["hybrid_ep"][0] == results["deep_ep-v2"][0] == "passed", results
    assert results["deep_ep-v1"] == (
        "skipped",
        "deep_ep does not load: OSError: libnccl.so.9: cannot open shared object file",
    )
    assert set(found) == {"hybrid_ep", "deep_ep-v2"}
    assert Path(found["deep_ep-v2"]["from"]).parent == good / "deep_ep" and found["hybrid_ep"]["from"] is None
    for said in found.values():
        assert [(r["dtype"], r["num_sms"]) for r in said["rows"]] == [("bf16", 8), ("fp8", 8)]
        for row in said["rows"]:
            assert len(row["dispatch"]["api_times_us"]) == 2 and row["combine"]["api_us"] > 0
            assert row["dispatch"]["kernel_us"] is None
    calls = [json.loads(line) for line in (good / "deep_ep" / "calls.jsonl").read_text().splitlines()]
    dispatched = [facts for name, facts, _ in calls if name == "dispatch"]
    assert len({json.dumps(f["topk_idx"]) for f in dispatched}) == 1 and dispatched[0]["topk_idx"][0] == [32, 8]
    for _, _, caches in calls:
        assert all(Path(folder).is_relative_to(steps.out / "deep_ep-v2-build") for folder in caches.values())
    table = list(gpu_check.peer_table(found))
    assert len(table) == 1 + 2 * 2 * 2 and sum("deep_ep-v2" in line for line in table) == 4
    assert all(line.split()[-1].count(".") == 1 for line in table if line.startswith("deep_ep-v2"))
    capsys.readouterr()


@pytest.mark.parametrize("text", ["deep_ep-v2", "deep_ep-v2=/no/such/folder", "nccl=."])
def test_a_peer_needs_a_name_and_a_folder(text):
    with pytest.raises(argparse.ArgumentTypeError, match="deep_ep-hybrid=FOLDER"):
        gpu_check.peer_of(text)
