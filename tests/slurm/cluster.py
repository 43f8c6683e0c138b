"""A Slurm cluster of four nodes on this machine: munged, slurmctld and four slurmd, all in one folder.

No systemd, no configuration outside the folder, ports of its own; every daemon is ended by its pid.
A requeued job starts again once the credential of its first start has expired (cred_expire; Slurm's default is two
minutes): until then a daemon that is told late to end the first start would refuse the second.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("n1", "n2", "n3", "n4")
GPUS = 8  # of each node

CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=15
SchedulerParameters=sched_interval=2
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
KillWait=5
TmpFS={dir}/tmp-%n
NodeName=n[1-4] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here, or None. Tries apt first, where it may."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0:
        return "needs root to start munged and slurmd"
    if not all(map(shutil.which, PROGRAMS)) and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 120, "check": False}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], install):
            try:
                subprocess.run(command, env=environment, **quiet)
            except subprocess.TimeoutExpired:
                break
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)}, and apt cannot install {' '.join(PACKAGES)}" if missing else None


def free_ports(count: int) -> list[int]:
    """A run of free ports below the kernel's own range."""
    for first in range(17001, 27000, count + 3):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first, first + count))
    raise RuntimeError("no run of free ports between 17001 and 27000")


class Cluster:
    """Started by the constructor; `stop` ends every daemon. Commands see it through SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(5)
        folder.chmod(0o755)
        for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(dir=folder, port=ports[0], first=ports[1], last=ports[4]))
        for device in range(GPUS):  # counted by Slurm; no devices
            (folder / f"gpu{device}").touch()
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        try:
            paths = [
                f"--{name}={folder}/munge.{end}"
                for name, end in (
                    ("key-file", "key"),
                    ("socket", "socket"),
                    ("pid-file", "pid"),
                    ("log-file", "log"),
                    ("seed-file", "seed"),
                )
            ]
            self.do("munged", "--force", *paths)
            self.do("slurmctld", "-c")
            for node in NODES:
                self.start_node(node)
            self.wait(self.all_idle, 20, "four idle nodes")
        except BaseException:
            self.stop()
            raise

    def do(self, *command: str) -> str:
        """Output of a command on the cluster; RuntimeError with what it said when it fails."""
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def all_idle(self) -> bool:
        """No node is down, allocated, or still completing a job."""
        return self.do("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES))

    def start_node(self, node: str) -> None:
        self.do("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """The node is lost: its daemon, every rank on it and what minds them die at once, and Slurm is told."""
        self._signal(f"slurmd-{node}.pid", signal.SIGKILL)
        self._end_ranks(f"SLURMD_NODENAME={node}")
        self.do("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def _end_ranks(self, *having: str) -> None:
        """Those ranks and the step daemons that mind them."""
        ranks = self._ranks(*having)
        parents = {int(_status(rank, "PPid") or 0) for rank in ranks}
        minders = [process for process in parents if _status(process, "Name") == "slurmstepd"]
        for process in (*minders, *ranks):
            _kill(process)

    def kill_rank(self, rank: int) -> None:
        """One rank dies, its node lives on."""
        for process in self._ranks(f"SLURM_PROCID={rank}"):
            _kill(process)

    def _ranks(self, *having: str) -> list[int]:
        """Every process of a job of this cluster whose environment holds all these words too."""
        wanted = {word.encode() for word in (f"SLURM_CONF={self.folder}/slurm.conf", *having)}
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile
                continue
            if wanted <= set(variables) and any(v.startswith(b"SLURM_PROCID=") for v in variables):
                found.append(int(process.name))
        return found

    def job(self, number: int) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self.do("scontrol", "show", "job", "-o", str(number))
        return dict(field.partition("=")[::2] for field in text.split() if "=" in field)

    def report(self, number: int) -> str:
        """A job, the nodes and the last words of the daemons, for the message of a test that failed."""
        parts = [self.do("scontrol", "show", "job", "-o", str(number)), self.do("sinfo", "-N")]
        for name, most in (("slurmctld", 15), *((f"slurmd-{node}", 3) for node in NODES)):
            log = self.folder / f"{name}.log"
            words = [line for line in log.read_text().splitlines() if "mpi" not in line.lower()] if log.exists() else []
            parts += [f"== {log.name}", *words[-most:]]
        return "\n".join(parts)

    def wait(self, ready, seconds: float, what: str) -> None:
        """Until ready() is true; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"no {what} within {seconds} s"
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancels what runs, ends the daemons and what they have left."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=30, check=False, capture_output=True)
        time.sleep(1)
        for name in (*(f"slurmd-{node}.pid" for node in NODES), "slurmctld.pid", "munge.pid"):
            self._signal(name, signal.SIGTERM)
        self._end_ranks()  # of a job that was too slow to end with its daemons

    def _signal(self, pid_file: str, number: int) -> None:
        path = self.folder / pid_file
        if path.is_file() and (text := path.read_text().strip()):
            _kill(int(text), number)


def _kill(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _status(process: int, field: str) -> str:
    """A field of /proc/PID/status; empty once the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return line.partition(":")[2].strip()
    return ""
