"""YAML as users write it: numbers and booleans of YAML 1.2, and the types of recipes' fields."""

import pytest

from recipes import CLUSTER_RECIPES, get_recipe, safe_yaml
from recipes.launch_command import parse_changes


def test_changes_are_read_with_the_safe_loader():
    read = parse_changes(["a.b=1", "c=x y", "d=", "lr=3e-4", "e=1E+2", "f=1e5x", "g=-.5e3"])
    assert read == {"a.b": 1, "c": "x y", "d": "", "lr": 3e-4, "e": 100.0, "f": "1e5x", "g": -500.0}
    with pytest.raises(ValueError, match="KEY|not valid YAML"):
        parse_changes(["a=!!python/object/apply:os.getcwd []"])
    read = parse_changes(["a=off", "b=no", "c=yes", "d=true", "e=False", "f=on", "g=~", "h=y"])
    assert read == {"a": "off", "b": "no", "c": "yes", "d": True, "e": False, "f": "on", "g": "", "h": "y"}
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    off = parse_changes(["balance=off", "fp8_params=no", "overlap=no", "expandable_segments=off"])
    made = run.derive(**off)
    assert (made.balance, made.fp8_params, made.overlap, made.expandable_segments) == ("off", "no", False, False)
    assert run.derive(**parse_changes(["overlap=yes"])).overlap is True
    small = get_recipe("tiny_cpu").derive(parallel=parse_changes(["balance=off", "grouped_gemm=on"]))
    assert (small.parallel.balance, small.parallel.grouped_gemm) == ("off", True)
    with pytest.raises(ValueError, match="overlap='maybe': must be of type bool"):
        run.derive(**parse_changes(["overlap=maybe"]))
    assert safe_yaml.load("x: [1e-3, 2]", "file") == {"x": [1e-3, 2]}
