"""Expert loads of a range of iterations, counted on the device and written for the offline tools.

    collector = LoadCollector("loads.jsonl", first=100, last=200, topk=8)
    each iteration:  begin(n);  add(layer, routing_map) after every router;  end()

Nothing waits for the device inside the range. With its last iteration the counts of all ranks are summed on rank 0,
which writes one file, with what each rank sent to each expert in the whole range (sources.py). A run that ends earlier
has nobody left to talk to: every rank writes its own part, and `statistics.load` of the same path sums the parts over
the iterations that all of them have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybrid_ep.balance import sources, statistics
from hybrid_ep.balance.statistics import LoadStatistics

MAX_ITERATIONS = 10_000  # 58 layers of 256 experts: 119 KB of device memory each
_BLOCK_BYTES = 64 << 20  # summed at a time


def _say(text: str) -> None:
    print(f"hybrid_ep: {text}", file=sys.stderr, flush=True)


class LoadCollector:
    """Counts of this rank's routers, iteration by iteration. `begin`, `end` are called alike on all ranks of the job.

    path: a name that ends in .jsonl for this project's format, any other for TensorRT-LLM's folder.
    first, last: iterations, both included. topk: experts a token chooses, for TensorRT-LLM's meta_info.json.
    own_rank: this rank's in its expert-parallel group, for who sends to whom; -1: not known.
    ValueError: an empty or too long range, a folder without the package safetensors.
    """

    def __init__(
        self, path: str | Path, first: int, last: int, topk: int, say: Callable[[str], None] = _say, own_rank: int = -1
    ) -> None:
        if not 0 <= first <= last:
            raise ValueError(f"load statistics of iterations {first}-{last}: give FIRST-LAST, FIRST at most LAST")
        if last - first >= MAX_ITERATIONS:
            raise ValueError(
                f"load statistics of iterations {first}-{last}: at most {MAX_ITERATIONS} fit on the "
                "device, give a shorter range"
            )
        self.path, self.first, self.last, self.topk, self._say = Path(path), first, last, topk, say
        self._own_rank = own_rank
        if self.path.suffix != ".jsonl":
            statistics.safetensors_library()  # missing: say so before training starts
        self._done: dict[int, dict[int, torch.Tensor]] = {}
        self._now: dict[int, torch.Tensor] | None = None
        self._iteration: int | None = None
        self._closed = False
        self._rank, self._num_ranks = 0, 1

    @property
    def counting(self) -> bool:
        """Whether an iteration of the range is under way."""
        return self._now is not None

    def begin(self, iteration: int) -> None:
        """Iteration `iteration` starts; one that is repeated is counted anew. Past the range: as `end` of its last."""
        self._iteration, self._now = iteration, None
        if self._closed:
            return
        if iteration > self.last:
            self._finish()
        elif iteration >= self.first:
            if not self._done:
                self._enter()
            self._now = {}

    def add(self, layer: int, routing_map: torch.Tensor) -> None:
        """Count routing_map, bool [T, E], for a layer. No synchronisation; does nothing outside the range."""
        if self._now is None:
            return
        counts = routing_map.detach().reshape(-1, routing_map.shape[-1]).sum(0)
        self._now[layer] = self._now[layer] + counts if layer in self._now else counts

    def end(self) -> None:
        """The iteration is complete. Collective over the job's ranks when it is the last of the range."""
        if self._now is None or self._iteration is None:
            return
        self._done[self._iteration], self._now = self._now, None
        if self._iteration == self.last:
            self._finish()

    def close(self, reason: str) -> None:
        """The run ends here, for good or bad: what was gathered so far is written, without talking to anybody."""
        if self._closed:
            return
        self._closed, self._now = True, None
        if not self._done:
            return
        try:
            where = self._write_part()
        except Exception as error:  # a device that failed cannot be read; the reason for the end matters more
            self._say(f"rank {self._rank}: expert loads are lost ({type(error).__name__}: {error})")
            return
        self._say(
            f"{reason}: expert loads of iterations {self._range()} of {self.first}-{self.last}, rank "
            f"{self._rank} of {self._num_ranks}, are in {where}; read {self.path}"
        )

    def _range(self) -> str:
        return f"{min(self._done)}-{max(self._done)}"

    def _enter(self) -> None:
        """Results of an earlier run are moved aside: the tools would add them to these."""
        if dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        for old in (self.path, statistics.parts_folder(self.path)):
            if self._rank == 0 and old.exists():
                number = next(n for n in range(1, 10**6) if not old.with_name(f"{old.name}.{n}").exists())
                aside = old.rename(old.with_name(f"{old.name}.{number}"))
                self._say(f"{old} is of an earlier run and is now {aside}")

    def _finish(self) -> None:
        self._closed = True
        if not self._done:
            return
        whole, sent = self._sum() if self._num_ranks > 1 else self._alone()
        if whole is None or sent is None:
            return
        self._write(self.path, whole, sent=sent)
        self._say(
            f"expert loads of iterations {self._range()} ({len(whole.layers)} layers, {whole.counts.shape[2]} "
            f"experts, {self._num_ranks} ranks) are in {self.path}"
        )

    def _write(
        self, path: Path, part: LoadStatistics, rank: int = 0, files: int = 1, sent: np.ndarray | None = None
    ) -> None:
        """sent: int64 [ranks, experts + 1], the whole range's, behind them each rank's own in its group; None: the file
        is of one rank."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.suffix == ".jsonl":
            staging = path.with_name(f".{path.name}")
            statistics.save_jsonl(staging, part)
            _add_sources(staging, sent, part)
            os.replace(staging, path)
        else:
            statistics.save_tensorrt(path, part, self.topk, rank, files)
            _add_sources(path, sent, part)

    def _write_part(self) -> Path:
        own = self._own()
        if self.path.suffix != ".jsonl":
            self._write(self.path, own, self._rank, self._num_ranks)
            return self.path / f"rank{self._rank}.safetensors"
        name = statistics.parts_folder(self.path) / f"rank{self._rank}of{self._num_ranks}.jsonl"
        self._write(name, own)
        return name

    def _own(self) -> LoadStatistics:
        """This rank's counts; no layers on a rank without routers."""
        iterations, layers = sorted(self._done), sorted({layer for now in self._done.values() for layer in now})
        rows = [[self._done[i][n].cpu().numpy() for n in layers if n in self._done[i]] for i in iterations]
        whole = [i for i, row in zip(iterations, rows, strict=True) if len(row) == len(layers)]
        counts = np.array([row for row in rows if len(row) == len(layers)], dtype=np.int64)
        return LoadStatistics(counts.reshape(len(whole), len(layers), -1 if layers else 0), tuple(whole), tuple(layers))

    def _alone(self) -> tuple[LoadStatistics, np.ndarray]:
        own = self._own()
        return own, np.append(own.total().sum(axis=0), self._own_rank)[None]

    def _sum(self) -> tuple[LoadStatistics | None, np.ndarray | None]:
        """All ranks' counts and int64 [ranks, experts + 1] of `_write` on rank 0, None elsewhere. Layers may live on
        different ranks (pipeline stages)."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        iterations = sorted(self._done)
        mine = {layer: now[layer] for now in self._done.values() for layer in now}
        facts = [
            max(mine, default=-1),
            max((c.numel() for c in mine.values()), default=0),
            iterations[0],
            -iterations[0],
            len(iterations),
            -len(iterations),
        ]
        agreed = torch.tensor(facts, device=device, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        last_layer, experts, first, same_first, number, same_number = agreed.tolist()
        if first != -same_first or number != -same_number:
            raise RuntimeError(
                f"load statistics: ranks counted different iterations, this one {self._range()}; "
                "begin() and end() must be called alike on all of them"
            )
        present = torch.zeros(last_layer + 1, dtype=torch.int64, device=device)
        present[sorted(mine)] = 1
        dist.reduce(present, 0)
        block = max(1, _BLOCK_BYTES // max(1, 8 * present.numel() * experts))
        sums, sent = [], torch.zeros(experts, dtype=torch.int64, device=device)
        for start in range(0, number, block):
            chosen = iterations[start : start + block]
            dense = torch.zeros(len(chosen), present.numel(), experts, dtype=torch.int64, device=device)
            for row, iteration in zip(dense, chosen, strict=True):
                for layer, counts in self._done[iteration].items():
                    row[layer] = counts
            sent += dense.sum(dim=(0, 1))
            dist.reduce(dense, 0)
            sums.append(dense.cpu().numpy() if self._rank == 0 else None)
        sent = torch.cat([sent, sent.new_tensor([self._own_rank])])
        of_ranks = [torch.empty_like(sent) for _ in range(self._num_ranks)] if self._rank == 0 else None
        dist.gather(sent, of_ranks, 0)
        if of_ranks is None:
            return None, None
        layers = np.flatnonzero(present.cpu().numpy())
        whole = LoadStatistics(np.concatenate(sums)[:, layers], tuple(iterations), tuple(layers.tolist()))
        return whole, torch.stack(of_ranks).cpu().numpy()


def _add_sources(path: Path, sent: np.ndarray | None, part: LoadStatistics) -> None:
    """sent: as of LoadCollector._write."""
    if sent is not None:
        own = sent[:, -1].tolist()
        sources.save(path, sent[:, :-1], part.iterations, own if min(own) >= 0 else None)
