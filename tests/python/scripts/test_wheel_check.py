"""What would be released, as far as it is known without compiling: the files of the source archive and of a wheel, and
the page that an index shows. scripts/wheel_check.py builds and tries the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import wheel_check  # noqa: E402  (a script)

CORE = "hybrid_ep/_core.cpython-313-x86_64-linux-gnu.so"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(files of the source archive, files of a wheel but for the core, metadata)."""
    folder = tmp_path_factory.mktemp("made")
    make = f"from scikit_build_core.build import build_sdist as s, build_wheel as w; f = {str(folder)!r}; s(f)"
    make += "; w(f, {'wheel.cmake': 'false'})"
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(archive) as tar:
        of_sdist = {member.name.partition("/")[2] for member in tar if member.isfile()}
    with zipfile.ZipFile(wheel) as opened:
        of_wheel = set(opened.namelist())
        (page,) = (name for name in of_wheel if name.endswith(".dist-info/METADATA"))
        return of_sdist, of_wheel, opened.read(page).decode()


@pytest.fixture(scope="module")
def wanted():
    return wheel_check.of_git()


def test_archive_and_wheel_hold_what_they_must_and_no_more(made, wanted):
    of_sdist, of_wheel, _ = made
    assert list(wheel_check.complaints_of_sdist(of_sdist, wanted)) == []
    assert list(wheel_check.complaints_of_wheel({*of_wheel, CORE}, wanted)) == []
    tops = {name.split("/")[0] for name in of_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(wheel_check.PACKAGES)


def test_the_page_of_an_index_has_the_words_of_the_readme_and_no_link_into_the_checkout(made):
    _, _, metadata = made
    assert list(wheel_check.complaints_of_readme(metadata)) == []
    assert "Description-Content-Type: text/markdown" in metadata and "## In your own code" in metadata
    assert "![" not in metadata and "<!--" not in metadata
    (complaint,) = wheel_check.complaints_of_readme("[here](https://example.org) and ![there](docs/a.svg)")
    assert "docs/a.svg" in complaint


@pytest.mark.parametrize(
    "name",
    [
        "csrc/bindings/module.cpp",
        "scripts/build_cuda.py",
        "LICENSE",
        "hybrid_ep/perf/data/published_bandwidth.csv",
        "tests/cpp/CMakeLists.txt",
    ],
)
def test_what_an_archive_lacks_is_named(made, wanted, name):
    assert list(wheel_check.complaints_of_sdist(made[0] - {name}, wanted)) == [f"source archive: no {name}"]


def test_what_else_is_in_an_archive_is_named(made, wanted):
    (complaint,) = wheel_check.complaints_of_sdist({*made[0], "runs/secret.json"}, wanted)
    assert "runs/secret.json" in complaint


@pytest.mark.parametrize(
    "name",
    [
        "hybrid_ep/_core.pyi",
        "hybrid_ep_recipes/tiny_cpu.py",
        "megatron_patches/cpu.py",
        "hybrid_ep/perf/data/published_end_to_end.csv",
    ],
)
def test_what_a_wheel_lacks_is_named(made, wanted, name):
    assert list(wheel_check.complaints_of_wheel(made[1] - {name}, wanted)) == [f"wheel: no {name}"]


@pytest.mark.parametrize("name", ["recipes/__init__.py", "tests/__init__.py", "hybrid_ep/libhybrid_ep_cuda.so"])
def test_what_a_wheel_would_leave_beside_its_packages_is_named(made, wanted, name):
    assert list(wheel_check.complaints_of_wheel({*made[1], name}, wanted)) == [f"wheel: {name} has no business in it"]


def test_a_core_that_names_the_folder_it_was_built_in_is_named():
    assert list(wheel_check.complaints_of_core(b"csrc/roles/n2n.h", Path("/build/here"))) == []
    (complaint,) = wheel_check.complaints_of_core(b"/build/here/csrc/roles/n2n.h", Path("/build/here"))
    assert "/build/here" in complaint


def test_who_cites_it_cites_this_version(made):
    (version,) = re.findall(r"^Version: (.*)$", made[2], re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_remedy_that_needs_a_checkout_is_named(tmp_path):
    there, gone = tmp_path / "a.py", tmp_path / "b.py"
    there.touch()
    text = f"-> python {there} --out x\n-> python {gone}, or make cuda"
    assert [c.split(": ")[1].split()[0] for c in wheel_check.complaints_of_doctor(text)] == ["`make", str(gone)]
