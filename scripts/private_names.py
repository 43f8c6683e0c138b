"""Uses of private attributes across rooms: `buffer._session` outside the room of the class that has it. A name with one
underscore is its module's to change without asking; modules of its room are near enough. check_layers.py reports them.
"""

import ast
from collections import defaultdict

# Names that are public where they come from, and where that is.
PUBLIC = {
    **dict.fromkeys(("_replace", "_asdict", "_fields", "_make"), "typing.NamedTuple"),
    "_comm_manager": "Megatron-LM's dispatchers, which megatron_patches stands in for",
}


def _is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _owned(nodes):
    """Private names that a module defines: functions, classes, variables, attributes that it sets."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and _is_self(node.value.func):
            yield node.attr


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def uses(sources, rooms):
    """(module, line, attribute, rooms that define it) of every use. sources: text by module; rooms: room by module."""
    nodes = {}
    for module, text in sources.items():
        try:
            nodes[module] = list(ast.walk(ast.parse(text)))
        except SyntaxError:
            continue  # check_layers says so
    owners = defaultdict(set)
    for module in nodes:
        for name in filter(_is_private, _owned(nodes[module])):
            owners[name].add(rooms[module])
    for module in nodes:
        for node in nodes[module]:
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_self(node.value):
                elsewhere = owners[node.attr]
                if elsewhere and rooms[module] not in elsewhere:
                    yield module, node.lineno, node.attr, sorted(elsewhere)


def violations(modules, root, room_of):
    """(path, line, rule, text) of each. Scripts and tests may look inside."""
    rooms = {
        name: room_of(name, path) if path.startswith("hybrid_ep/") else path.split("/")[0]
        for name, path in modules.items()
        if not path.startswith("scripts/")
    }
    sources = {name: (root / modules[name]).read_text(encoding="utf-8", errors="replace") for name in rooms}
    for name, line, attribute, owners in uses(sources, rooms):
        yield modules[name], line, "private", f"{attribute} is {' and '.join(owners)}'s; use what is public"
