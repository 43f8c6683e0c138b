"""`hybrid-ep launch`: scripts that can be saved, edited and run again; flags that would be ignored are refused."""

import os
import shlex
import subprocess

import pytest

from recipes import CLUSTER_RECIPES, rank, safe_yaml, sbatch
from recipes.launch_command import main, parse_changes
from recipes.run_folder import RunFolder

SMALL = "qwen3_30b_a3b_proxy"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH for programs that stand in for sbatch and python; each notes its words in `said`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >> {folder}/said\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("arguments", [["qwen3_30b_a3b", "--nodes", "16"], [SMALL, "--nodes", "4"]])
def test_a_dry_run_prints_a_script_that_can_be_saved_and_leaves_nothing(arguments, tmp_path, capsys):
    assert main([*arguments, "--slurm", "--dry-run", "--runs-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash\n#SBATCH ")
    for line in (f"#SBATCH --nodes={arguments[-1]}", "#SBATCH --requeue", "srun --kill-on-bad-exit=1", "MASTER_ADDR"):
        assert line in said.out
    if arguments[0] in CLUSTER_RECIPES:
        assert "parameters" in said.err and "--require-gpu" in said.out
        assert "--exit-signal-handler" in shlex.split(said.out.split("' rank ")[1].split(" || status")[0])
    subprocess.run(["bash", "-n"], input=said.out, text=True, check=True)
    assert not list(tmp_path.iterdir())


def test_a_written_job_is_submitted_later_and_again(tmp_path, programs, capsys):
    where = ["--runs-dir", str(tmp_path / "runs")]
    assert main([SMALL, "--slurm", "--no-submit", "--name", "mine", *where]) == 0
    script = tmp_path / "runs" / "mine" / "job.sbatch"
    assert f"sbatch {script}" in capsys.readouterr().out and not (programs / "said").exists()
    assert RunFolder.open(str(tmp_path / "runs"), "mine").read_config().recipe == SMALL
    assert (script.parent / "logs").is_dir(), "Slurm makes no folders"
    assert main(["--resume", "mine", *where]) == 0
    assert main([SMALL, "--slurm", "--name", "mine", *where]) == 2
    assert "mine exists" in capsys.readouterr().err
    assert (programs / "said").read_text().splitlines() == [str(script)]


def test_a_local_run_has_a_script_that_resumes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/echo")
    where = ["--runs-dir", str(tmp_path)]
    assert main([SMALL, "--name", "here", *where]) == 0
    script = ["bash", str(tmp_path / "here" / "job.sh")]
    said = subprocess.run(script, text=True, capture_output=True, check=True).stdout
    assert said.split()[:2] == ["-m", "torch.distributed.run"] and said.split()[-1] == str(tmp_path / "here")
    assert main(["--resume", "here", *where]) == 0


@pytest.mark.parametrize("arguments, message", [
    (["nothing"], "recipe='nothing'"), ([], "recipe is missing"),
    (["qwen3_30b_a3b", "--set", "expert"], "KEY=VALUE"), (["qwen3_30b_a3b", "--set", "expert=[1"], "YAML"),
    (["mixtral_8x7b", "--nodes", "3"], "expert=8"), ([SMALL, "--nodes", "4"], "add --slurm"),
    (["qwen3_30b_a3b"], "add --slurm"), (["qwen3_30b_a3b", "--dry-run"], "add --slurm"),
    ([SMALL, "--nodes", "0"], "nodes=0"), ([SMALL, "--tasks-per-node", "0"], "tasks_per_node=0"),
    (["qwen3_30b_a3b", "--slurm", "--tasks-per-node", "2"], "tasks_per_node=2"),
    ([SMALL, "--hardware", "b200_8"], "hardware='b200_8'"), ([SMALL, "--partition", "gpu"], "--partition"),
    ([SMALL, "--no-preflight", "--max-starts", "1"], "--no-preflight --max-starts"),
    ([SMALL, "--slurm", "--max-starts", "0"], "starts=0"), (["--resume", "gone"], "resume='gone'"),
    (["--resume", "../x"], "name='../x'"), ([SMALL, "--resume", "x", "--set", "a=1"], "RECIPE --set"),
    (["qwen3_30b_a3b", "--slurm", "--name", "../x"], "name='../x'"),
])
def test_bad_launches_exit_2_and_leave_nothing(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--runs-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_changes_are_read_with_the_safe_loader():
    read = parse_changes(["a.b=1", "c=x y", "d=", "lr=3e-4", "e=1E+2", "f=1e5x", "g=-.5e3"])
    assert read == {"a.b": 1, "c": "x y", "d": "", "lr": 3e-4, "e": 100.0, "f": "1e5x", "g": -500.0}
    with pytest.raises(ValueError, match="KEY|not valid YAML"):
        parse_changes(["a=!!python/object/apply:os.getcwd []"])
    assert safe_yaml.load("x: [1e-3, 2]", "file") == {"x": [1e-3, 2]}


def test_without_yaml_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert main([SMALL, "--set", "a.b=1"]) == 2
    assert "pip install 'hybrid_ep[train]'" in capsys.readouterr().err


def test_a_pre_flight_that_hangs_ends_the_job(tmp_path, programs, monkeypatch):
    """And a node is asked whether it lives without waiting for the container's image."""
    monkeypatch.setattr(sbatch, "_PREFLIGHT_S", 1)
    for name, text in (("scontrol", "echo n1 NodeAddr=10.0.0.1"), ("srun", "exec sleep 60")):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "logs").mkdir()
    text = sbatch.script(sbatch.Job("j", str(tmp_path), "/", 1, 1, ["x"], ["doctor"], container="image"))
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", "-c", text], env=env, text=True, capture_output=True, timeout=30, check=False)
    assert done.returncode == 1 and "pre-flight: a node failed or took over 1 s" in done.stdout
    asked = [line.split() for line in text.splitlines() if "timeout " in line]
    assert [("image" in words, "doctor" in words) for words in asked] == [(True, True), (False, False)]


class Store(dict):
    """What check_one_machine uses of a TCPStore."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


def test_ranks_on_cpus_must_share_a_machine(tmp_path):
    store = Store()
    for number in range(3):
        rank.check_one_machine(store, "k", number)
    store.set("k", "another-boot far-away")
    with pytest.raises(ValueError, match="rank 3 is on .*, rank 0 on far-away"):
        rank.check_one_machine(store, "k", 3)
