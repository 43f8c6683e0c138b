"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

OK, WARN, FAIL = "OK", "WARN", "FAIL"

Found = Iterator[tuple[Any, ...]]  # what a check yields: (status, text) or (status, text, remedy)


@dataclasses.dataclass(frozen=True)
class Finding:
    """check: its name; status: OK, WARN or FAIL; text: what was found; remedy: what to do, empty when OK."""

    check: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5}{self.check:<15}{self.text}" + (f"\n{'':20}-> {self.remedy}" if self.remedy else "")
