"""`hybrid-ep doctor --multi`: every pair of ranks exchanges messages; the slow and the silent are named.

Ranks meet at a store, then go through the rounds of a round robin, so that every rank has one partner at a time. Rank 0
collects after each round and says who has fallen silent; nobody waits for those again. Host memory over gloo: it finds
the wrong cable, the wrong interface, the throttled or hanging host, before a training job does.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hybrid_ep.cli.doctor.finding import FAIL, OK, WARN, Finding
from hybrid_ep.cli.outputs import count

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SMALL_REPEATS, LARGE_REPEATS = 20, 3
SLOW_BANDWIDTH, SLOW_LATENCY = 0.5, 4.0  # against a good pair of the same kind
KINDS = ("same host", "between hosts")
_PREFIX = "hybrid_ep/doctor"
_TORCH_FIRST_S = 2.0  # torch's message says more, and comes up to a second after its deadline


def examine(timeout_s: float, num_bytes: int) -> tuple[list[Finding], dict] | None:
    """(findings, {"pairs": ...}) on rank 0 and on a rank that cannot reach it, None on the others. Every rank of the
    job must call it.

    timeout_s: how long a rank may stay silent before it is given up. ValueError where no launcher says who this is.
    """
    if not timeout_s > 0:
        raise ValueError(f"--timeout {timeout_s:g}: give seconds greater than 0")
    if num_bytes < 1:
        raise ValueError(f"--mib {num_bytes / 2**20:g}: give a size greater than 0")
    rank, num_ranks = whoami(os.environ)
    address, port, serves = where(os.environ, rank)
    try:
        meeting = Meeting(connect(address, port, serves, num_ranks, timeout_s), rank, num_ranks, timeout_s)
        hosts, missing = meeting.roll_call()
        results, silent = ([], []) if missing else meeting.all_rounds(num_bytes)
    except RuntimeError as error:  # the store's, or gloo's when it finds no interface
        return [lost(error, rank, address, port, serves)], {"pairs": []}
    if missing:
        return ([absent(missing, timeout_s)], {"pairs": []}) if rank == 0 else None
    if rank:
        return None
    return judge(results, hosts, silent, num_bytes), {"pairs": results, "hosts": hosts}


def whoami(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, ranks) from torchrun's variables, else from srun's."""
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environ and ranks in environ:
            return int(environ[rank]), int(environ[ranks])
    raise ValueError("--multi: neither RANK nor SLURM_PROCID is set; start it through torchrun or srun")


def where(environ: Mapping[str, str], rank: int) -> tuple[str, int, bool]:
    """(MASTER_ADDR, MASTER_PORT, whether this rank serves the store there: rank 0 does unless torchrun does)."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ValueError(f"--multi: {name} is not set; it says where rank 0 serves the rendezvous")
    port = environ["MASTER_PORT"]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--multi: MASTER_PORT={port!r} must be a port, 1 to 65535, the same on all ranks")
    return environ["MASTER_ADDR"], int(port), rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(address: str, port: int, serves: bool, num_ranks: int, timeout_s: float) -> dist.TCPStore:
    """The store, of which this rank is the server or a client. RuntimeError when it is not there in time."""
    from torch.distributed import TCPStore

    if not serves:
        _reach(address, port, timeout_s)
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["store"] = TCPStore(
                address, port, num_ranks, is_master=serves, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except Exception as error:  # raised again below
            outcome["error"] = error

    # torch's own deadline does not hold once something has accepted the connection; hence a thread that is given up.
    thread = threading.Thread(target=body, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s + _TORCH_FIRST_S)
    if thread.is_alive():
        raise RuntimeError(f"no answer of a store within {timeout_s:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["store"]


def _reach(address: str, port: int, timeout_s: float) -> None:
    """Until something accepts connections there: rank 0 may come later. RuntimeError says why nothing did in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no connection within {timeout_s:g} s: {error}") from error
        time.sleep(0.1)


def rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Pairs, every two ranks once, no rank twice in a round (the circle method)."""
    players = [*range(num_ranks), *([-1] if num_ranks % 2 else [])]
    schedule = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        schedule.append([(min(p), max(p)) for p in pairs if -1 not in p])
        players = [players[0], players[-1], *players[1:-1]]
    return schedule


def exchange(group: Any, peer: int, first: bool, num_bytes: int, timeout: timedelta) -> tuple[float, float]:
    """(latency in us, GB/s one way) with a peer; `first` speaks first. RuntimeError after `timeout` of silence.

    group: ProcessGroupGloo, whose send and recv torch's stubs leave out."""
    import torch

    def one_way(buffer: torch.Tensor, sending: bool) -> None:
        (group.send([buffer], peer, 0) if sending else group.recv([buffer], peer, 0)).wait(timeout)

    def there_and_back(buffer: torch.Tensor) -> float:
        began = time.perf_counter()
        one_way(buffer, first)
        one_way(buffer, not first)
        return time.perf_counter() - began

    small, large = (torch.zeros(n, dtype=torch.uint8, device="cpu") for n in (8, num_bytes))
    there_and_back(small)  # connects
    latency = statistics.median(there_and_back(small) for _ in range(SMALL_REPEATS)) / 2
    seconds = statistics.median(there_and_back(large) for _ in range(LARGE_REPEATS)) / 2
    return latency * 1e6, num_bytes / seconds / 1e9


class Meeting:
    """One rank's side of the examination."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> None:
        from torch.distributed import PrefixStore

        self.store = PrefixStore(_PREFIX, store)
        self.rank, self.num_ranks, self.timeout_s = rank, num_ranks, timeout_s
        self.timeout = timedelta(seconds=timeout_s)

    def roll_call(self) -> tuple[list[str], list[int]]:
        """(host of every rank, ranks that have not come in time); rank 0 decides who that is."""
        self.store.set(f"host/{self.rank}", socket.gethostname())
        if self.rank == 0:
            missing = self._not_there([f"host/{r}" for r in range(self.num_ranks)])
            hosts = [] if missing else [self.store.get(f"host/{r}").decode() for r in range(self.num_ranks)]
            self.store.set("roll", json.dumps([hosts, missing]))
        hosts, missing = json.loads(self._told("roll"))
        if missing:
            self._part(missing)
        return hosts, missing

    def all_rounds(self, num_bytes: int) -> tuple[list[dict], list[int]]:
        """(one dict a pair, ranks that fell silent), complete on rank 0 alone."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        group = ProcessGroupGloo(PrefixStore("gloo", self.store), self.rank, self.num_ranks, self.timeout)
        results: list[dict] = []
        silent: list[int] = []
        for number, pairs in enumerate(rounds(self.num_ranks)):
            pairs = [pair for pair in pairs if not set(pair) & set(silent)]
            mine = next((pair for pair in pairs if self.rank in pair), None)
            said = self._with_partner(group, mine, num_bytes) if mine else {}
            self.store.set(f"{number}/{self.rank}", json.dumps(said))
            if self.rank == 0:
                there = [r for r in range(self.num_ranks) if r not in silent]
                gone = [there[i] for i in self._not_there([f"{number}/{r}" for r in there])]
                for pair in pairs:
                    witness = next((r for r in pair if r not in gone), None)
                    if witness is not None:
                        results.append(json.loads(self.store.get(f"{number}/{witness}")))
                silent += gone
                self.store.set(f"{number}/silent", json.dumps(silent))
            silent = json.loads(self._told(f"{number}/silent"))
        self._part(silent)
        return results, silent

    def _part(self, gone: Sequence[int]) -> None:
        """Rank 0 may serve the store: it leaves when the others, but those who are gone, have read their last word."""
        self.store.set(f"bye/{self.rank}", "")
        if self.rank == 0:
            self._not_there([f"bye/{r}" for r in range(self.num_ranks) if r not in gone])

    def _with_partner(self, group: Any, pair: tuple[int, int], num_bytes: int) -> dict:
        low, high = pair
        said = {"ranks": [low, high]}
        try:
            peer = high if self.rank == low else low
            latency, rate = exchange(group, peer, self.rank == low, num_bytes, self.timeout)
        except RuntimeError as error:
            return {**said, "error": str(error).strip().splitlines()[0]}
        return {**said, "latency_us": latency, "gb_per_s": rate}

    def _not_there(self, keys: Sequence[str]) -> list[int]:
        """Indices of keys that nobody has set in time. A partner may wait its whole time before it reports."""
        deadline = time.monotonic() + 2 * self.timeout_s
        while missing := [i for i, key in enumerate(keys) if not self.store.check([key])]:
            if time.monotonic() > deadline:
                return missing
            time.sleep(0.01)
        return []

    def _told(self, key: str) -> bytes:
        """What rank 0 has to say; RuntimeError when it says nothing."""
        try:
            self.store.wait([key], 3 * self.timeout)
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: rank 0 is silent at {key!r} ({error})") from error
        return self.store.get(key)


def lost(error: RuntimeError, rank: int, address: str, port: int, serves: bool) -> Finding:
    """The line of a rank that has no way to the others, or had one and lost it: nobody else can say it."""
    reason = (str(error).strip() or "no message").splitlines()[0]
    text = f"rank {rank} ({socket.gethostname()}), store at {address}:{port}: {reason}"
    if serves:
        return Finding(
            "rendezvous",
            FAIL,
            text,
            "this rank serves the store: MASTER_ADDR must be an address of this "
            "host and MASTER_PORT a free port (ss -ltnp)",
        )
    return Finding(
        "rendezvous",
        FAIL,
        text,
        f"is rank 0 running, and does its port answer from here (nc -vz {address} "
        f"{port})? All ranks need the same MASTER_ADDR and MASTER_PORT, and no "
        "firewall between them; GLOO_SOCKET_IFNAME names the interface",
    )


def absent(missing: Sequence[int], timeout_s: float) -> Finding:
    """The line for ranks that never came."""
    return Finding(
        "rendezvous",
        FAIL,
        f"ranks {list(missing)} did not come within {2 * timeout_s:g} s",
        "look at their hosts: is the process there, does MASTER_ADDR:MASTER_PORT answer from it?",
    )


def judge(results: Sequence[dict], hosts: Sequence[str], silent: Sequence[int], num_bytes: int) -> list[Finding]:
    """Findings from the pairs' figures. A pair is slow against a good one of its kind; a rank, in most of its pairs."""
    findings = [Finding("rendezvous", OK, f"{count(len(hosts), 'rank')} on {count(len(set(hosts)), 'host')}")]
    measured = [pair for pair in results if "error" not in pair]
    slow: dict[tuple[int, int], str] = {}
    for kind in KINDS:
        pairs = [p for p in measured if (hosts[p["ranks"][0]] == hosts[p["ranks"][1]]) == (kind == KINDS[0])]
        if pairs:
            # The first quartile, not the median: one slow rank of four makes half of the pairs slow.
            latency = sorted(p["latency_us"] for p in pairs)[len(pairs) // 4]
            rate = sorted((p["gb_per_s"] for p in pairs), reverse=True)[len(pairs) // 4]
            worst = min(pairs, key=lambda p: p["gb_per_s"])
            findings.append(
                Finding(
                    kind,
                    OK,
                    (
                        f"{len(pairs)} pairs: good {latency:.0f} us, {rate:.2f} GB/s one way "
                        f"({num_bytes / 2**20:g} MiB); "
                        f"least {worst['gb_per_s']:.2f} GB/s, ranks {worst['ranks'][0]} and {worst['ranks'][1]}"
                    ),
                )
            )
            for p in pairs:
                if p["gb_per_s"] < SLOW_BANDWIDTH * rate or p["latency_us"] > SLOW_LATENCY * latency:
                    slow[tuple(p["ranks"])] = (
                        f"{p['latency_us']:.0f} us, {p['gb_per_s']:.2f} GB/s; good {kind} "
                        f"{latency:.0f} us, {rate:.2f} GB/s"
                    )
    for rank in silent:
        findings.append(
            Finding(
                "silent",
                FAIL,
                f"rank {rank} ({hosts[rank]}) fell silent",
                "look at its process and its host; the others did not wait for it again",
            )
        )
    broken = [tuple(p["ranks"]) for p in results if "error" in p and not set(p["ranks"]) & set(silent)]
    findings += _blame("broken", FAIL, dict.fromkeys(broken, "no answer in time"), hosts, results)
    return findings + _blame("slow", WARN, slow, hosts, results)


def _blame(check: str, status: str, bad: dict, hosts: Sequence[str], results: Sequence[dict]) -> list[Finding]:
    """A line for each rank that most of its pairs complain about, then for each pair that is left."""
    lines, left = [], dict(bad)
    while left:
        count = {r: sum(r in pair for pair in left) for r in {r for pair in left for r in pair}}
        rank = min(count, key=lambda r: (-count[r], r))
        of = sum(rank in p["ranks"] for p in results)
        if count[rank] < 2 or 2 * count[rank] <= of:
            break
        example = next(text for pair, text in left.items() if rank in pair)
        lines.append(
            Finding(
                check,
                status,
                f"rank {rank} ({hosts[rank]}) with {count[rank]} of {of} peers: {example}",
                "its host, NIC or cable: compare `hybrid-ep doctor` there with a good host's",
            )
        )
        left = {pair: text for pair, text in left.items() if rank not in pair}
    for (a, b), text in left.items():
        lines.append(
            Finding(
                check,
                status,
                f"ranks {a} ({hosts[a]}) and {b} ({hosts[b]}): {text}",
                "the way between these two: cable, switch port, interface (GLOO_SOCKET_IFNAME)",
            )
        )
    return lines
