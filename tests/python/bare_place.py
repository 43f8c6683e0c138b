"""A Python that lacks packages of this one, without a network: to do there what a message tells its reader to do.

The environment sees this one's packages by links, all but the hidden; what pip is asked for comes from a folder of
wheels, which are made of the installed files of the hidden."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import hybrid_ep

ROOT = Path(__file__).resolve().parents[2]
EXTRA = re.compile(r"^(\w+) = (\[.*?\])$", re.M | re.S)


def extras() -> dict[str, str]:
    """{extra: its lines of pyproject.toml}."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return dict(EXTRA.findall(text))


def wheel_of(name: str, folder: Path) -> Path:
    """The installed distribution `name` as a wheel in folder."""
    dist = metadata.distribution(name)
    where = next(file.parent for file in dist.files or () if file.name == "WHEEL")
    tag = re.search(r"^Tag: (\S+)", dist.read_text("WHEEL") or "", re.M)
    made = folder / f"{where.name.removesuffix('.dist-info')}-{tag[1] if tag else 'py3-none-any'}.whl"
    lines = []
    with zipfile.ZipFile(made, "w") as archive:
        for file in dist.files or ():
            if file.parts[0] == ".." or "__pycache__" in file.parts or file.name in ("RECORD", "INSTALLER"):
                continue
            content = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(content)}\n")
            archive.writestr(str(file), content)
        archive.writestr(f"{where}/RECORD", "".join(lines) + f"{where}/RECORD,,\n")
    return made


def installed_here(names: Sequence[str]) -> bool:
    try:
        return all(metadata.distribution(name).files for name in (*names, "pip"))
    except metadata.PackageNotFoundError:
        return False


class BarePlace:
    """An environment in `folder` where the distributions `hidden` are missing; the checkout is installed there, with
    the extras of today's pyproject.toml."""

    def __init__(self, folder: Path, hidden: Sequence[str]) -> None:
        self.folder, self.wheels = folder, folder / "wheels"
        self.wheels.mkdir()
        venv.create(folder / "env", symlinks=True)
        self.bin = folder / "env" / "bin"
        site = next((folder / "env" / "lib").glob("python*")) / "site-packages"
        gone = {"hybrid_ep", "hybrid_ep_recipes", "megatron_patches", "__pycache__"}
        for name in hidden:
            wheel_of(name, self.wheels)
            gone |= {file.parts[0] for file in metadata.distribution(name).files or ()}
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name not in gone and entry.suffix != ".pth" and not entry.name.startswith("hybrid_ep-"):
                (site / entry.name).symlink_to(entry)
        (site / "checkout.pth").write_text(f"{ROOT}\n")
        info = site / f"hybrid_ep-{hybrid_ep.__version__}.dist-info"
        info.mkdir()
        wanted = [
            f"Provides-Extra: {extra}\n"
            + "".join(
                f"Requires-Dist: {need} {'and' if ';' in need else ';'} extra == '{extra}'\n"
                for need in re.findall(r'"([^"]+)"', lines)
            )
            for extra, lines in extras().items()
        ]
        head = f"Metadata-Version: 2.1\nName: hybrid_ep\nVersion: {hybrid_ep.__version__}\n"
        (info / "METADATA").write_text(head + "".join(wanted))
        (info / "RECORD").write_text("")
        (info / "entry_points.txt").write_text("[hybrid_ep.commands]\nlaunch = recipes.launch_command\n")
        self._program("hybrid-ep", "from hybrid_ep.cli import main")
        self._program("pip", "from pip._internal.cli.main import main")

    def _program(self, name: str, line: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{self.bin / 'python'}\nimport sys\n{line}\nsys.exit(main())\n")
        path.chmod(0o755)

    def run(self, command: str, terminal: bool = False) -> tuple[int, str]:
        """(exit code, what it printed) of a line for bash. terminal: stderr is one."""
        mine = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_COMPILE": "0",  # of what is installed little is imported
            "MPLCONFIGDIR": str(self.folder / "matplotlib"),
        }
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PIP_USER")}
        line = ["bash", "-c", command]
        if terminal:
            line = [sys.executable, "-c", f"import pty, sys; sys.exit(pty.spawn({line!r}) >> 8)"]
        done = subprocess.run(
            line, cwd=self.folder, env={**kept, **mine}, text=True, capture_output=True, timeout=200, check=False
        )
        return done.returncode, done.stdout + done.stderr
