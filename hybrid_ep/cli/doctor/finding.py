"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_ep.cli.outputs import narrowed

OK, WARN, FAIL = "OK", "WARN", "FAIL"
SKIP = "SKIP"  # there is nothing here to look at, which is right on this machine
STATES = (OK, WARN, FAIL, SKIP)

Found = Iterator[tuple[Any, ...]]  # what a check yields: (status, text) or (status, text, remedy)


@dataclasses.dataclass(frozen=True)
class Finding:
    """check: its name; status: one of STATES; text: what was found; remedy: what to do, empty when OK or SKIP; host:
    who says it, for in the log of a job the lines of many doctors are mixed."""

    check: str
    status: str
    text: str
    remedy: str = ""
    host: str = dataclasses.field(default_factory=lambda: socket.gethostname().partition(".")[0])

    def __str__(self) -> str:
        further = f"{'':5}{self.host}  {'':15}"
        line = narrowed(f"{self.status:<5}{self.host}  {self.check:<15}{self.text}", further)
        return line + (f"\n{further}-> {self.remedy}" if self.remedy else "")  # a remedy may be a command: whole


def rebuild_remedy() -> str:
    """How this core is made anew: in a source tree by its compiler, else by another wheel."""
    if (Path(__file__).resolve().parents[3] / "CMakeLists.txt").is_file():
        return "rebuild: python scripts/build_core.py"
    return "install it anew: pip install --force-reinstall --no-deps hybrid_ep"


def build_remedy(*flags: str) -> str:
    """How the CUDA library is built, from here: a source tree has the script, an installed wheel has not."""
    script = Path(__file__).resolve().parents[3] / "scripts" / "build_cuda.py"
    if script.is_file():
        return " ".join([f"python {script}", *flags]) + (" (make cuda does it and fetches nvcc)" if not flags else "")
    return (
        f"this is an installed package: in a checkout of its sources run python scripts/build_cuda.py "
        f"{' '.join([*flags, '--out', str(Path(__file__).resolve().parents[2])])}"
    )
