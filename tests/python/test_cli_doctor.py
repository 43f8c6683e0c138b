"""`hybrid-ep doctor`: fine here, and each thing that is wrong has its line, its remedy and the exit code."""

from __future__ import annotations

import json
import shutil
import types

import pytest

from hybrid_ep.cli import main
from hybrid_ep.cli.doctor import command, machine, selftest, software
from hybrid_ep.cli.doctor.finding import FAIL, OK, WARN


@pytest.fixture(scope="module")
def findings():
    return command.examine()


def test_this_machine_is_fit(findings):
    assert {f.check for f in findings} == set(command.CHECKS)
    assert [f for f in findings if f.status == FAIL and f.check != "shared memory"] == []
    assert all(f.remedy or f.status == OK for f in findings)
    text = "\n".join(map(str, findings))
    assert "every sum exact" in text and "loop, bfloat16" in text and "torch, bfloat16" in text


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
    assert "FAIL odd" in out and "OSError: no such device" in out and "OK   python" in out


def test_json_has_the_same_findings(monkeypatch, capsys):
    monkeypatch.setattr(command, "CHECKS", {"python": software.python, "environment": software.environment})
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "soon")
    assert main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["counts"][FAIL] == 1
    wrong = [f for f in said["findings"] if f["status"] == FAIL]
    assert "HYBRID_EP_TIMEOUT_S='soon'" in wrong[0]["text"] and "unset HYBRID_EP_TIMEOUT_S" in wrong[0]["remedy"]


@pytest.mark.parametrize("free, status", [(1 << 20, FAIL), (512 << 20, WARN), (8 << 30, OK)])
def test_little_shared_memory(monkeypatch, capsys, free, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    code, found = one(monkeypatch, "shared memory", machine.shared_memory)
    assert [f.status for f in found] == [status] and code == (1 if status == FAIL else 0)
    assert ("--shm-size" in found[0].remedy) == (status != OK)


@pytest.mark.parametrize("version, python, status", [
    (None, 12, WARN), ("0.15.3", 12, WARN), ("0.19.2", 12, OK), ("0.19.2", 11, WARN), ("0.16.1", 11, OK),
    ("0.20.0rc1", 12, WARN)])
def test_megatron_versions(monkeypatch, capsys, version, python, status):
    monkeypatch.setattr(software, "_version", lambda _: version)
    monkeypatch.setattr(software, "sys", types.SimpleNamespace(version_info=(3, python, 0)))
    assert [f.status for f in one(monkeypatch, "megatron", software.megatron)[1]] == [status]


def test_wrong_sums_and_a_gemm_that_no_backend_does_are_failures(monkeypatch, capsys):
    import torch

    from hybrid_ep.moe import probing

    monkeypatch.setattr(probing, "examine",
                        lambda b, *_: probing.Probe(b.name, "cpu", "bf16", "unusable", "bad", False))
    assert one(monkeypatch, "grouped gemm", selftest.grouped_gemm)[0] == 1
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    code, found = one(monkeypatch, "loopback", selftest.loopback)
    assert code == 1 and "wrong sums on ranks [0, 1, 2, 3]" in found[0].text
