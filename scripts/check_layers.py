"""The house rules that a machine can check: who may include or import whom, where assembly and the
environment may appear, how large files and functions may be, what the top level holds, what tensors name.

Prints one line a violation, `file:line: rule: what is wrong`, and exits with 1 if there is any.
    python scripts/check_layers.py [--root FOLDER] [--graph FILE.svg]      --graph: draw who imports whom, too

The tables below are the rules; the functions only apply them. See docs/design.md on the layers."""

import argparse
import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import cpp_functions
import import_graph
import private_names

# What a folder of csrc may include: other layers, and single headers where only a contract may be seen.
# A layer is the longest name here that prefixes a file's path; every layer may include itself. A pattern's
# last part may be *. The concrete machines (arch/*, transport/*) never see one another: they meet in
# kernels/instances.
CONTRACTS = ("arch/concept.h", "transport/concept.h")
ERRORS = "arch/host/errors.h"  # what a launch throws; bindings turn it into Python's exceptions
LAYERS = {
    "common": (),
    "layout": ("common",),
    "arch": ("common", "layout"),
    "arch/*": ("common", "layout", "arch/concept.h"),
    # The simulator is made of the host's stacks, barrier words and error types.
    "arch/sim": (
        "common",
        "layout",
        "arch/concept.h",
        "arch/host/fiber.h",
        "arch/host/mbarrier.h",
        "arch/host/rng.h",
        ERRORS,
    ),
    "transport": ("common", "layout", "arch/concept.h"),
    "transport/*": ("common", "layout", *CONTRACTS),
    "pipeline": ("common", "layout", *CONTRACTS),
    "roles": ("common", "layout", "pipeline", "roles/params.h", *CONTRACTS),  # params.h is data, no code
    "kernels": ("common", "layout", "pipeline", "roles", *CONTRACTS),
    "kernels/instances": (
        "common",
        "layout",
        "pipeline",
        "roles",
        "kernels",
        "arch",
        "arch/*",
        "transport",
        "transport/*",
    ),
    "runtime": (
        "common",
        "layout",
        "pipeline",
        "roles/params.h",
        "kernels",
        "kernels/instances",
        *CONTRACTS,
        # idle.h: how a host thread polls. nvshmem_host.h: a table of host functions.
        ERRORS,
        "arch/host/idle.h",
        "transport/nvshmem/nvshmem_host.h",
    ),
    # Worlds of simulated ranks: above everything that a rank is made of.
    "sim": ("common", "layout", "roles/params.h", "kernels/instances", "runtime", "balance", "arch/sim", ERRORS),
    "balance": ("common", "layout", "roles", "arch/concept.h"),  # planners: integers in, integers out
    "bindings": ("common", "layout", "kernels", "runtime", "sim", "balance", ERRORS),
}
# idle.h: one hint to the core that g++ has a builtin for on x86-64 only.
ASSEMBLY_ALLOWED = ("csrc/arch/sm*", "csrc/transport/*/device*", "csrc/arch/host/idle.h")
TORCH_HEADERS = ("torch/", "ATen/", "c10/", "caffe2/", "THC/")
PYBIND_LAYER = "csrc/bindings/"

# The rooms of hybrid_ep and which others each may import; the command line may import all, and nobody imports it. The
# modules of the top are the public interface, but for those that the runtime is built on.
ROOMS = {
    "hardware": (),
    "payload": (),
    "explorer": (),
    "balance": (),
    "moe": ("basics",),
    "basics": (),
    "perf": ("hardware", "explorer", "basics"),
    "runtime": ("hardware", "payload", "basics"),
    "weights": ("runtime", "basics"),
    "public": ("runtime", "payload", "basics"),
    "reference": ("runtime",),
    "compat": ("public", "runtime", "basics"),
}
BASICS = (
    "hybrid_ep.buffer_sizes",
    "hybrid_ep.config",
    "hybrid_ep.env",
    "hybrid_ep.errors",
    "hybrid_ep.recording",
    "hybrid_ep.tuning",
)
# hybrid_ep is below everything else in Python; recipes/ is installed under another name, hence `from . import` there.
NOT_IN = {"hybrid_ep": ("megatron", "megatron_patches", "recipes", "scripts", "tests"), "recipes": ("recipes",)}
# Imports that may close a cycle, (importing module, imported module): reason. import_graph.py says what counts as one.
CYCLES_ALLOWED: dict[tuple[str, str], str] = {}

# One module reads environment variables; the exceptions, and why each is one. Setting a variable for a
# library and handing the whole environment to a child are no reading. Tests may do as they like.
ENVIRONMENT_MODULE = "hybrid_ep/env.py"
ENVIRONMENT_EXCEPTIONS = {
    "scripts/build_core.py": "builds before the package exists; reads CXX, CXXFLAGS, LDFLAGS",
    "scripts/setup_env.py": "runs before the package exists",
    "scripts/python_asan.py": "hands its environment on with the sanitizer's settings added; reads CXX, PYTHONPATH",
    "scripts/run_tests.py": "sets and reads CUDA_HOME for the tools it starts",
    "scripts/build_cuda.py": "builds; reads CUDA_HOME, CXX, MAX_JOBS",
    "hybrid_ep/cli/doctor/pairs.py": "a rank learns from its launcher's variables who it is",
    "hybrid_ep/cli/doctor/machine.py": "CUDA_HOME is the toolkit's variable, not ours",
    "scripts/gpu_check.py": "hands its environment on with CUDA's settings added",
    "scripts/gpu_peer.py": "hands its environment on with a peer's folder and caches added",
    "scripts/cubin_check.py": "finds CUDA's tools; reads CUDA_HOME, PATH",
    "scripts/test_matrix.py": "hands HYBRID_EP_TORCH_INDEX on to setup_env",
    "hybrid_ep/cli/launch.py": "reads RANK and WORLD_SIZE, torch's names for what a launcher sets",
    "recipes/rank.py": "reads RANK, SLURM_PROCID, MASTER_ADDR and such, names that launchers set",
    "recipes/report.py": "reads TERM and WANDB_MODE, other tools' settings",
}

# Tensors that these packages make name their dtype and device.
MAKERS_OF_TENSORS = ("hybrid_ep/", "megatron_patches/", "recipes/")
TENSOR_MAKERS = {
    f"torch.{name}"
    for name in (
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "tensor",
        "arange",
        "scalar_tensor",
        "eye",
        "linspace",
        "rand",
        "randn",
        "randint",
        "randperm",
    )
}

MAX_COLUMNS = 120
# First match wins: (files, lines). ruff format gives each argument of a long call a line of its own.
MAX_FILE_LINES = (("csrc/roles/*", 150), ("*.h", 350), ("*.cuh", 350), ("*.cpp", 450), ("*.cu", 450), ("*.py", 500))
MAX_FUNCTION_LINES = {"C++": 80, "Python": 110}

TOP_LEVEL = {
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "CMakeLists.txt",
    "cmake",
    "Makefile",
    "pyproject.toml",
    ".ci",
    ".clang-format",
    ".git-blame-ignore-revs",
    ".gitignore",
    ".pre-commit-config.yaml",
    "hybrid_ep",
    "megatron_patches",
    "csrc",
    "recipes",
    "scripts",
    "tests",
    "docs",
}

CPP_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
TEXT_SUFFIXES = CPP_SUFFIXES | {"", ".py", ".pyi", ".md", ".toml", ".in", ".txt", ".sh", ".cmake", ".json", ".yaml"}
GENERATED = {
    ".git",
    ".venv",
    ".venvs",
    "build",
    "dist",
    "runs",
    "wandb",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
}
HOME_PATH = re.compile(r"(?<![\w.~}\])])/(?:home|root|Users|work)/\w")
VARIABLE = re.compile(r"\bHYBRID_EP_[A-Z0-9_]*[A-Z0-9]\b")


@dataclass(frozen=True, order=True)
class Violation:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


# ---- files


def project_files(root):
    """Paths, relative to the root, of the files git tracks or would track; of all files outside git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists():
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(name for name in names if name and (root / name).is_file())
    return sorted(
        str(p.relative_to(root))
        for p in root.rglob("*")
        if p.is_file() and not GENERATED & set(p.relative_to(root).parts)
    )


def check_top_level(files):
    for name in sorted({path.split("/")[0] for path in files} - TOP_LEVEL):
        yield Violation(name, 1, "top level", "not one of the agreed entries (TOP_LEVEL in check_layers.py)")


def check_text(path, lines):
    """Rules that hold for every text file: width, no paths of one machine."""
    is_code = Path(path).suffix in CPP_SUFFIXES | {".py"}
    for number, line in enumerate(lines, 1):
        if is_code and len(line) > MAX_COLUMNS:
            yield Violation(path, number, "width", f"{len(line)} columns, at most {MAX_COLUMNS}")
        if HOME_PATH.search(line):
            yield Violation(path, number, "machine path", f"a path of one machine: {line.strip()[:60]}")
    limit = next((limit for pattern, limit in MAX_FILE_LINES if fnmatch(path, pattern)), None)
    if limit and len(lines) > limit:
        yield Violation(path, len(lines), "file size", f"{len(lines)} lines, at most {limit}")


def check_variables(path, text, known):
    """Every HYBRID_EP_ variable that is named anywhere stands in the table of hybrid_ep/env.py."""
    for match in VARIABLE.finditer(text):
        if match.group() not in known:
            yield Violation(
                path,
                text.count("\n", 0, match.start()) + 1,
                "variables",
                f"{match.group()} is not in the table of {ENVIRONMENT_MODULE}",
            )


# ---- C++


def layer_of(inside):
    """The layer of a path inside csrc, e.g. arch/host/fiber.h -> arch/host; None outside every layer."""
    parts = inside.split("/")[:-1]
    for depth in range(len(parts), 0, -1):
        prefix = "/".join(parts[:depth])
        if any(fnmatch(prefix, name) and prefix.count("/") == name.count("/") for name in LAYERS):
            return prefix
    return None


def rule_of(layer):
    """What LAYERS lets a layer include, besides itself."""
    return LAYERS.get(layer) or LAYERS.get(layer.split("/")[0] + "/*", ())


def may_include(layer, target):
    """Whether a file of the layer may include csrc/<target>."""
    target_layer = layer_of(target)
    if target_layer is None:
        return False
    depth = target_layer.count("/")
    return target_layer == layer or any(
        target == allowed or (depth == allowed.count("/") and fnmatch(target_layer, allowed))
        for allowed in rule_of(layer)
    )


def check_includes(root, path, text):
    inside = path.removeprefix("csrc/")
    layer = layer_of(inside)
    if layer is None:
        yield Violation(path, 1, "layers", "lies in no layer of csrc (LAYERS in check_layers.py)")
        return
    for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', text, re.M):
        line, quoted, target = text.count("\n", 0, match.start()) + 1, match.group(1) == '"', match.group(2)
        if target.startswith(TORCH_HEADERS):
            yield Violation(path, line, "torch", f"csrc includes no torch header, here {target}")
        elif target.startswith("pybind11/"):
            if not path.startswith(PYBIND_LAYER):
                yield Violation(path, line, "layers", f"{target} belongs to {PYBIND_LAYER} alone")
        elif quoted and not (root / "csrc" / target).is_file():
            yield Violation(path, line, "includes", f'"{target}" is not a file of csrc (paths start there)')
        elif not quoted and (root / "csrc" / target).is_file():
            yield Violation(path, line, "includes", f'write "{target}", it is ours')
        elif quoted and not may_include(layer, target):
            yield Violation(path, line, "layers", f"{layer} may not include {target}")


def check_cpp_words(path, code):
    """Macros, assembly, the environment, in code of csrc without comments and literals."""
    for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", code, re.M):
        if not match.group(1).startswith("HEP_"):
            line = code.count("\n", 0, match.start()) + 1
            yield Violation(path, line, "macros", f"{match.group(1)} does not start with HEP_")
    for match in re.finditer(r"\b(asm|__asm__|__asm)\b(?=[\s\w]*[({])|\b(secure_)?getenv\b", code):
        line = code.count("\n", 0, match.start()) + 1
        if "getenv" in match.group():
            yield Violation(path, line, "environment", f"{ENVIRONMENT_MODULE} reads it; pass values")
        elif not any(fnmatch(path, pattern) for pattern in ASSEMBLY_ALLOWED):
            yield Violation(path, line, "assembly", f"only in {' and '.join(ASSEMBLY_ALLOWED)}")


def check_cpp(root, path, text):
    code = cpp_functions.blank_out(text)
    if path.startswith("csrc/"):
        yield from check_includes(root, path, text)
        yield from check_cpp_words(path, code)
    for line, length in cpp_functions.functions(code):
        if length > MAX_FUNCTION_LINES["C++"]:
            yield Violation(path, line, "function size", f"{length} lines, at most {MAX_FUNCTION_LINES['C++']}")


# ---- Python


def imported_modules(nodes):
    """(line, module) of every import, at any depth, those by name through importlib included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def check_imports(path, nodes):
    package = path.split("/")[0]
    for line, module in imported_modules(nodes):
        if module.split(".")[0] in NOT_IN.get(package, ()):
            yield Violation(path, line, "layers", f"{package} may not import {module} by its name")


def check_cycles(modules, found):
    """No module imports another that imports it, however far around. found: the edges between the modules."""
    closing = {(edge.source, edge.target) for group in import_graph.cycles(found) for edge in group}
    for pair in sorted(set(CYCLES_ALLOWED) - closing):
        yield Violation("scripts/check_layers.py", 1, "cycles", f"{pair} closes none any more; take it out")
    kept = [edge for edge in found if (edge.source, edge.target) not in CYCLES_ALLOWED]
    for edge in (edge for group in import_graph.cycles(kept) for edge in group):
        yield Violation(modules[edge.source], edge.line, "cycles", f"{edge.target} imports {edge.source} in its turn")


def room_of(module, path):
    """The room of a module of hybrid_ep."""
    if path.count("/") > 1:
        return path.split("/")[1]
    return "cli" if module == "hybrid_ep.__main__" else "basics" if module in BASICS else "public"


def check_rooms(modules, found):
    """ROOMS."""
    for edge in found:
        if not (edge.source.startswith("hybrid_ep.") and edge.target.startswith("hybrid_ep.")):
            continue
        source, target = room_of(edge.source, modules[edge.source]), room_of(edge.target, modules[edge.target])
        if source in ("cli", target) or target in ROOMS.get(source, ()):
            continue
        yield Violation(modules[edge.source], edge.line, "rooms", f"{source} may not import {target} ({edge.target})")


def uses_that_read_nothing(node):
    """Nodes right below `node` that, being os.environ, are set or handed on as a whole."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return [node.value]
    if isinstance(node, ast.Attribute) and node.attr in ("setdefault", "update", "clear", "copy"):
        return [node.value]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        return node.args
    if isinstance(node, ast.Dict):
        return [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
    return []


def check_environment(path, nodes):
    """Reads of a variable outside the one module."""
    if path == ENVIRONMENT_MODULE or path in ENVIRONMENT_EXCEPTIONS or path.startswith("tests/"):
        return
    allowed = {id(part) for node in nodes for part in uses_that_read_nothing(node)}
    for node in nodes:
        names = []
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os" and id(node) not in allowed:
            names = [f"os.{node.attr}"]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [f"os.{alias.name}" for alias in node.names]
        for name in {"os.environ", "os.environb", "os.getenv"} & set(names):
            yield Violation(path, node.lineno, "environment", f"{name}: only {ENVIRONMENT_MODULE} reads it")


def check_tensors(path, nodes):
    """torch.set_default_dtype or a torch.device context of the caller decides what a call leaves open; new_* and *_like
    take both from a tensor, as_tensor from an array."""
    for node in nodes if path.startswith(MAKERS_OF_TENSORS) else ():
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        literal = node.args and isinstance(node.args[0], (ast.Constant, ast.List, ast.Tuple, ast.ListComp))
        if called in TENSOR_MAKERS or called == "torch.as_tensor" and literal:
            for word in {"dtype", "device"} - given if None not in given else ():  # **options may hold them
                yield Violation(path, node.lineno, "tensors", f"{called} without {word}=; name it")


def check_python(path, text):
    try:
        nodes = import_graph.nodes_of(text)
    except SyntaxError as error:
        yield Violation(path, error.lineno or 1, "syntax", str(error.msg))
        return
    yield from check_imports(path, nodes)
    yield from check_environment(path, nodes)
    yield from check_tensors(path, nodes)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES["Python"]:
                yield Violation(
                    path,
                    node.lineno,
                    "function size",
                    f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES['Python']}",
                )


# ---- all of it


def check(root):
    """Every violation under the root, sorted."""
    root = Path(root).resolve()
    files = project_files(root)
    table = root / ENVIRONMENT_MODULE
    known = set(VARIABLE.findall(table.read_text()) if table.is_file() else ())
    modules = import_graph.modules_of(files)
    imports = import_graph.edges(modules, root)
    found = [
        *check_top_level(files),
        *check_cycles(modules, imports),
        *check_rooms(modules, imports),
        *(Violation(*at) for at in private_names.violations(modules, root, room_of)),
    ]
    for path in files:
        if Path(path).suffix not in TEXT_SUFFIXES:
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            found.append(Violation(path, 1, "encoding", "not UTF-8"))
            continue
        found += check_text(path, text.splitlines())
        if not path.startswith("tests/"):
            found += check_variables(path, text, known)
        if Path(path).suffix in CPP_SUFFIXES:
            found += check_cpp(root, path, text)
        elif Path(path).suffix == ".py":
            found += check_python(path, text)
    return sorted(found), len(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=Path(__file__).resolve().parent.parent, help="folder to check")
    parser.add_argument("--graph", type=Path, metavar="FILE.svg", help="write the import graph there")
    args = parser.parse_args()
    violations, num_files = check(args.root)
    if args.graph:
        modules = import_graph.modules_of(project_files(Path(args.root).resolve()))
        args.graph.write_text(import_graph.svg(modules, import_graph.edges(modules, args.root)))
    for violation in violations:
        print(violation)
    print(f"check_layers: {num_files} files, {len(violations)} violations")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
