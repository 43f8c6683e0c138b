"""One setting: its name for `apply(...)`, its flag and its help, kept in the dataclass field that holds its value."""

from __future__ import annotations

import dataclasses
from typing import Any

SWITCH: dict[str, Any] = {"action": "store_const", "const": True}  # argparse of a flag without a value


@dataclasses.dataclass(frozen=True)
class Option:
    """How a setting is called: by Python as a keyword of `apply`, on the command line by a flag.

    flag: None where only Python can give it. argparse: what `add_argument` takes besides. modes: those of --hybrid-ep-
    balance that read the flag, None for a flag that does not depend on them.
    """

    name: str
    flag: str | None
    argparse: dict[str, Any]
    modes: tuple[str, ...] | None = None

    @property
    def attribute(self) -> str:
        """The flag's name in a parsed namespace."""
        return (self.flag or "").lstrip("-").replace("-", "_")


def option(
    name: str, default: Any, help: str, *, flag: str = "", modes: tuple[str, ...] | None = None, **argparse: Any
) -> Any:
    """A dataclass field that carries its `Option`. The flag is made of the name where none is given.

    Every flag is absent (None) by default, so that a value which nothing would read can be refused."""
    flag = flag or "--hybrid-ep-" + name.replace("_", "-")
    made = Option(name, flag, {"default": None, "help": help, **argparse}, modes)
    return dataclasses.field(default=default, metadata={"option": made})
