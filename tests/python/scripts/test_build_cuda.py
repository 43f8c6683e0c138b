"""build_cuda.py with an nvcc that only notes what it is asked: which libraries are made, for which GPUs, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import build_cuda

NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release VERSION, V0" && exit
echo "$*" >> LOG
while [ $# -gt 0 ]; do
  [ "$1" = -rdc=true ] && [ -e BROKEN ] && echo "nvshmem.h: no good" >&2 && exit 1
  [ "$1" = -o ] && touch "$2"
  [ "$1" = -MF ] && echo "x.o: README.md" > "$2"
  shift
done
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An nvcc of CUDA 13, a Python with nothing of NVIDIA's, and a build folder of its own."""
    log, home = tmp_path / "log", tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (tmp_path / "out").mkdir()

    class Machine:
        version = "13.0"

        def build(self, *options: str) -> list[str]:
            """The commands that nvcc was given."""
            nvcc = home / "bin" / "nvcc"
            text = NVCC.replace("VERSION", self.version).replace("LOG", str(log))
            nvcc.write_text(text.replace("BROKEN", str(tmp_path / "broken")))
            nvcc.chmod(0o755)
            log.write_text("")
            monkeypatch.setattr(sys, "argv", ["build_cuda", "--out", str(tmp_path / "out"), *options])
            build_cuda.main()
            return log.read_text().splitlines()

        def install(self, cuda: int = 13) -> Path:
            (tmp_path / "packages" / f"nvidia_nvshmem_cu{cuda}-3.4.5.dist-info").mkdir(parents=True, exist_ok=True)
            nvshmem = tmp_path / "packages" / "nvidia" / "nvshmem"
            (nvshmem / "include").mkdir(parents=True, exist_ok=True)
            (nvshmem / "include" / "nvshmem.h").touch()
            return nvshmem

    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build_cuda, "BUILD", tmp_path / "build")
    monkeypatch.setattr(build_cuda.sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    return Machine()


def over_nvshmem(commands: list[str]) -> list[str]:
    return [command for command in commands if "-rdc=true" in command or "-lnvshmem_device" in command]


def libraries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.so")}


def test_objects_alone_are_what_a_later_build_links(machine, tmp_path):
    assert machine.build("--no-nvshmem", "--compile-only") and not libraries(tmp_path)
    (linking,) = machine.build("--no-nvshmem")
    assert "-shared" in linking and libraries(tmp_path) == {"out/libhybrid_ep_cuda.so"}


def test_nvshmem_is_built_for_all_gpus_where_its_package_is(machine, tmp_path, capsys):
    assert not over_nvshmem(machine.build())
    assert "no libhybrid_ep_nvshmem.so: this Python has no nvidia-nvshmem-cu13" in capsys.readouterr().out
    home = machine.install()
    commands = machine.build()
    assert f"NVSHMEM: {home}" in capsys.readouterr().out
    assert len(over_nvshmem(commands)) == len(build_cuda.nvshmem_sources()) + 1
    assert all(
        f"code={arch}" in command
        for command in commands
        for arch in build_cuda.ARCHITECTURES
        if "-c " in command or "-lnvshmem_device" in command
    )
    assert libraries(tmp_path) == {"out/libhybrid_ep_cuda.so", "out/libhybrid_ep_nvshmem.so"}
    assert not over_nvshmem(machine.build("--no-nvshmem"))


def test_another_cudas_nvshmem_is_left_alone(machine, capsys):
    machine.install(cuda=12)
    assert not over_nvshmem(machine.build())
    assert "this Python has no nvidia-nvshmem-cu13" in capsys.readouterr().out


def test_a_library_that_does_not_compile_keeps_no_other_from_its_users(machine, tmp_path):
    machine.install()
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match="libhybrid_ep_nvshmem.so does not compile:(.|\n)*nvshmem.h: no good"):
        machine.build()
    assert libraries(tmp_path) == {"out/libhybrid_ep_cuda.so"}


def test_nvshmem_for_one_gpu_never_takes_the_place_of_a_whole_library(machine, tmp_path):
    machine.install()
    machine.build()
    whole = tmp_path / "out" / build_cuda.NVSHMEM_LIBRARY
    whole.write_text("whole")
    commands = over_nvshmem(machine.build("--nvshmem", "sm_90a"))
    assert len(commands) == len(build_cuda.nvshmem_sources()) + 1
    assert all("code=sm_90a" in command and "sm_100" not in command for command in commands)
    assert whole.read_text() == "whole"
    assert libraries(tmp_path / "build") == {"sm_90a/libhybrid_ep_nvshmem.so"}
    # Nor does it make the next build of the whole one compile again.
    assert all(" -c " not in command for command in machine.build())


def test_blackwell_code_runs_on_b300(machine):
    """Code for sm_100a would be refused by 10.3."""
    compiled = [command for command in machine.build() if " -c " in command]
    assert compiled and all("code=sm_100" in command and "sm_100a" not in command for command in compiled)


def test_kernels_of_all_libraries_are_compiled_before_the_rest(machine):
    machine.install()
    compiled = [command for command in machine.build("--nvshmem", "sm_90a") if " -c " in command]
    assert len(compiled) == len(build_cuda.all_sources())
    kernels = ["kernels/instances" in command for command in compiled]
    assert kernels == sorted(kernels, reverse=True) and sum(kernels) == 4  # of ranks that meet, two rails, NVSHMEM


def test_nvshmem_that_is_asked_for_must_be_there(machine):
    machine.version = "12.8"
    with pytest.raises(SystemExit, match="no NVSHMEM among this Python's packages; pip install nvidia-nvshmem-cu12"):
        machine.build("--nvshmem")


def test_nvshmem_may_lie_elsewhere(machine, tmp_path):
    with pytest.raises(SystemExit, match=f"no NVSHMEM in {tmp_path}; pip install nvidia-nvshmem-cu13"):
        machine.build("--nvshmem-home", str(tmp_path))
    machine.install()
    (tmp_path / "packages").rename(tmp_path / "elsewhere")
    home = tmp_path / "elsewhere" / "nvidia" / "nvshmem"
    assert any(f"-isystem {home / 'include'}" in command for command in machine.build("--nvshmem-home", str(home)))
