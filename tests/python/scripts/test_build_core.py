"""build_core.py: what a build for a second Python takes from that for the first."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import build_core

PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(two LANGUAGES CXX)
add_library(hep_engine STATIC engine.cpp)
add_library(_core STATIC binding.cpp)
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch, capfd):
    """Builds a project of two files in the folder of a Python, and says which of them were compiled."""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "engine.cpp").write_text('#include "engine.h"\nint engine() { return ANSWER; }\n')
    (tmp_path / "engine.h").write_text("#define ANSWER 42\n")
    (tmp_path / "binding.cpp").write_text("int binding() { return 1; }\n")
    monkeypatch.setattr(build_core, "ROOT", tmp_path)
    for name in ("CXXFLAGS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)

    def build(python, variant=""):
        folder = tmp_path / "build" / (f"tests/cpp-{variant}" if variant else f"core-{python}")
        monkeypatch.setattr(build_core, "folder_of", lambda variant="": folder)
        build_core.build(variant=variant, compile_it=False)
        capfd.readouterr()
        build_core.build(variant=variant)
        assert (folder / "libhep_engine.a").is_file() and (folder / "lib_core.a").is_file()
        return sorted(re.findall(r"(\w+)\.cpp\.o", capfd.readouterr().out))

    return build


def test_a_second_python_compiles_the_bindings_alone(compiled):
    assert compiled("cp313") == ["binding", "engine"]
    assert compiled("cp311") == ["binding"] and compiled("cp311") == []
    assert compiled("cp313", "thread") == ["binding", "engine"]


def test_what_has_changed_since_is_compiled(compiled, tmp_path, monkeypatch):
    compiled("cp313")
    (tmp_path / "engine.h").write_text("#define ANSWER 43\n")
    assert compiled("cp312") == ["binding", "engine"]
    monkeypatch.setenv("CXXFLAGS", "-DOTHER")
    assert compiled("cp311") == ["binding", "engine"]
