"""`hybrid-ep doctor`: fine here, and each thing that is wrong has its line, its remedy and the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import types
from pathlib import Path

import pytest
import torch

from hybrid_ep.cli import EXIT_USAGE, main
from hybrid_ep.cli.doctor import command, finding, machine, selftest, software
from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from hybrid_ep.runtime import devices


@pytest.fixture(scope="module")
def findings():
    return command.examine()


def test_this_machine_is_fit(findings):
    assert {f.check for f in findings} == set(command.CHECKS)
    assert [f for f in findings if f.status == FAIL and f.check != "shared memory"] == []
    assert all(bool(f.remedy) == (f.status in (WARN, FAIL)) for f in findings)
    text = " ".join(f.text for f in findings)
    assert "executor host on cpu: every sum exact" in text
    assert "loop, bfloat16" in text and "torch, bfloat16" in text


def one(monkeypatch, name, check):
    """The exit code and the findings when `check` is all there is."""
    monkeypatch.setattr(command, "CHECKS", {name: check})
    return main(["doctor"]), command.examine()


def test_a_check_that_breaks_fails_alone_and_sets_the_exit_code(monkeypatch, capsys):
    def broken():
        raise OSError("no such device")
        yield

    monkeypatch.setattr(command, "CHECKS", {"odd": broken, "python": software.python})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    host = Finding("", OK, "").host
    assert f"FAIL {host}  odd" in out and "OSError: no such device" in out and f"OK   {host}  python" in out
    assert out.splitlines()[-1] == f"# {host}: 1 OK, 0 WARN, 1 FAIL, 0 SKIP"
    assert all(host in line for line in out.splitlines())  # in a job's log, whose line is it?


@pytest.mark.parametrize("flags", [["--json", "-"], ["--json"]])  # the second as it was before: with a warning
def test_json_has_the_same_findings(monkeypatch, capsys, flags):
    monkeypatch.setattr(command, "CHECKS", {"python": software.python, "environment": software.environment})
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "soon")
    assert main(["doctor", *flags]) == 1
    printed = capsys.readouterr()
    assert "FAIL" in printed.err and ("write --json -" in printed.err) == (flags == ["--json"])
    said = json.loads(printed.out)
    assert said["counts"][FAIL] == 1
    wrong = [f for f in said["findings"] if f["status"] == FAIL]
    assert "HYBRID_EP_TIMEOUT_S='soon'" in wrong[0]["text"] and "unset HYBRID_EP_TIMEOUT_S" in wrong[0]["remedy"]


def test_a_misspelt_variable_is_a_warning_with_the_name_that_was_meant(monkeypatch):
    for name in [name for name in os.environ if "HYBRID_EP_" in name]:
        monkeypatch.delenv(name)
    assert one(monkeypatch, "environment", software.environment)[1][0].status == OK
    monkeypatch.setenv("HYBRID_EP_TIMEOUT", "5")
    monkeypatch.setenv("HYBRID_EP_QUUX", "5")
    monkeypatch.setenv("HYBRID_EP_TEST_EXAMPLES", "2")  # the tests' own
    code, found = one(monkeypatch, "environment", software.environment)
    assert code == 0 and [f.status for f in found] == [WARN, WARN]
    assert "HYBRID_EP_QUUX is set" in found[0].text and "python -m hybrid_ep.env" in found[0].remedy
    assert "HYBRID_EP_TIMEOUT is set" in found[1].text and "write HYBRID_EP_TIMEOUT_S" in found[1].remedy
    monkeypatch.setenv("HYBRID_EP_SEED", "3")
    assert one(monkeypatch, "environment", software.environment)[1][-1].text == "HYBRID_EP_SEED=3"
    for name in ("HYBRID_EP_TIMEOUT", "HYBRID_EP_QUUX", "HYBRID_EP_SEED"):  # as the remedies say
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "5")
    found = one(monkeypatch, "environment", software.environment)[1]
    assert [(f.status, f.text) for f in found] == [(OK, "HYBRID_EP_TIMEOUT_S=5.0")]


@pytest.mark.parametrize("flag", ["--timeout", "--mib"])
def test_what_only_pairs_have_is_refused_without_them(flag, capsys):
    assert main(["doctor", flag, "-1"]) == EXIT_USAGE
    assert f"{flag} -1 without --multi" in capsys.readouterr().err


@pytest.mark.parametrize("free, status", [(1 << 20, FAIL), (512 << 20, WARN), (8 << 30, OK)])
def test_little_shared_memory(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(machine, "SHM", str(tmp_path))  # what killed jobs left in this machine's is no part of this
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    code, found = one(monkeypatch, "shared memory", machine.shared_memory)
    assert [f.status for f in found] == [status] and code == (1 if status == FAIL else 0)
    assert ("--shm-size" in found[0].remedy) == (status != OK)


@pytest.mark.parametrize(
    "version, python, status",
    [
        (None, 12, WARN),
        ("0.15.3", 12, WARN),
        ("0.19.2", 12, OK),
        ("0.19.2", 11, WARN),
        ("0.16.1", 11, OK),
        ("0.20.0rc1", 12, WARN),
    ],
)
def test_megatron_versions(monkeypatch, capsys, version, python, status):
    monkeypatch.setattr(software, "_version", lambda _: version)
    monkeypatch.setattr(software, "sys", types.SimpleNamespace(version_info=(3, python, 0)))
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    (found,) = one(monkeypatch, "megatron", software.megatron)[1]
    assert found.status == status and ("tested together" in found.text) == (status == OK)
    assert version is None or (software.NOT_TESTED in found.text) == (status == WARN)


def test_megatron_with_a_torch_that_it_was_not_tested_with(monkeypatch, capsys):
    monkeypatch.setattr(software, "_version", lambda _: "0.19.2")
    monkeypatch.setattr(software, "sys", types.SimpleNamespace(version_info=(3, 12, 0)))
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+nv26.1")
    (found,) = one(monkeypatch, "megatron", software.megatron)[1]
    assert found.status == OK and "not tested with this release (tested: torch 2.15)" in found.text


@pytest.mark.parametrize(
    "version, status, tested",
    [
        ("2.8.1", FAIL, None),
        ("2.9.0+cu128", OK, False),
        ("2.12.0", OK, False),
        ("2.15.0", OK, True),
        ("2.16.0.dev1", WARN, False),
    ],
)
def test_torch_versions(monkeypatch, capsys, version, status, tested):
    monkeypatch.setattr(torch, "__version__", version)
    (found,) = one(monkeypatch, "torch", software.torch)[1]
    assert found.status == status
    assert tested is None or (software.NOT_TESTED in found.text) != tested


@pytest.mark.parametrize("gpu", [False, True])
def test_what_was_never_tested_is_called_so(monkeypatch, capsys, gpu):
    """A warning where there is a GPU to use it, a note where there is none."""
    there = {"transformer-engine": "2.9.0", "triton": "3.9.0", "nvidia-nvshmem-cu12": "3.3.20"}
    monkeypatch.setattr(software, "_version", there.get)
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: name if name == "apex" else None)
    monkeypatch.setattr(software, "nccl_version", lambda: "2.30.7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = {f.text.partition(":")[0]: f for f in one(monkeypatch, "optional", software.optional)[1]}
    assert found["Triton 3.9.0"].status == OK and software.NOT_TESTED not in found["Triton 3.9.0"].text
    for name in ("Transformer Engine 2.9.0", "apex of unknown version", "NVSHMEM 3.3.20", "NCCL 2.30.7"):
        assert software.NOT_TESTED in found[name].text
        assert found[name].status == (WARN if gpu else OK) and bool(found[name].remedy) == gpu
    assert "(tested: 3.4, 3.7 and 3.8)" in found["NVSHMEM 3.3.20"].text


def test_what_is_missing_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(software, "_version", lambda _: None)
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    (found,) = one(monkeypatch, "optional", software.optional)[1]
    assert found.status == SKIP and found.text == "not installed: Transformer Engine, apex, Triton, NVSHMEM, NCCL"
    first, rest = command.examine(require_gpu=True)  # the GPU recipes run Megatron's layers with Transformer Engine
    assert first.status == FAIL and first.text.startswith("Transformer Engine") and "pip install" in first.remedy
    assert rest.text == "not installed: apex, Triton, NVSHMEM, NCCL"


def test_nccl_is_shown_where_torch_has_it():
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    version = software.nccl_version()
    assert [int(part) for part in version.split(".")[:3]] == list(torch.cuda.nccl.version()[:3])
    assert any(f"NCCL {version}" in text for _, text, *_ in software.optional())


def gpu_checks(monkeypatch):
    monkeypatch.setattr(command, "CHECKS", {name: command.CHECKS[name] for name in ("gpu", "cuda library")})


@pytest.mark.parametrize("torch_has_cuda, words", [(True, "CUDA_VISIBLE_DEVICES"), (False, "a build without CUDA")])
def test_no_gpu_is_a_failure_where_one_is_required(monkeypatch, capsys, torch_has_cuda, words):
    gpu_checks(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2" if torch_has_cuda else None)
    monkeypatch.setattr(devices, "load", lambda: {"devices": [], "why_none": "no driver"})
    assert main(["doctor"]) == 0
    assert re.search(r"WARN \S+  gpu            torch sees no GPU", capsys.readouterr().out)
    assert main(["doctor", "--require-gpu"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAIL \S+  gpu            torch sees no GPU", said) and words in said
    assert said.splitlines()[-1].endswith("1 OK, 0 WARN, 1 FAIL, 0 SKIP")


@pytest.mark.parametrize("gpu, plain", [(False, SKIP), (True, WARN)])
def test_a_cuda_library_that_is_not_there(monkeypatch, capsys, tmp_path, gpu, plain):
    monkeypatch.setattr(command, "CHECKS", {"cuda library": machine.cuda_library})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(devices, "LIBRARY", tmp_path / "libhybrid_ep_cuda.so")
    devices.load.cache_clear()
    (found,) = command.examine()
    assert found.status == plain and "libhybrid_ep_cuda.so is not there" in found.text
    (found,) = command.examine(require_gpu=True)
    assert found.status == FAIL and "scripts/build_cuda.py" in found.remedy
    assert main(["doctor"]) == 0 and main(["doctor", "--require-gpu"]) == 1


def test_a_gpu_without_kernels_of_ours(monkeypatch, capsys):
    monkeypatch.setattr(command, "CHECKS", {"gpu": machine.gpu})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(name="A100", total_memory=80 << 30)
    )
    assert [f.status for f in command.examine()] == [WARN]
    assert [f.status for f in command.examine(require_gpu=True)] == [FAIL]


def test_a_required_gpu_and_pairs_are_two_calls(capsys):
    assert main(["doctor", "--require-gpu", "--multi"]) == 2
    assert "--require-gpu with --multi" in capsys.readouterr().err


def test_the_gpu_s_loopback_runs_where_a_gpu_can_be_used_and_else_says_why_not(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(selftest.gpu_loopback()) == [(SKIP, "torch sees no GPU")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def none():
        raise ValueError("executor='cuda' cannot be used here: no library")

    monkeypatch.setattr(devices, "current", none)
    ((status, text, remedy),) = selftest.gpu_loopback()
    assert status == WARN and text.startswith("skipped: executor='cuda' cannot") and "cuda library" in remedy
    monkeypatch.setattr(devices, "current", lambda: torch.device("cuda", 0))
    asked = []
    monkeypatch.setattr(selftest, "exchange", lambda *a: asked.append(a) or iter([(OK, "fine")]))
    assert list(selftest.gpu_loopback()) == [(OK, "fine")]
    assert asked == [(1, 1, torch.device("cuda", 0), "cuda")]


def test_the_exchange_of_the_gpu_s_loopback_is_right_on_the_host(monkeypatch, capsys):
    """All but the device: a single rank. And the environment's executor and tuning file are not the loopback's."""
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", "cuda")
    monkeypatch.setenv("HYBRID_EP_TUNING", "/nowhere/t.json")
    ((status, text),) = selftest.exchange(1, 1, torch.device("cpu"), "host")
    assert status == OK and "by one rank" in text and "every sum exact" in text
    assert [status for status, *_ in selftest.loopback()] == [OK]


def test_a_backend_without_a_bug_has_no_remedy():
    said = [text for _, text, *_ in selftest.grouped_gemm()]
    assert not any("remedy none" in text for text in said)
    assert any("loop, bfloat16 on" in text for text in said) and any(
        "loop, bfloat16 in fp8 on" in text for text in said
    )


def test_wrong_sums_and_a_gemm_that_no_backend_does_are_failures(monkeypatch, capsys):
    from hybrid_ep.moe import probing

    monkeypatch.setattr(
        probing, "examine", lambda b, *_: probing.Probe(b.name, "cpu", "bf16", "unusable", "bad", False)
    )
    assert one(monkeypatch, "grouped gemm", selftest.grouped_gemm)[0] == 1
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    code, found = one(monkeypatch, "loopback", selftest.loopback)
    assert code == 1 and "wrong sums on ranks [0, 1, 2, 3]" in found[0].text


def test_the_remedy_of_a_missing_library_is_a_command_that_exists_here(monkeypatch, tmp_path):
    """In a checkout the script is there; of an installed wheel the remedy says so and names the folder to build for."""
    assert Path(finding.build_remedy().split()[1]).is_file()
    assert finding.rebuild_remedy() == "rebuild: python scripts/build_core.py"
    monkeypatch.setattr(finding, "__file__", str(tmp_path / "hybrid_ep" / "cli" / "doctor" / "finding.py"))
    said = finding.build_remedy("--nvshmem")
    assert "installed package" in said and f"--nvshmem --out {tmp_path / 'hybrid_ep'}" in said
    assert finding.rebuild_remedy().endswith("pip install --force-reinstall --no-deps hybrid_ep")
