"""The set-up on a disk that is too small: it says so before it makes anything, and only where it would install."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import setup_env
import test_matrix

FULL = (
    r"needs 9 GB of disk for torch and its CUDA libraries, {folder} has 5\.0 GB; free some, or set "
    r"HYBRID_EP_TORCH_INDEX to an index of CPU wheels"
)


@pytest.fixture
def steps(monkeypatch):
    """The steps that a set-up takes on a machine with 5 GB left, none of which does anything."""
    taken = []
    monkeypatch.setattr(setup_env, "locked", contextlib.nullcontext)
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: SimpleNamespace(free=5.0e9))
    monkeypatch.setattr(setup_env, "choose_python", lambda wanted: taken.append("choose"))

    def create(env, probed, wanted):
        taken.append("create")
        ready(env.folder, dependencies="")

    monkeypatch.setattr(setup_env.Environment, "create", create)
    monkeypatch.setattr(setup_env.Environment, "has_core", lambda env: True)
    for name in ("install", "install_package", "build_core"):
        monkeypatch.setattr(setup_env.Environment, name, lambda *args, name=name: taken.append(name))
    monkeypatch.setattr(setup_env.Environment, "requirements", lambda env, extras: ["torch"])
    monkeypatch.setattr(setup_env, "run", lambda command, what, timeout_s=0: taken.append("run"))
    return taken


def ready(folder: Path, **changes) -> Path:
    """A folder that passes for an environment that was made a while ago."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    stamp = {
        "folder": str(folder),
        "version": ".".join(map(str, sys.version_info[:2])),
        "core": setup_env.core_hash(),
        "dependencies": setup_env.dependency_hash(setup_env.DEFAULT_EXTRAS, ""),
        "build_requirements": list(setup_env.BUILD_REQUIREMENTS),
        **changes,
    }
    (folder / setup_env.STAMP_NAME).write_text(json.dumps(stamp))
    return folder


def test_what_an_environment_needs_stands_in_pyproject(tmp_path):
    env = setup_env.Environment(tmp_path)
    env.python = Path(sys.executable)
    named = env.requirements("train,balance")
    assert any(r.startswith("torch>=") for r in named)
    assert any(r.startswith("rich") for r in named) and any(r.startswith("safetensors") for r in named)
    assert not any(r.startswith("sphinx") for r in named)


@pytest.mark.parametrize("was_there", [False, True])
def test_a_full_disk_is_reported_before_anything_is_made(tmp_path, steps, was_there):
    folder = tmp_path / "deep" / "venv"
    if was_there:  # other dependencies now, and another core
        ready(folder, dependencies="old", core="old")
    with pytest.raises(setup_env.SetupError, match=FULL.format(folder=folder)):
        setup_env.ensure(folder)
    assert steps == []
    assert folder.exists() == was_there


def test_an_environment_that_is_ready_needs_no_disk(tmp_path, steps):
    setup_env.ensure(ready(tmp_path / "venv"))
    assert steps == []


def test_a_changed_core_alone_needs_no_disk(tmp_path, steps):
    setup_env.ensure(ready(tmp_path / "venv", core="old"))
    assert steps == ["build_core", "build_core"]  # the first looks at the compiler


def test_the_core_is_built_while_its_dependencies_are_installed(tmp_path, steps, monkeypatch):
    installing = threading.Event()
    monkeypatch.setattr(setup_env.Environment, "install", lambda *args: installing.set())

    def build_core(env, *options):
        steps.append(options[0] if options else installing.wait(20))

    monkeypatch.setattr(setup_env.Environment, "build_core", build_core)
    env = setup_env.ensure(ready(tmp_path / "venv", core="old", dependencies="old"), torch_index="https://example.org")
    assert steps == ["--configure", True, "install_package"]
    assert env.stamp["core"] == setup_env.core_hash()


def test_a_core_that_does_not_compile_is_what_a_set_up_names(tmp_path, steps, monkeypatch):
    def install(env, *packages):
        raise setup_env.SetupError("does not install")

    def build_core(env, *options):
        if not options:
            raise setup_env.SetupError("does not compile")

    monkeypatch.setattr(setup_env.Environment, "install", install)
    monkeypatch.setattr(setup_env.Environment, "build_core", build_core)
    folder = ready(tmp_path / "venv", core="old", dependencies="old")
    with pytest.raises(setup_env.SetupError, match="does not compile"):
        setup_env.ensure(folder, torch_index="https://example.org")
    assert "old" in json.loads((folder / setup_env.STAMP_NAME).read_text())["core"]


def test_cpu_wheels_fit(tmp_path, steps):
    setup_env.ensure(tmp_path / "venv", torch_index="https://example.org/cpu")
    assert steps[:2] == ["choose", "create"] and steps.count("install") == 3


def test_the_second_environment_of_make_test_says_the_same(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(test_matrix, "ROOT", tmp_path)
    monkeypatch.setattr(test_matrix, "choose_python", lambda version, wanted: "3.11")
    monkeypatch.delenv("HYBRID_EP_TORCH_INDEX", raising=False)
    monkeypatch.setattr(sys, "argv", ["test_matrix", "--versions", "0.16", "--prepare"])
    with pytest.raises(SystemExit, match="test_matrix: " + FULL.format(folder=tmp_path / ".venvs" / "py3.11")):
        test_matrix.main()
    assert steps == []
