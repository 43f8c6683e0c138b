"""Who sends to whom: recorded loads by the rank whose tokens they are, where the record says it.

    recipe      metrics.jsonl: "rank_sent" [source][rank]
    megatron    the routing trace, each line of one rank
    a file each a TensorRT-LLM folder or a folder of parts, where every rank wrote its own tokens' counts
    collector   the last line of its JSONL, or sources.json in its folder: {"iterations": [first, last],
                "sources": [rank][expert], "own": [rank]}, summed over layers and these iterations; own: each rank's
                own in its expert-parallel group, where it is known

Other files of counts that were summed over the job do not say it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_ep.balance import inputs, statistics
from hybrid_ep.balance.statistics import SOURCES_FILE


def load(
    path: str | Path, num_ranks: int, num_experts: int | None = None, between: tuple[int, int] | None = None
) -> np.ndarray:
    """int64 [sources, num_ranks]: (token, expert) pairs of each source rank for the experts of each rank of its group,
    which contiguous owners put there; summed over layers and iterations. between: first and last iteration, included.

    ValueError where the record has no sources, has them in two ways, does not fit, or has nothing between."""
    path = Path(path)
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: give the ranks of a group, 1 or more")
    if between is not None and between[0] > between[1]:
        raise ValueError(
            f"between is {between[0]} to {between[1]}: give the first iteration and a last that is not before"
        )
    if not path.exists() and statistics.parts_folder(path).is_dir():
        path = statistics.parts_folder(path)
    if path.is_dir():
        summed = path / SOURCES_FILE
        found = _of_lines(summed, num_ranks, num_experts, between) if summed.is_file() else _of_files(path, between)
    elif path.is_file():
        found = _of_lines(path, num_ranks, num_experts, between)
    else:
        raise ValueError(f"{path}: no such file or folder")
    if not found:
        raise ValueError(
            f"{path}: does not say whose tokens it counts; metrics.jsonl of a recipe, Megatron's routing trace, "
            "files of --hybrid-ep-load-stats and folders with a file of each rank do"
        )
    widest = max(len(counts) for counts in found.values())
    counts = np.stack([np.pad(found[rank], (0, widest - len(found[rank]))) for rank in sorted(found)])
    if widest % num_ranks:
        raise ValueError(
            f"ep_size is {num_ranks}: it does not divide {widest} experts; give another size, or --experts"
        )
    return counts.reshape(len(counts), num_ranks, -1).sum(axis=2)


def own_ranks(path: str | Path, num_sources: int, num_ranks: int) -> np.ndarray | None:
    """int64 [sources]: which of the num_ranks of its group each source is; None where the record does not say it. A
    recipe's groups are of neighbours, which Megatron's are not where expert tensor parallelism is more than 1."""
    path = Path(path)
    file = path / SOURCES_FILE if path.is_dir() else path
    for record in map(json.loads, filter(str.strip, file.read_text().splitlines())) if file.is_file() else ():
        if "rank_sent" in record:
            return np.arange(num_sources) % num_ranks
        if "sources" in record:
            own = np.asarray(record.get("own", ()), dtype=np.int64)
            return own if len(own) == num_sources and own.min() >= 0 and own.max() < num_ranks else None
    return None


def save(path: str | Path, counts: np.ndarray, iterations: Sequence[int], own: Sequence[int] | None = None) -> None:
    """Says whose tokens a record counts: appended to a JSONL file, as a file of its own in a folder. counts: int64
    [ranks, experts], summed over layers and over the iterations. own: see own_ranks; None: not known."""
    path = Path(path)
    whole: dict[str, Any] = {"iterations": [min(iterations), max(iterations)], "sources": counts.tolist()}
    if own is not None:
        whole["own"] = list(own)
    with open(path / SOURCES_FILE if path.is_dir() else path, "w" if path.is_dir() else "a") as file:
        file.write(json.dumps(whole, separators=(",", ":")) + "\n")


def _of_files(folder: Path, between: tuple[int, int] | None) -> dict[int, np.ndarray]:
    """{rank: int64 [experts]} of a folder with a file a rank; empty where one file has all."""
    whole = statistics.load(folder)  # checks names, gaps and lost files
    first, last = between or (whole.iterations[0], whole.iterations[-1])
    files = sorted(folder.glob("rank*of*.jsonl")) or sorted(folder.glob("rank*.safetensors"))
    found = {}
    for file in files if len(files) > 1 else []:
        match = re.match(r"rank(\d+)", file.name)
        if match is None:
            raise ValueError(f"{file}: is not named after its rank, as rank3 is; take it away")
        records = _jsonl(file) if file.suffix == ".jsonl" else _safetensors(file)
        kept = [counts for iteration, counts in records if first <= iteration <= last and iteration in whole.iterations]
        found[int(match[1])] = np.sum(kept, axis=0, dtype=np.int64) if kept else np.zeros(0, np.int64)
    if found and not any(map(len, found.values())):  # one alone may be of a pipeline stage without experts
        raise _nothing_between(folder, (first, last), whole.iterations)
    return found


def _jsonl(file: Path) -> Iterator[tuple[int, np.ndarray]]:
    for record in map(json.loads, filter(str.strip, file.read_text().splitlines())):
        yield record["iteration"], np.asarray(record["counts"], dtype=np.int64)


def _safetensors(file: Path) -> Iterator[tuple[int, np.ndarray]]:
    for key, counts in statistics.safetensors_library().load_file(file).items():
        yield int(key.partition("_")[0]), counts


def _of_lines(
    path: Path, num_ranks: int, num_experts: int | None, between: tuple[int, int] | None
) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    form, steps = "", []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "sources" in record:
                form = _form_of(record, form)
                _add_summed(found, record, between, path)
                continue
            step = record.get("step")
            if step is None or not (record.keys() & _FORMS.keys()):
                continue
            steps.append(inputs.integer("step", step, 0))
            if between is not None and not between[0] <= step <= between[1]:
                continue
            form = _form_of(record, form)
            for rank, counts in _of_record(record, num_experts):
                if "rank_sent" in record and len(counts) != num_ranks:
                    raise ValueError(f"has groups of {len(counts)} ranks, not of {num_ranks}: give --ep {len(counts)}")
                _add(found, rank, counts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if steps and not found:
        raise _nothing_between(path, between, steps)
    return found


def _add_summed(
    found: dict[int, np.ndarray], record: dict[str, Any], between: tuple[int, int] | None, path: Path
) -> None:
    """The line of `path` that has all ranks. ValueError where it is not of the counts that it stands beside."""
    first, last = record["iterations"]
    if between is not None and not between[0] <= first <= last <= between[1]:
        raise ValueError(
            f"has the tokens of ranks summed over iterations {first} to {last}, not from {between[0]} to {between[1]}: "
            "leave --between out"
        )
    of_ranks = [statistics.whole_counts(np.asarray(c), f"sources of rank {n}") for n, c in enumerate(record["sources"])]
    whole = statistics.load(path.parent if path.name == SOURCES_FILE else path)
    there, wanted = (whole.iterations[0], whole.iterations[-1]), whole.total().sum(axis=0)
    fits = bool(of_ranks) and {len(counts) for counts in of_ranks} == {len(wanted)}
    if there != (first, last) or not fits or not np.array_equal(np.sum(of_ranks, axis=0), wanted):
        raise ValueError(
            f"has the tokens of ranks of another record, of iterations {first} to {last}: the counts are of {there[0]} "
            f"to {there[1]}, or add up to others; take the {'file' if path.name == SOURCES_FILE else 'line'} away"
        )
    for rank, counts in enumerate(of_ranks):
        _add(found, rank, counts)


_FORMS = {
    "top_indices": "Megatron's routing trace",
    "rank_sent": "metrics.jsonl of a recipe",
    "sources": "--hybrid-ep-load-stats",
}


def _form_of(record: dict[str, Any], before: str) -> str:
    """The name in `_FORMS` by which a record says its sources. ValueError for two, and for another than `before`."""
    names = [name for name in _FORMS if name in record]
    if len(names) > 1 or before not in ("", names[0]):
        both = " and ".join(f"{name} ({what})" for name, what in _FORMS.items() if name in (*names, before))
        raise ValueError(f"mixes {both}, which count the same tokens in two ways: give a file of one kind")
    if names[0] == "top_indices" and (type(record.get("rank")) is not int or record["rank"] < 0):
        raise ValueError(f"has rank {record.get('rank')!r}: a line of the routing trace names the rank of its tokens")
    return names[0]


def _nothing_between(path: Path, between: tuple[int, int] | None, there: Sequence[int]) -> ValueError:
    asked = "" if between is None else f" from {between[0]} to {between[1]}"
    return ValueError(
        f"{path}: has no iteration{asked} with tokens of ranks; it has {min(there)} to {max(there)}: give others"
    )


def _of_record(record: dict[str, Any], num_experts: int | None) -> Iterator[tuple[int, np.ndarray]]:
    if "top_indices" in record:
        counts = statistics.traced_counts(np.asarray(record["top_indices"]), num_experts)
        yield int(record["rank"]), np.pad(counts, (0, max(0, (num_experts or 0) - len(counts))))
    for rank, sent in enumerate(record.get("rank_sent", ())):
        yield rank, np.asarray(sent, dtype=np.int64)


def _add(found: dict[int, np.ndarray], rank: int, counts: np.ndarray) -> None:
    before = found.get(rank, np.zeros(0, np.int64))
    total = np.zeros(max(len(before), len(counts)), np.int64)
    total[: len(before)] += before
    total[: len(counts)] += counts
    found[rank] = total


def describe(sent: np.ndarray, own: np.ndarray | None = None, most_ranks: int = 16) -> str:
    """The matrix [sources, ranks] over its fair share as Markdown, or its ends in a sentence where that is too wide.
    own: see own_ranks; without it nothing is said of tokens that stay where they are."""
    share: np.ndarray = sent / max(float(sent.mean()), 1e-9)
    source, rank = np.unravel_index(int(np.argmax(share)), share.shape)
    said = (
        f"tokens from ranks to ranks, over the fair share: most {share.max():.2f} (rank {source} to rank {rank} of its "
        f"group), least {share.min():.2f}"
    )
    if own is not None:
        home = int(sent[np.arange(len(sent)), own].sum()) / max(int(sent.sum()), 1)
        said += f"; {home:.1%} stay on their rank"
    lines = [said]
    if sent.shape[1] <= most_ranks and len(sent) <= most_ranks:
        lines.append("| from | " + " | ".join(f"to {n}" for n in range(sent.shape[1])) + " |")
        lines.append("|---:" * (sent.shape[1] + 1) + "|")
        lines += [f"| {s} | " + " | ".join(f"{x:.2f}" for x in row) + " |" for s, row in enumerate(share)]
    return "\n".join(lines)
