"""YAML that users write: the safe loader, with numbers and booleans as YAML 1.2 and everybody reads them.

PyYAML follows YAML 1.1, where `3e-4` without a point is a string, and `off` and `no`, which are values of recipes, are
booleans."""

from __future__ import annotations

import re
from typing import Any

from hybrid_ep.balance.plan_file import said_of_yaml

_BOOL = "tag:yaml.org,2002:bool"
_TRUTH = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def load(text: str, what: str) -> Any:
    """The value of a YAML text; ValueError that begins with `what` where it is none."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Of this call: resolvers belong to a class."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != _BOOL]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_BOOL, _TRUTH, list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{what}: not valid YAML ({said_of_yaml(error, text)})") from error


def as_type(value: Any, wanted: type) -> Any:
    """The value as a field of this type has it: 1 for a float, yes and off for a bool, true for one that takes yes."""
    if wanted is str and type(value) is bool:
        return "yes" if value else "no"
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is bool and isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    return value
