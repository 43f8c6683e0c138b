"""What messages, the doctor and the troubleshooting page tell a reader to do is done, and the trouble is gone.

The fault is made for real where a test may make it: packages that are missing, a small /dev/shm, variables and files
that are wrong, calls that are refused. The command is taken from what was printed, word for word."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from bare_place import ROOT, BarePlace, installed_here
from small_buffer import CHOICES, IDX, E, H, X, make, round_trip
from small_shm import with_small_shm
from test_remedies import PIP

from hybrid_ep import HybridEPBuffer, cli, env
from hybrid_ep.cli import main
from hybrid_ep.cli.doctor import machine, software
from hybrid_ep.cli.doctor.finding import FAIL, OK, WARN
from hybrid_ep.errors import BootstrapError, BufferFailedError, CapacityError
from hybrid_ep.runtime.bootstrap import PosixSegments
from hybrid_ep.testing import VirtualWorld

CONFIG = (
    '{"parallel": {"num_ranks": 2, "ranks_per_node": 2}, "runtime": {"device": "cpu"}, "model": {"hidden_size": 8}}'
)
RUN_FOLDER = (
    f"mkdir -p runs/a && echo '{CONFIG}' > runs/a/config.yaml && for i in $(seq 10); do "
    'echo \'{"step": \'$i\', "step_s": 1.0, "tokens_per_s": 5.0}\'; done > runs/a/metrics.jsonl; '
)
PLACEMENT = (
    "printf 'num_slots: 2\\ninitial_global_assignments:\\n  0: [0, 1]\\nlayer_updates_per_iter: 0\\n' > p.yaml; "
    'python -c "import sys; from hybrid_ep.balance import plan_file\n'
    "try: print(plan_file.load('p.yaml'))\nexcept ValueError as error: sys.exit(str(error))\""
)
TENSORRT = (
    'mkdir -p stats; python -c "import sys, struct, json; from hybrid_ep.balance import statistics\n'
    'try: statistics.safetensors_library()\nexcept ValueError as error: sys.exit(str(error))"'
)
PLOTS = (
    "python -c \"from pathlib import Path; from recipes.plots import draw_all; print(draw_all(Path('.'), [], 1.0, 2))\""
)
BARS = "python -c \"from hybrid_ep.cli.progress import track; print(list(track(range(3), 'turns')))\""
PEER = (
    'python -c "import types; from recipes.bench_peer_megatron import MegatronAllToAll as M; '
    'print(M.unavailable(types.SimpleNamespace(quantised=False, permute=True)))"'
)

# {the message's place: (what is missing, a command that says so, whether on a terminal)}
MISSING = {
    "balance/plan_file.py": (["PyYAML"], PLACEMENT, False),
    "balance/statistics.py": (["safetensors"], TENSORRT, False),
    "cli/balance.py": (
        ["PyYAML"],
        "echo 'parallel: {expert_parallel_size: 2}' > config.yaml; "
        'echo \'{"step": 1, "expert_load": [[1, 2]]}\' > metrics.jsonl; hybrid-ep balance report metrics.jsonl',
        False,
    ),
    "cli/report/runs.py": (["PyYAML"], RUN_FOLDER + "hybrid-ep report scaling runs/a", False),
    "cli/plotting.py": (["matplotlib", "rich"], "hybrid-ep simulate --tokens 64 --sweep swept", False),
    "cli/progress.py": (["matplotlib", "rich"], BARS, True),
    "recipes/plots.py": (["matplotlib"], PLOTS, False),
    "recipes/bench_peer_megatron.py": (["megatron-core"], PEER, False),
    "cli/doctor/software.py": (
        ["megatron-core"],
        "python -c 'from hybrid_ep.cli.doctor import software; print(*software.megatron())'",
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", MISSING)
def test_the_pip_command_of_a_message_brings_what_was_missing(tmp_path, place):
    hidden, command, terminal = MISSING[place]
    if not installed_here(hidden):
        pytest.skip(f"{', '.join(hidden)} or pip is not installed here, to be hidden and brought back")
    bare = BarePlace(tmp_path, hidden)
    _, before = bare.run(command, terminal)
    (remedy,) = PIP.finditer(before)
    written = next(path for path in (ROOT / "hybrid_ep" / place, ROOT / place) if path.is_file())
    assert remedy[0] in written.read_text()
    code, said = bare.run(remedy[0])
    assert code == 0 and "Successfully installed" in said, said
    code, after = bare.run(command, terminal)
    assert "pip install" not in after and after != before
    assert code == 0, after


# ---- /dev/shm
def bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def big(group, tokens: int = 4096, **options) -> HybridEPBuffer:
    group.segments = PosixSegments
    return HybridEPBuffer(group, 4096, tokens, 2, timeout_s=30, **options)


def test_dev_shm_is_enlarged_by_the_doctor_s_own_command():
    def work():
        ((status, text, remedy),) = machine.shared_memory()
        assert status == FAIL and "MiB free" in text
        bash(re.search(r"mount -o [^)]*", remedy)[0])
        return list(machine.shared_memory())

    ((status, _),) = with_small_shm(8, work)
    assert status == OK


def test_segments_of_killed_jobs_are_removed_by_the_doctor_s_own_command():
    def work():
        hours_ago = time.time() - 2 * 3600
        for name, seconds in {"hybrid_ep.a.0.0": hours_ago, "hybrid_ep.b.0.1": time.time(), "else": hours_ago}.items():
            path = Path(machine.SHM) / name
            path.write_bytes(bytes(1 << 20))
            os.utime(path, (seconds, seconds))
        _, (status, text, remedy) = machine.shared_memory()
        assert status == WARN and "1 MiB of it are held by 1 segments" in text
        bash(remedy)
        return sorted(os.listdir(machine.SHM)), len(list(machine.shared_memory()))

    assert with_small_shm(80, work) == (["else", "hybrid_ep.b.0.1"], 1)


def test_dev_shm_is_enlarged_by_the_command_of_the_error():
    def work():
        errors = VirtualWorld(1, 2).run(lambda _, group: big(group), return_errors=True)
        said = next(str(e) for e in errors if isinstance(e, MemoryError))
        bash(re.search(r"mount -o [^,]*,?[^,)]*(?=, docker)", said)[0])
        VirtualWorld(1, 2).run(lambda _, group: big(group).destroy())
        return {type(e) for e in errors}

    assert with_small_shm(8, work) <= {MemoryError, BootstrapError}


LESS = {
    "max_num_of_tokens_per_rank": {"tokens": 64},
    "capacity_factor": {"capacity_factor": 0.25},
    "HYBRID_EP_ARENA_MIB=0": {},
}


@pytest.mark.parametrize("name", LESS)
def test_each_thing_that_may_be_lowered_makes_a_buffer_fit(monkeypatch, name):
    """Alone, in a /dev/shm into which the buffer does not fit by just that thing."""

    def size(options, arena):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYBRID_EP_ARENA_MIB", arena)
            world = VirtualWorld(1, 2)
            return world.run(lambda _, group: _total(HybridEPBuffer(group, 4096, 4096, 2, timeout_s=30, **options)))[0]

    options = dict(LESS[name])
    arena = "64" if "ARENA" in name else "0"
    whole = size({}, arena)

    def work():
        monkeypatch.setenv("HYBRID_EP_ARENA_MIB", arena)
        errors = VirtualWorld(1, 2).run(lambda _, group: big(group), return_errors=True)
        assert any(isinstance(e, MemoryError) and name in str(e) for e in errors), errors
        # What is kept of the errors keeps no memory.
        monkeypatch.setenv("HYBRID_EP_ARENA_MIB", "0")
        VirtualWorld(1, 2).run(lambda _, group: big(group, **options).destroy())

    with_small_shm(int(1.9 * whole) >> 20, work)


def _total(buffer) -> int:
    with buffer:
        return buffer.memory_report().total_bytes


# ---- variables and files
@pytest.mark.parametrize("name", sorted(env.TABLE))
def test_a_variable_that_is_unset_is_right_again(monkeypatch, name):
    monkeypatch.setenv(name, "\x01 nonsense")
    found = [f for f in software.environment() if f[0] == FAIL]
    if not found:
        pytest.skip(f"{name} may have any value")
    ((_, _, remedy),) = found
    unset = re.match(r"unset \w+", remedy)[0]
    left = bash(f"{unset}; env")
    monkeypatch.setattr(os, "environ", dict(line.split("=", 1) for line in left.splitlines() if "=" in line))
    assert [f[0] for f in software.environment()] == [OK]


TUNE = """tune --ranks 2 --ranks-per-node 1 --tokens 32 --hidden 64 --experts 4 --topk 2 --dtype bf16 --num-sms 2
    --chunk 4,16 -n 1 -w 1 -T 200 -o""".split()
DAMAGED = {"no such file": None, "no JSON": "{", "another schema": '{"schema": 1}', "an entry": "an entry"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune") / "t.json"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.delenv("RANK", raising=False)
        assert main([*TUNE, str(out)]) == 0
    return out


@pytest.mark.parametrize("damage", [*DAMAGED, "another shape"])
def test_hybrid_ep_tune_writes_a_tuning_file_again(tuned, tmp_path, damage):
    path, hidden = tmp_path / "t.json", 128 if damage == "another shape" else 64
    content = tuned.read_text()
    if damage == "an entry":
        content = json.dumps({**json.loads(content), "entries": [{"device": 1}]})
    elif damage in DAMAGED:
        content = DAMAGED[damage]
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="hybrid-ep tune"):
        VirtualWorld(2, 1).buffers(hidden, 32, 2, timeout_s=20, tuning=str(path))
    shutil.copy(tuned, path)  # what the command wrote, for this device and this shape
    VirtualWorld(2, 1).buffers(64, 32, 2, timeout_s=20, tuning=str(path))


# ---- launch
def launch(capsys, *words) -> tuple[int, str]:
    code = main(["launch", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_apex_is_left_out_and_data_are_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    monkeypatch.chdir(tmp_path)
    job = ["qwen3_30b_a3b", "--slurm", "--dry-run"]
    code, mock = launch(capsys, *job)
    assert code == 0 and "DATA: MOCK" in mock and "--mock-data" in mock
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_bytes(b"")
    said = re.search(r"^DATA: MOCK.*(\n  .*)*", mock, re.MULTILINE)[0]  # over as many lines as it takes
    given = re.findall(r"--set \w+=", said)
    assert given == ["--set data_path=", "--set tokenizer=", "--set train_steps="]
    values = (str(tmp_path / "text"), "some/tokenizer", "7")
    words = [word for flag, value in zip(given, values, strict=True) for word in (flag + value).split(" ")]
    code, real = launch(capsys, *job, *words)
    assert code == 0 and "DATA: MOCK" not in real and "--mock-data" not in real and f"data: {values[0]}" in real
    (without,) = [part.remedy for part in software.PARTS if part.name == "apex"]
    code, said = launch(capsys, *job, *re.search(r"--set apex=no", without)[0].split())
    assert code == 0 and "--no-gradient-accumulation-fusion" in said


# ---- errors of calls
def test_a_failed_buffer_is_replaced_on_all_ranks():
    world = VirtualWorld(1, 2)
    old = world.buffers(H, 8, 2, timeout_s=0.5)
    error = world.run(lambda rank, _: round_trip(old[0]) if rank == 0 else None, return_errors=True)[0]
    assert error is not None
    with pytest.raises(BufferFailedError, match="make a new"):
        round_trip(old[0])
    new = world.buffers(H, 8, 2, timeout_s=50)
    world.run(lambda rank, _: round_trip(new[rank]))


def test_a_budget_of_rows_is_raised_or_none_or_dropped():
    buffer = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0]
    call = {"hidden": X, "topk_idx": IDX, "num_of_experts": E}
    with pytest.raises(CapacityError, match="num_permuted_tokens=2"):
        buffer.dispatch_with_permute(num_permuted_tokens=2, **call)
    for more in ({"num_permuted_tokens": 64}, {"num_permuted_tokens": None}):
        rows, *_, handle = buffer.dispatch_with_permute(**more, **call)
        assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0][:, 0], CHOICES)
    rows, *_ = buffer.dispatch_with_permute(num_permuted_tokens=2, non_blocking=True, **call)
    assert len(rows) == 2


def test_a_capacity_is_raised_or_rows_are_dropped():
    def work(rank, group, **options):
        buffer = make(group, **options)
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=X, topk_idx=torch.zeros(4, 1, dtype=torch.int64), num_of_experts=E
        )
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0][:, 0].sum().item(), len(rows)

    def run(**options):
        return VirtualWorld(1, 2).run(lambda r, g: work(r, g, **options), return_errors=True)

    small = {"capacity_factor": 0.5}
    assert all(isinstance(e, CapacityError) and "overflow='drop'" in str(e) for e in run(**small))
    assert run(capacity_factor=2) == [(4.0, 8), (4.0, 0)]
    dropped = run(overflow="drop", **small)
    assert 0 < sum(came for came, _ in dropped) < 8


def test_every_thread_has_a_buffer_of_its_own():
    """Where one buffer of two threads refuses (test_buffer_features), two buffers of one group do not."""
    world = VirtualWorld(1, 2)
    pairs = [world.buffers(H, 8, 2, timeout_s=50) for _ in range(2)]
    world.run(lambda rank, _: [round_trip(buffers[rank]) for buffers in pairs])


def test_a_module_s_state_is_saved_without_its_buffer(tmp_path):
    with make(VirtualWorld(1, 1).groups[0]) as buffer:
        layer = torch.nn.Sequential(torch.nn.Linear(H, E))
        layer.buffer = buffer
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            torch.save(layer, tmp_path / "whole")
        torch.save(layer.state_dict(), tmp_path / "state")
        assert set(torch.load(tmp_path / "state")) == {"0.weight", "0.bias"}


def test_a_routing_is_saved_in_place_of_a_handle():
    with make(VirtualWorld(1, 1).groups[0]) as buffer:
        call = {"hidden": X, "topk_idx": IDX, "num_of_experts": E}
        rows, *_, handle = buffer.dispatch_with_permute(**call)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(handle)
        again, *_ = buffer.dispatch_with_permute(**(call | {"topk_idx": pickle.loads(pickle.dumps(IDX))}))
        assert torch.equal(rows, again)
