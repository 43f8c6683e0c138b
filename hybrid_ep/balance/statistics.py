"""Expert load statistics on disk: one object, four formats that people have.

    recipe      metrics.jsonl of a run of this project's recipes: {"step", "expert_load": [layer][expert]}; lines
                without loads (evaluations) are passed over; the first layer is 1, as in the run's pictures
    own         JSONL, a line per iteration and layer: {"iteration": 100, "layer": 3, "counts": [E integers]}; a line
                {"sources"} is passed over, see sources.py
    megatron    JSONL of --moe-routing-trace-path: {"step", "layer", "rank", "top_indices"}, counted and summed
                over ranks
    tensorrt    a folder with meta_info.json and rank*.safetensors, keys "{iteration}_{layer}" -> counts [E],
                summed over ranks, as TensorRT-LLM writes under EXPERT_STATISTIC_PATH

`load` recognises the format. A run that ended before its range leaves one file a rank; those are summed too.
Counts are (token, expert) pairs over the whole expert-parallel group, or over all groups of a job that has several.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from hybrid_ep.balance import inputs

MOST_EXPERTS = 1 << 20  # of a trace that does not say how many there are
_MOST_TOKENS = 1 << 48  # of an expert in one record: sums over ranks stay exact
_MOST_IN_ALL = 1 << 62
SOURCES_FILE = "sources.json"  # in a folder: whose tokens it counts, see sources.py


@dataclass(frozen=True)
class LoadStatistics:
    """counts int64 [I, L, E] with the numbers of the I iterations and L layers, ascending."""

    counts: np.ndarray
    iterations: tuple[int, ...]
    layers: tuple[int, ...]

    def between(self, first: int | None, last: int | None) -> LoadStatistics:
        """Iterations first to last, both included; None leaves that end open. ValueError when none is left."""
        keep = [
            i for i, n in enumerate(self.iterations) if (first is None or n >= first) and (last is None or n <= last)
        ]
        if not keep:
            raise ValueError(
                f"iterations {first} to {last}: the statistics hold {self.iterations[0]} to {self.iterations[-1]}"
            )
        return LoadStatistics(self.counts[keep], tuple(self.iterations[i] for i in keep), self.layers)

    def total(self) -> np.ndarray:
        """int64 [L, E]: summed over iterations."""
        return self.counts.sum(axis=0)


def parse_range(text: str) -> tuple[int, int]:
    """ "100-200" -> (100, 200), both included; "100" -> (100, 100). ValueError for anything else."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise ValueError(f"iteration range {text!r}: give FIRST-LAST, for example 100-200")
    return int(first), int(last if dash else first)


def from_records(records: Iterable[tuple[int, int, np.ndarray]], source: str = "records") -> LoadStatistics:
    """(iteration, layer, counts [E]) in any order; those of one iteration and layer are summed.

    ValueError: no records, counts that are no whole numbers or too large, of different lengths or of no expert, an
    iteration or a layer that is no integer, a layer that lacks an iteration.
    """
    table: dict[tuple[int, int], np.ndarray] = {}
    for iteration, layer, counts in records:
        key = inputs.integer(f"{source}: iteration", iteration, 0), inputs.integer(f"{source}: layer", layer, 0)
        counts = whole_counts(np.asarray(counts), f"{source}: counts of iteration {key[0]}, layer {key[1]}")
        if table and len(counts) != len(next(iter(table.values()))):
            raise ValueError(
                f"{source}: iteration {key[0]}, layer {key[1]} has {len(counts)} experts, others "
                f"{len(next(iter(table.values())))}"
            )
        table[key] = table[key] + counts if key in table else counts
    if not table:
        raise ValueError(f"{source}: holds no expert counts")
    iterations, layers = sorted({k[0] for k in table}), sorted({k[1] for k in table})
    missing = [(i, n) for i in iterations for n in layers if (i, n) not in table]
    if missing:
        raise ValueError(
            f"{source}: iteration {missing[0][0]} lacks layer {missing[0][1]} ({len(missing)} gaps): "
            "the file is cut short, or layers wrote different ranges"
        )
    counts = np.stack([np.stack([table[i, n] for n in layers]) for i in iterations])
    if counts.sum(dtype=np.float64) > _MOST_IN_ALL:
        raise ValueError(f"{source}: counts add up to {counts.sum(dtype=np.float64):.3g}; give at most {_MOST_IN_ALL}")
    return LoadStatistics(counts, tuple(iterations), tuple(layers))


def whole_counts(counts: np.ndarray, name: str) -> np.ndarray:
    """int64 [E]. ValueError that begins with the name."""
    whole = counts.ndim == 1 and counts.dtype.kind in "iuf" and bool(np.isfinite(counts).all())
    if not whole or (counts < 0).any() or (counts > _MOST_TOKENS).any() or (counts % 1 != 0).any():
        raise ValueError(f"{name} are not a list of whole numbers from 0 to {_MOST_TOKENS}: give tokens of each expert")
    if not len(counts):
        raise ValueError(f"{name} are of no expert: give tokens of each")
    return counts.astype(np.int64)


def traced_counts(top_indices: np.ndarray, num_experts: int | None) -> np.ndarray:
    """int64: how often each expert is named, up to the last of them. ValueError."""
    chosen = top_indices.ravel()
    if not chosen.size:
        return np.zeros(0, np.int64)
    if chosen.dtype.kind not in "iu":
        raise ValueError(f"top_indices are {chosen.dtype}; give integers, the experts of each token, -1 for none")
    if (last := int(chosen.max())) >= (num_experts or MOST_EXPERTS):
        said = f"num_experts is {num_experts}" if num_experts else f"there are at most {MOST_EXPERTS}"
        raise ValueError(f"names expert {last}, but {said}: give experts from 0 on, or mend that line")
    return np.bincount(chosen[chosen >= 0].astype(np.int64))


def load(path: str | Path, num_experts: int | None = None) -> LoadStatistics:
    """Read any of these formats. num_experts: needed for a Megatron trace whose last experts got no token."""
    path = Path(path)
    if not path.exists() and parts_folder(path).is_dir():
        path = parts_folder(path)
    if path.is_dir():
        return _load_parts(path) if any(path.glob("rank*of*.jsonl")) else _load_tensorrt(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    return from_records(_jsonl_records(path, num_experts), str(path))


def _jsonl_records(path: Path, num_experts: int | None) -> Iterator[tuple[int, int, np.ndarray]]:
    traced = []  # Megatron: the number of experts is known after the last line
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: is no text; give JSONL of counts, a run's metrics.jsonl or a routing trace"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = None  # of a line of a trace
        try:
            record = json.loads(line)
            if "sources" in record:
                continue
            if "step" in record and "top_indices" not in record:
                for layer, counts in enumerate(record.get("expert_load", ()), 1):
                    yield record["step"], layer, np.asarray(counts)
            elif "top_indices" in record:
                place, chosen = (record["step"], record["layer"]), np.asarray(record["top_indices"])
            else:
                yield record["iteration"], record["layer"], np.asarray(record["counts"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: neither counts nor a routing trace ({type(error).__name__}: {error})"
            ) from None
        if place is not None:
            try:
                traced.append((*place, traced_counts(chosen, num_experts)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    size = max([num_experts or 0, *(len(c) for _, _, c in traced)])
    if traced and not size:
        raise ValueError(f"{path}: a routing trace in which no token chose an expert: give num_experts (--experts)")
    for step, layer, counts in traced:
        yield step, layer, np.pad(counts, (0, size - len(counts)))


def save_jsonl(path: str | Path, statistics: LoadStatistics) -> None:
    """Write our own format."""
    with open(path, "w") as file:
        for i, iteration in enumerate(statistics.iterations):
            for n, layer in enumerate(statistics.layers):
                record = {"iteration": iteration, "layer": layer, "counts": statistics.counts[i, n].tolist()}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")


def parts_folder(path: str | Path) -> Path:
    """Where the ranks of a run that ended inside the range left their parts of `path`, one JSONL file each."""
    return Path(f"{path}.parts")


def _load_parts(folder: Path) -> LoadStatistics:
    files = sorted(folder.glob("rank*of*.jsonl"))
    names = {f.name: re.fullmatch(r"rank\d+of(\d+)\.jsonl", f.name) for f in files}
    if strange := [name for name, match in names.items() if match is None]:
        raise ValueError(f"{folder}: {strange[0]} is no part of a run, which are called rank3of8.jsonl; take it away")
    sizes = {int(match[1]) for match in names.values() if match}
    _require_all_ranks(folder, len(files), max(sizes))
    return from_records(_common({f.name: list(_jsonl_records(f, None)) for f in files}, folder), str(folder))


def _require_all_ranks(folder: Path, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(
            f"{folder}: {found} files of {wanted} ranks, the rest was lost with its rank: their counts "
            "are missing everywhere. One rank's file can be read alone, by its name"
        )


def _common(records: dict[str, list], folder: Path) -> Iterable[tuple[int, int, np.ndarray]]:
    """Records of the iterations that every file has: where ranks ended apart, the last ones lack some counts."""
    kept = [{record[0] for record in part} for part in records.values() if part]
    if not kept:
        return []
    everywhere, somewhere = set.intersection(*kept), set.union(*kept)
    if somewhere - everywhere:
        warnings.warn(
            f"{folder}: iterations {sorted(somewhere - everywhere)} are not in the files of all ranks and are left out",
            stacklevel=4,
        )
    return [record for part in records.values() for record in part if record[0] in everywhere]


def safetensors_library() -> ModuleType:
    """safetensors.numpy; ValueError with the remedy where it is not installed."""
    try:
        import safetensors.numpy
    except ImportError:
        raise ValueError(
            "TensorRT-LLM statistics need the package safetensors: pip install safetensors, or give a "
            "path that ends in .jsonl"
        ) from None
    return safetensors.numpy


def _load_tensorrt(folder: Path) -> LoadStatistics:
    files = sorted(folder.glob("rank*.safetensors"))
    if not files or not (folder / "meta_info.json").is_file():
        raise ValueError(
            f"{folder}: is no folder of statistics: it has neither rank*of*.jsonl, as the ranks of a run write their "
            "parts, nor meta_info.json and rank*.safetensors, as TensorRT-LLM does; give one, or a file of counts"
        )
    library = safetensors_library()
    meta = json.loads((folder / "meta_info.json").read_text())
    _require_all_ranks(folder, len(files), meta.get("num_rank_files", len(files)))

    def records(file: Path) -> Iterator[tuple[int, int, np.ndarray]]:
        for key, counts in library.load_file(file).items():
            iteration, _, layer = key.partition("_")
            if not iteration.isdecimal() or not layer.isdecimal():
                raise ValueError(f"{file}: key {key!r} is not ITERATION_LAYER")
            yield int(iteration), int(layer), counts

    statistics = from_records(_common({f.name: list(records(f)) for f in files}, folder), str(folder))
    said = meta.get("num_experts")
    if said is not None and said != statistics.counts.shape[2]:
        raise ValueError(f"{folder}: meta_info.json says {said} experts, the counts have {statistics.counts.shape[2]}")
    return statistics


def save_tensorrt(
    folder: str | Path, statistics: LoadStatistics, topk: int, rank: int = 0, files: int | None = None
) -> None:
    """Write TensorRT-LLM's folder: `rank`'s file of `files` in all (None: unknown). topk goes into meta_info.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SOURCES_FILE).unlink(missing_ok=True)  # of what was here before
    if statistics.layers:  # a rank without routers knows nothing of the model
        meta = {"num_experts": statistics.counts.shape[2], "num_experts_per_token": topk}
        if files is not None:  # our own key: readers can tell when a rank's file was lost
            meta["num_rank_files"] = files
        staging = folder / f".meta_info.{rank}"
        staging.write_text(json.dumps(meta))
        staging.replace(folder / "meta_info.json")
    tensors = {
        f"{iteration}_{layer}": np.ascontiguousarray(statistics.counts[i, n])
        for i, iteration in enumerate(statistics.iterations)
        for n, layer in enumerate(statistics.layers)
    }
    safetensors_library().save_file(tensors, folder / f"rank{rank}.safetensors")
