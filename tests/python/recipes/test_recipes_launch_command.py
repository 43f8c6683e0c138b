"""`hybrid-ep launch`: scripts that can be saved, edited and run again; flags that would be ignored are refused."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import CLUSTER_RECIPES, RECIPES, pretrain, rank, sbatch
from recipes.hardware import HARDWARE
from recipes.launch_command import main
from recipes.launch_run import run_script
from recipes.run_folder import RunFolder

SMALL = "qwen3_30b_a3b_proxy"
DRY = ["mixtral_8x7b", "--slurm", "--dry-run"]
ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "choose one of these\ndeepseek_v3            GPUs  "),
        ([], "--list shows them"),
        (["mixtral_8x7b", "--slurm"], "Megatron-LM/pretrain_gpt.py is not there: git clone"),
        (["mixtral_8x7b", "--slurm"], "Transformer Engine is not installed"),
        (
            ["mixtral_8x7b", "--slurm", "--container", "i", "--container-mounts", "/no:/no"]
            + ["--set", "data_path=/no/d", "--set", "tokenizer=t"],
            "/no/d.bin is not there",
        ),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--segment", "3"], "--segment 3: must"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--time", "banana"], "--time banana: is no time of Slurm"),
        ([SMALL, "--segment", "0"], "--segment: for jobs of Slurm"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--cpus-per-task", "0"], "--cpus-per-task 0: must"),
        (["mixtral_8x7b", "--cluster", "gb200_nvl36"], "--cluster gb200_nvl36: recipes have no layouts for it"),
        (["mixtral_8x7b", "--set", "dispatcher=deepep_v1"], "deepep_v1 is known to report scaling --simulate"),
        (
            [SMALL, "--set", "parallel.dispatcher=node_dedup"],
            "use one of hybrid_ep, alltoall, allgather; node_dedup is",
        ),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--nics", "a b"], "--nics 'a b'"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--env", "A"], "--env 'A': write NAME=VALUE"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--env", "HYBRID_EP_SEED=a"], "HYBRID_EP_SEED='a' is not a valid"),
        ([SMALL, "--set", "data.source=/nosuch"], "--set data.source=/nosuch: no such folder; name one"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--sbatch", "qos=a b"], "--sbatch 'qos=a b'"),
        ([*DRY, "--sbatch", "nodes=3"], "--sbatch nodes=3: the script sets nodes itself: give --nodes"),
        ([*DRY, "--sbatch=--time=3"], "--sbatch --time=3: the script sets time itself: give --time"),
        ([*DRY, "--sbatch", "mem=4G"], "--sbatch mem=4G: the script sets mem itself: a GPU job has all"),
        ([*DRY, "--signal-before", "65536"], "--signal-before 65536: must be from 1 to 65535 seconds"),
        ([*DRY, "--signal-before", "0"], "--signal-before 0: must be from 1"),
        ([*DRY, "--time", "3"], "--signal-before 180: must be less than the 180 s of --time 3, or"),
        ([*DRY, "--time", "0-1", "--signal-before", "3600"], "less than the 3600 s of --time 0-1,"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--module", "a;b"], "--module 'a;b'"),
        (["mixtral_8x7b", "--slurm", "--dry-run", "--container-mounts", "/a:/a"], "add --container IMAGE"),
        (["mixtral_8x7b", "--hardware", "b200_8", "--cluster", "b200_8x400g"], "the old name of --cluster"),
        (["qwen3_30b_a3b", "--set", "expert"], "KEY=VALUE"),
        (["qwen3_30b_a3b", "--set", "expert=[1"], "YAML"),
        (["mixtral_8x7b", "--nodes", "3"], "--set expert=8 must divide; give --nodes 4,"),
        (["deepseek_v3", "--nodes", "63"], "--nodes 63: gives 504 GPUs, which --set tensor=2 x --set pipeline=16 = 32"),
        ([SMALL, "--nodes", "4"], "add --slurm"),
        (["qwen3_30b_a3b"], "add --slurm"),
        (["qwen3_30b_a3b", "--dry-run"], "add --slurm"),
        ([SMALL, "--nodes", "0"], "--nodes 0: must"),
        ([SMALL, "--tasks-per-node", "0"], "--tasks-per-node 0: must"),
        (["qwen3_30b_a3b", "--slurm", "--tasks-per-node", "2"], "--tasks-per-node 2: one"),
        ([SMALL, "--cluster", "b200_8x400g"], "--cluster b200_8x400g: "),
        ([SMALL, "--partition", "gpu"], "--partition"),
        ([SMALL, "--no-preflight", "--max-starts", "1"], "--no-preflight --max-starts"),
        ([SMALL, "--slurm", "--max-starts", "0"], "--max-starts 0: must"),
        (["--list", "--slurm"], "--list with --slurm: lists the recipes and starts nothing"),
        (["--list", "--set", "a=1", "--resume", "x"], "--list with --set --resume: "),
        (["--resume", "gone"], "--resume gone: no"),
        (["--resume", "../x"], "--resume ../x: use"),
        ([SMALL, "--resume", "x", "--set", "a=1"], "RECIPE --set"),
        (["qwen3_30b_a3b", "--slurm", "--name", "../x"], "--name ../x: use"),
    ],
)
def test_bad_launches_exit_2_and_leave_nothing(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--runs-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said and ("--dry-run" not in arguments or said.count("\n") == 1)
    assert not list(tmp_path.iterdir())


def test_what_ranks_would_trip_over_is_refused_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    """A run that is started later, or elsewhere, is told of it and written all the same."""
    where = ["--runs-dir", str(tmp_path), "--set", "data.source=/nosuch"]
    assert main([SMALL, "--no-submit", "--name", "later", *where]) == 0
    assert "missing here: --set data.source=/nosuch: no such folder" in capsys.readouterr().err
    assert main(["--resume", "later", "--runs-dir", str(tmp_path)]) == 2
    assert "launch: --set data.source=/nosuch: no such folder; name one, or python" in capsys.readouterr().err
    for name, value, words in (
        ("HYBRID_EP_TIMEOUT_S", "abc", "environment variable HYBRID_EP_TIMEOUT_S='abc'"),
        ("HYBRID_EP_EXECUTOR", "abacus", "environment variable HYBRID_EP_EXECUTOR='abacus'"),
        ("HYBRID_EP_TUNING", "/nosuch.json", "tuning='/nosuch.json' cannot be read"),
    ):
        monkeypatch.setenv(name, value)
        for command in (main, pretrain.main):
            assert command([SMALL, "--name", "n", "--runs-dir", str(tmp_path)]) == 2
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1
        monkeypatch.delenv(name)
    assert [path.name for path in tmp_path.iterdir()] == ["later"]


@pytest.mark.parametrize("where, code", [(["--slurm"], 2), (["--slurm", "--container", "image"], 0)])
@pytest.mark.usefixtures("programs")
def test_a_tuning_file_is_looked_for_here_unless_the_job_has_a_container(where, code, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_TUNING", "/in/the/image.json")
    assert main([SMALL, "--name", "n", "--runs-dir", str(tmp_path / "runs"), *where]) == code


def test_every_recipe_is_listed_with_where_it_runs(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert max(map(len, listed)) <= 120
    lines = [line.split() for line in listed]
    assert {words[0]: words[1] for words in lines} == {
        **dict.fromkeys(CLUSTER_RECIPES, "GPUs"),
        **dict.fromkeys(RECIPES, "CPU"),
    }


def test_a_gpu_recipe_is_listed_with_all_hardware_and_how_many_of_it(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name, make in CLUSTER_RECIPES.items():
        line = next(line for line in listed if line.startswith(f"{name} "))
        told = {}
        for part in line.rpartition(" on ")[2].rstrip(".").split("; "):
            number, gpus = part.split(" ", 1)
            told |= dict.fromkeys(re.split(", | or ", gpus), int(number.replace(",", "")))
        runs = [make(hardware) for hardware in HARDWARE]
        assert told == {
            run.hardware.name.partition("_")[0].upper(): run.num_hosts * run.hardware.gpus_per_host for run in runs
        }


@pytest.mark.parametrize("flag", ["--cluster", "--hardware"])
def test_only_clusters_that_launch_takes_are_offered(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main(["mixtral_8x7b", flag, "b200"])
    assert end.value.code == 2
    told = f"argument {flag}: invalid choice: 'b200' (choose from {', '.join(HARDWARE)}); "
    assert told in capsys.readouterr().err


def test_the_page_says_what_variants_have_of_their_own():
    """The table of docs/recipes.md against the recipes."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    told = {name: cells for name, *_ in rows if name in HARDWARE for cells in [dict(rows)[name].split("|")]}
    assert set(told) == {hardware.name for hardware in HARDWARE.values() if hardware.variant}
    for name, cells in told.items():
        for recipe, cell in zip(CLUSTER_RECIPES, cells, strict=True):
            mine, base = CLUSTER_RECIPES[recipe](name), CLUSTER_RECIPES[recipe](HARDWARE[name].layouts)
            own = {f.name: getattr(mine, f.name) for f in dataclasses.fields(mine)}
            own = {f"{k}={v}" for k, v in own.items() if k != "hardware" and v != getattr(base, k)}
            assert set(re.findall("`(.*?)`", cell)) == own, (name, recipe)


def test_old_names_of_hardware_work_with_a_warning(tmp_path, capsys):
    said = {}
    for flags in (["--hardware", "b200_8"], ["--cluster", "b200_8x400g"]):
        assert main(["mixtral_8x7b", *flags, "--slurm", "--dry-run", "--name", "n", "--runs-dir", str(tmp_path)]) == 0
        said[flags[0]] = capsys.readouterr()
    assert said["--hardware"].out == said["--cluster"].out
    assert "write --cluster from now on" in said["--hardware"].err
    assert "write --cluster b200_8x400g from now on" in said["--hardware"].err
    assert "warning" not in said["--cluster"].err


def test_mock_data_and_what_is_missing_here_are_said_before_anything_starts(tmp_path, capsys):
    where = ["--slurm", "--dry-run", "--runs-dir", str(tmp_path)]
    assert main(["mixtral_8x7b", *where]) == 0
    said = capsys.readouterr().err
    assert "DATA: MOCK, random tokens, 500 steps" in said
    assert said.count("missing here: ") == 2 and "pretrain_gpt.py is not there" in said
    assert main(["mixtral_8x7b", *where, "--set", "data_path=/no/d", "--set", "tokenizer=t"]) == 0
    said = capsys.readouterr().err
    assert "MOCK" not in said and "data: /no/d, tokenizer t" in said and "/no/d.idx is not there" in said


def sbatch_lines(capsys, tmp_path, *arguments):
    assert main([*arguments, "--slurm", "--dry-run", "--name", "n", "--runs-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    ranks = next(line for line in text.splitlines() if line.startswith("srun --kill-on-bad-exit=1"))
    return text.splitlines(), shlex.split(ranks.partition("bash -c")[0])


def test_a_rack_wide_domain_asks_slurm_for_hosts_of_one_rack(tmp_path, capsys):
    rack = ["deepseek_v3", "--cluster", "gb200_nvl72"]  # EP 64 on trays of 4
    assert "#SBATCH --segment=16" in sbatch_lines(capsys, tmp_path, *rack)[0]
    assert "#SBATCH --segment=32" in sbatch_lines(capsys, tmp_path, *rack, "--segment", "32")[0]
    for none in ([*rack, "--segment", "0"], ["deepseek_v3", "--cluster", "b200_8x400g"], [SMALL]):
        assert not any("--segment" in line for line in sbatch_lines(capsys, tmp_path, *none)[0])


def test_ranks_of_a_gpu_job_get_memory_cores_and_a_log_a_node(tmp_path, capsys):
    lines, ranks = sbatch_lines(capsys, tmp_path, "mixtral_8x7b")
    assert any(line.startswith("#SBATCH --mem=0") for line in lines)
    assert "cpus=$((SLURM_CPUS_ON_NODE / 8))" in lines and ranks[ranks.index("--cpus-per-task") + 1] == "$cpus"
    assert ranks[ranks.index("--output") + 1] == f"{tmp_path}/n/logs/%j-%N.log" and "--label" in ranks
    assert any("srun --label" in line and "--require-gpu" in line for line in lines)
    lines, ranks = sbatch_lines(capsys, tmp_path, "mixtral_8x7b", "--cpus-per-task", "12")
    assert ranks[ranks.index("--cpus-per-task") + 1] == "12" and not any("SLURM_CPUS_ON_NODE" in x for x in lines)
    lines, ranks = sbatch_lines(capsys, tmp_path, SMALL)  # CPU ranks share hosts with other jobs
    assert ranks == ["srun", "--kill-on-bad-exit=1", "--label"] and not any("--mem=0" in line for line in lines)


def rank_shell(lines):
    """What srun's bash -c runs for a rank of a GPU job."""
    start = next(i for i, line in enumerate(lines) if line.startswith("srun --kill-on-bad-exit=1"))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("' rank "))
    return "\n".join(lines[start + 1 : end])


@pytest.mark.parametrize("local, node, bound", [(0, "0", True), (5, "1", True), (5, "-1", False), (0, None, False)])
def test_a_rank_binds_itself_to_the_numa_node_of_its_gpu(local, node, bound, tmp_path, programs, capsys):
    lines, ranks = sbatch_lines(capsys, tmp_path, "mixtral_8x7b")
    assert "--cpu-bind=none" in ranks, "or Slurm may have given it cores of the other node"
    (programs / "numactl").write_text('#!/bin/bash\nprintf "numactl %s %s\\n" "$1" "$2"; shift 2; exec "$@"\n')
    (programs / "nvidia-smi").write_text(
        "#!/bin/bash\n[[ $1 = --id=[0-7] ]] || exit 9\necho 00000000:1${1#--id=}:AB.0\n"
    )
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / f"0000:1{local}:ab.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for name in ("numactl", "nvidia-smi") if node is not None else ():
        (programs / name).chmod(0o755)
    env = {**os.environ, "SLURM_PROCID": str(8 + local), "SLURM_LOCALID": str(local), "SLURM_NTASKS": "16"}
    shell = rank_shell(lines).replace('"/sys/', f'"{tmp_path}/sys/')
    done = subprocess.run(
        ["bash", "-c", shell, "rank", "echo", "a b"], env=env, text=True, capture_output=True, check=True
    )
    words = f"numactl --cpunodebind={node} --preferred={node}\n" if bound else ""
    assert done.stdout == words + "a b\n"
    assert ("is missing here: ranks are not bound" in done.stderr) == (node is None)
    for none in (["mixtral_8x7b", "--no-numa"], [SMALL]):
        lines, ranks = sbatch_lines(capsys, tmp_path, *none)
        assert "numactl" not in rank_shell(lines) and "--cpu-bind=none" not in ranks


def test_rank_0_has_a_log_of_its_own_that_sigterm_does_not_cut(tmp_path, capsys):
    lines, _ = sbatch_lines(capsys, tmp_path, "mixtral_8x7b", "--no-numa")
    assert f"export RANK_0_LOG={tmp_path}/n/logs/$SLURM_JOB_ID-rank0.log" in lines
    program = [
        sys.executable,
        "-uc",
        "import signal; signal.signal(15, lambda *_: (print('saved'), exit(0))); "
        "print('ready'); signal.pause(); signal.pause()",
    ]
    for procid, log in (("0", "ready\nsaved\n"), ("1", None)):
        file = tmp_path / f"log-{procid}"
        env = {**os.environ, "SLURM_PROCID": procid, "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "RANK_0_LOG": str(file)}
        ran = subprocess.Popen(
            ["bash", "-c", rank_shell(lines), "rank", *program],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert ran.stdout.readline() == "ready\n"
        os.killpg(ran.pid, signal.SIGTERM)  # Slurm's goes to every process of the step
        said, error = ran.communicate(timeout=20)
        assert (said, error) == ("saved\n", "") and (file.read_text() if file.exists() else None) == log


def test_nics_are_named_to_both_libraries(tmp_path, capsys):
    lines, _ = sbatch_lines(capsys, tmp_path, "mixtral_8x7b", "--nics", "mlx5_0,mlx5_3")
    assert {"export NCCL_IB_HCA==mlx5_0:1,mlx5_3:1", "export NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_3:1"} <= set(lines)


def test_a_site_s_own_lines_variables_and_modules(tmp_path, capsys):
    lines, _ = sbatch_lines(
        capsys,
        tmp_path,
        SMALL,
        "--sbatch",
        "qos=high",
        "--sbatch",
        "exclude=n[1-3]",
        "--env",
        "A=x y",
        "--module",
        "cuda/13",
        "--module",
        "gcc",
        "--signal-before",
        "600",
    )
    assert {"#SBATCH --qos=high", "#SBATCH --exclude=n[1-3]", "export A='x y'"} < set(lines)
    assert lines[0] == "#!/bin/bash -l"
    assert lines.index("module load cuda/13 gcc || exit 1") < lines.index("set -euo pipefail")
    assert any(line.startswith("#SBATCH --signal=TERM@600 ") for line in lines)


def test_times_that_leave_room_for_the_signal(tmp_path, capsys):
    """In all forms of sbatch; UNLIMITED, and what means it, always does."""
    for time, seconds in (("4", 200), ("3:01", 180), ("0:03:01", 180), ("1-0", 65535), ("0-0:04", 239)) + tuple(
        (unlimited, 65535) for unlimited in ("UNLIMITED", "infinite", "0")
    ):
        lines, _ = sbatch_lines(capsys, tmp_path, SMALL, "--time", time, "--signal-before", str(seconds))
        assert f"#SBATCH --time={time}" in lines
    assert "#SBATCH --mem=4G" in sbatch_lines(capsys, tmp_path, SMALL, "--sbatch", "mem=4G")[0]


def test_data_of_a_container_is_looked_for_where_it_is_mounted_from(tmp_path, capsys):
    """In the image it lies elsewhere; where no mount covers it, only the image can tell."""
    (tmp_path / "d").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "d" / f"text{suffix}").touch()
    given = ["mixtral_8x7b", "--slurm", "--no-submit", "--runs-dir", str(tmp_path / "runs"), "--set", "tokenizer=t"]
    given += ["--container", "image", "--container-mounts"]

    def said(mounts, data):
        name = f"n{len(list((tmp_path / 'runs').glob('*')))}"
        assert main([*given, mounts, "--name", name, "--set", f"data_path={data}"]) == 0
        lines = capsys.readouterr().err.replace("\n  ", " ").splitlines()
        return [line for line in lines if line.startswith(("missing", "not looked"))]

    assert said(f"/other:/data,{tmp_path}:/data/in:ro", "/data/in/d/text") == []
    assert said(f"{tmp_path}", f"{tmp_path}/d/text") == [], "a mount without TO is at its own path"
    (first, second) = said(f"{tmp_path}:/data", "/data/text")
    assert first.startswith(f"missing here: /data/text.bin ({tmp_path}/text.bin outside the container) is not there")
    assert "/data/text.idx" in second
    (only,) = said(f"{tmp_path}:/data", "/datasets/text")
    assert "/datasets/text.bin and /datasets/text.idx, which no mount of the container covers" in only


@pytest.mark.parametrize(
    "given, meant",
    [
        ("topk=3", "--set 'topk=3': write model.topk"),
        ("model=3", "write model.aux_loss_coeff or "),
        ("modle.topk=3", "--set 'modle.topk=3': unknown; write SECTION.FIELD of data, logging, model,"),
        ("expert=[1", r"--set 'expert=\[1': not valid YAML \(.*, line 1, column"),
    ],
)
def test_a_key_that_is_none_says_what_was_meant_in_one_line(given, meant, capsys):
    assert main(["tiny_cpu_smoke", "--dry-run", "--set", given]) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(meant, said) and "\n" not in said


def test_a_container_has_its_own_python_and_sees_the_run(tmp_path, capsys):
    lines, ranks = sbatch_lines(capsys, tmp_path, SMALL, "--container", "img", "--container-mounts", "/data:/data")
    mounts = ranks[ranks.index("--container-mounts") + 1].split(",")
    assert mounts == [f"{os.getcwd()}:{os.getcwd()}", f"{tmp_path}:{tmp_path}", "/data:/data"]
    assert ranks[ranks.index("--container-workdir") + 1] == os.getcwd()
    text = "\n".join(lines)
    assert "' rank python3 -m recipes.rank" in text and "python3 -m hybrid_ep doctor" in text
    own = sbatch_lines(capsys, tmp_path, SMALL, "--container", "img", "--container-python", "/opt/py")[0]
    assert any("' rank /opt/py -m recipes.rank" in line for line in own)


def test_without_yaml_the_remedy_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert main([SMALL, "--set", "a.b=1"]) == 2
    assert "pip install 'hybrid_ep[train]'" in capsys.readouterr().err
    assert main([SMALL, "--name", "n", "--runs-dir", str(tmp_path)]) == 2
    assert not (tmp_path / "n").exists(), "nothing started, so no name is taken"
    extras = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert "pyyaml" in extras.partition("\ntrain = [")[2].partition("]")[0], "the remedy brings what it promises"


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

    def check(self, keys):
        return all(key in self for key in keys)


def test_ranks_on_cpus_must_share_a_machine(tmp_path):
    store = Store()
    for number in range(3):
        rank.check_one_machine(store, "k", number, 1)
    store.set("k", "another-boot far-away")
    with pytest.raises(ValueError, match="rank 3 is on .*, rank 0 on far-away"):
        rank.check_one_machine(store, "k", 3, 1)


def test_a_run_whose_reader_is_gone_goes_on(tmp_path):
    """As with `launch | tee log` after Ctrl-C, which ends tee at once, or when a terminal is closed."""
    terminal = "master, terminal = os.openpty()\nos.dup2(terminal, 1)\nos.close(terminal)\nos.close(master)\nsay('c')"
    program = "import os\nfrom recipes.report import say\nsay('a')\nsay('b')\n"
    program += f"{terminal}\nopen({str(tmp_path / 'done')!r}, 'w')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        code = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, timeout=60).returncode
    finally:
        os.close(writer)
    assert code == 0 and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "name, ends, said, code",
    [("job.sh", 0, "LEARNED: yes", 0), ("job.sh", 0, "NOT LEARNED: no", 3), ("job.sh", 0, "", 0)]
    + [("job.sh", 7, "NOT LEARNED: no", 7), ("job.sbatch", 0, "NOT LEARNED: no", 0)],
)
def test_a_run_that_did_not_learn_ends_with_3_as_from_pretrain(name, ends, said, code, tmp_path, programs):
    """A submitted one has not run yet: the verdict is what it came to the last time."""
    script = tmp_path / name
    script.write_text(f"exit {ends}\n")
    if said:
        (tmp_path / "verdict.txt").write_text(said + "\n")
    assert run_script(script) == code


def test_a_finished_run_that_did_not_learn_says_so_again(tmp_path, capfd):
    """Resumed by somebody's loop: it has nothing to do, and is no success."""
    where = ["--runs-dir", str(tmp_path)]
    one_rank = ["--tasks-per-node=1", "--set=parallel.expert_parallel_size=1", "--set=parallel.ranks_per_node=1"]
    assert main(["tiny_cpu_smoke", "--name", "n", "--no-submit", *where, *one_rank]) == 0
    (tmp_path / "n" / "checkpoint" / "step_000006").mkdir(parents=True)
    (tmp_path / "n" / "checkpoint" / "latest").write_text("step_000006\n")
    (tmp_path / "n" / "verdict.txt").write_text("NOT LEARNED: no\n")
    assert main(["--resume", "n", *where]) == 3
    said = capfd.readouterr()
    assert "its 6 steps are done\nNOT LEARNED: no\n" in said.out, said.err
    assert (tmp_path / "n" / "verdict.txt").read_text() == "NOT LEARNED: no\n"
