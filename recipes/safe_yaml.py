"""YAML that users write: the safe loader, and numbers with an exponent as YAML 1.2 and everybody reads them.

PyYAML follows YAML 1.1, where `3e-4` without a point is a string."""

from __future__ import annotations

import re
from typing import Any

_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def load(text: str, what: str) -> Any:
    """The value of a YAML text; ValueError that begins with `what` where it is none."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Of this call: resolvers belong to a class."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{what}: not valid YAML ({said}{_place(error)})") from error


def _place(error: Exception) -> str:
    """Where in the text, for people: of a marked error, else nothing."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
