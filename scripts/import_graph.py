"""The imports between this project's Python modules: who imports whom, cycles, and a picture of it.

An import counts wherever it stands: inside a function it hides a cycle from Python, not from the reader, who still
cannot understand either module without the other. What only a type checker sees (`if TYPE_CHECKING:`) does not count,
nor does that a submodule runs its package's __init__ first. check_layers.py applies the rule and draws the picture.
"""

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path

PACKAGES = ("hybrid_ep", "megatron_patches", "recipes")
PUBLIC = "hybrid_ep"  # hybrid_ep/__init__.py, which loads what it exports when it is asked for: left out of the picture
FOLDERS = (*PACKAGES, "scripts")  # modules of scripts/ import one another by bare names


@dataclass(frozen=True, order=True)
class Edge:
    """`source` imports `target` in this line; both are module names."""

    source: str
    target: str
    line: int


def module_of(path):
    """The name by which a Python file is imported: hybrid_ep/cli/__init__.py -> hybrid_ep.cli, scripts/x.py -> x."""
    parts = Path(path).with_suffix("").parts
    parts = parts[1:] if parts[0] == "scripts" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(files):
    """{module name: path} of the project's own modules among these paths."""
    return {module_of(path): path for path in files if path.endswith(".py") and path.split("/")[0] in FOLDERS}


@functools.cache
def nodes_of(source):
    """All nodes of a Python source, the module first. Found once: to walk the trees is most of what the checks take."""
    return tuple(ast.walk(ast.parse(source)))


def imports_of(nodes, package):
    """(line, module, name or None) of every import that runs in a module of a package: `import a.b`, `from a.b import
    name`, `from .b import name`."""
    hidden = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def _is_type_checking(test):
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def edges(modules, root):
    """Every Edge between the modules, sorted; one a pair."""
    found = {}
    for name, path in modules.items():
        try:
            nodes = nodes_of((Path(root) / path).read_text(encoding="utf-8"))
        except SyntaxError:
            continue  # check_layers says so
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        for line, module, member in imports_of(nodes, package):
            inner = f"{module}.{member}"
            target = inner if member and inner in modules else module
            if target in modules and target != name:
                found.setdefault((name, target), Edge(name, target, line))
    return sorted(found.values())


def components(graph):
    """Sets of nodes that reach one another in {node: targets}, those of one node too, targets before sources
    (Tarjan)."""
    index, low, stack, on_stack, done = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in on_stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = set()
            while node not in component:
                component.add(stack.pop())
            on_stack.difference_update(component)
            done.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return done


def cycles(found):
    """The edges that lie on a cycle, grouped by component: [[Edge, ...], ...]."""
    graph = defaultdict(set)
    for edge in found:
        graph[edge.source].add(edge.target)
    groups = []
    for component in components(graph):
        if len(component) > 1:
            groups.append([e for e in found if e.source in component and e.target in component])
    return groups


# ---- the picture

ROW, BOX, GAP, MARGIN = 92, 24, 12, 28
DARK = {
    "white": "#131416",
    "#1f2328": "#e6e8eb",
    "#8a94a0": "#6b7480",
    "#5b6670": "#8a94a0",
    "#dce9f7": "#173452",
    "#e6f0dd": "#243a17",
    "#f7e6d5": "#4a2d10",
    "#f4dde2": "#4a1c28",
}  # on a page that is dark
COLOURS = {"module": "#dce9f7", "package": "#e6f0dd", "megatron_patches": "#f7e6d5", "recipes": "#f4dde2"}


def node_of(module):
    """What stands for a module in the picture: itself at the top of hybrid_ep, else its package."""
    parts = module.split(".")
    if parts[0] != "hybrid_ep":
        return parts[0]
    if len(parts) == 1:
        return PUBLIC
    return f"hybrid_ep.{parts[1]}"


def svg(modules, found):
    """The picture: who stands lower is imported by those above. An import that another path implies is not drawn."""
    inside = {name for name in modules if name.split(".")[0] in PACKAGES}
    sizes = defaultdict(int)
    for name in inside:
        sizes[node_of(name)] += 1
    graph = {node: set() for node in sizes if node != PUBLIC}
    for edge in found:
        source, target = node_of(edge.source), node_of(edge.target)
        if {edge.source, edge.target} <= inside and source != target and PUBLIC not in (source, target):
            graph[source].add(target)
    levels, group = _levels(graph)
    shown = _reduced(graph, group)
    return _drawn(*_placed(levels, shown, sizes), shown, sizes)


def _levels(graph):
    """({node: rows above the lowest}, {node: its component}); nodes of a cycle share a row."""
    level, group = {}, {}
    for component in components(graph):
        below = {t for node in component for t in graph[node]} - component
        here = 1 + max((level[t] for t in below), default=-1)
        for node in component:
            level[node], group[node] = here, frozenset(component)
    return level, group


def _reduced(graph, group):
    """[(source, target)] without those that a longer path implies."""
    reach = {}

    def reached(node):
        if node not in reach:
            reach[node] = set()
            for target in graph[node]:
                reach[node] |= {target} | (reached(target) if group[target] != group[node] else set())
        return reach[node]

    pairs = []
    for source in sorted(graph):
        for target in sorted(graph[source]):
            others = graph[source] - {target}
            if not any(target in reached(o) and group[o] not in (group[source], group[target]) for o in others):
                pairs.append((source, target))
    return pairs


def _label(node, sizes):
    name = node.removeprefix("hybrid_ep.")
    return f"{name}/ ({sizes[node]})" if sizes[node] > 1 else name


def _placed(levels, shown, sizes):
    """({node: (x, y, width)}, (width, height)): rows from the lowest up, each ordered by what its nodes touch."""
    rows = defaultdict(list)
    for node, level in sorted(levels.items()):
        rows[level].append(node)
    width = {node: 16 + 6.7 * len(_label(node, sizes)) for node in levels}
    near = defaultdict(list)
    for source, target in shown:
        near[source].append(target)
        near[target].append(source)
    whole = 2 * MARGIN + max(sum(width[n] + GAP for n in row) + GAP for row in rows.values())
    centre = {node: whole * (i + 1) / (len(row) + 1) for row in rows.values() for i, node in enumerate(row)}
    for _ in range(24):  # nodes move towards the middle of their neighbours; rows are spread again
        for row in rows.values():
            wish = {n: sum(centre[m] for m in near[n]) / len(near[n]) if near[n] else centre[n] for n in row}
            row.sort(key=lambda n: (wish[n], n))
            room = whole - 2 * MARGIN - sum(width[n] for n in row)
            step, x = max(room / (len(row) + 1), GAP), MARGIN
            for node in row:
                x += step
                centre[node] = x + width[node] / 2
                x += width[node]
    height = MARGIN * 2 + ROW * (len(rows) - 1) + BOX
    places = {node: (centre[node], height - MARGIN - BOX / 2 - ROW * levels[node], width[node]) for node in levels}
    return places, (round(whole), height)


def _dark_rules():
    return " ".join(
        f'[{what}="{light}"] {{{what}: {dark}}}' for light, dark in DARK.items() for what in ("fill", "stroke")
    )


def _drawn(places, size, shown, sizes):
    width, height = size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        "<title>Who imports whom: lower modules are imported by higher ones</title>",
        f"<style>@media (prefers-color-scheme: dark) {{{_dark_rules()}}}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for source, target in shown:
        (x1, y1, _), (x2, y2, _) = places[source], places[target]
        y1, y2 = y1 + BOX / 2, y2 - BOX / 2
        bend = max(18.0, (y2 - y1) / 2)
        lines.append(
            f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} '
            f'{x2:.0f},{y2:.0f}" fill="none" stroke="#8a94a0" stroke-width="0.8" opacity="0.75"/>'
        )
    for node, (x, y, width) in sorted(places.items()):
        colour = COLOURS.get(node) or COLOURS["package" if sizes[node] > 1 else "module"]
        lines.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - BOX / 2:.0f}" width="{width:.0f}" height="{BOX}" rx="4" '
            f'fill="{colour}" stroke="#5b6670" stroke-width="0.8"/>'
        )
        lines.append(
            f'<text x="{x:.0f}" y="{y + 4:.0f}" fill="#1f2328" text-anchor="middle">'
            f"{escape(_label(node, sizes))}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])
