"""No command prints a line of more than 120 columns, but for paths and commands that are to be copied."""

from __future__ import annotations

import json
import re

import pytest

from hybrid_ep import cli
from hybrid_ep.cli import EXIT_OK, outputs

COMMAND = re.compile(r"(^(#\s+)?|: )hybrid-ep ")
COMMANDS = [
    "bench --backend sim --preset hybrid-ep-blog-h100-32",
    "bench --backend sim --nodes 2 --tokens 1024,4096",
    "bench --backend sim --cluster gb200_nvl72 --experts 288 --tokens 64",
    "bench --backend sim --path latency --ranks-per-node 2 --tokens 4 --num-sms 2 --hidden 512 --experts 8 --topk 2",
    "tune --backend sim -o {folder}/tune.json",
    "tune --backend sim --cluster gb200_nvl72 --experts 288 --nodes 2 --num-sms 8 --chunk 16",
    "simulate --engine model --nodes 2",
    "simulate --sources --cluster gb300_nvl72",
    "simulate --recommend deepseek_v3 --gpus 256",
    "simulate --recommend qwen3_30b_a3b --gpus 32 --cluster gb200_nvl36 --ep 8 --tokens 1024",
    "simulate --move auto --cluster h100_8x400g --tokens 256",
    "report scaling --simulate mixtral_8x7b",
    "report scaling --simulate deepseek_v3 --gpus 256,1024 --ep 64 --pp 4 --mode strong --cluster gb200_nvl72",
    "balance report {folder}/loads.jsonl",
    "balance report {folder}/loads.jsonl --ep 2 --spare-slots 1 --per-expert --sources",
    "balance plan {folder}/loads.jsonl --ep 2 --num-slots 66 -o {folder}/plan.yaml",
    "balance plan {folder}/loads.jsonl --ep 2 --num-slots 66 -o {folder}/next.yaml --current {folder}/one.yaml --front",
    "launch --list",
    "launch mixtral_8x7b --layouts",
    "launch mixtral_8x7b --slurm --dry-run",
    "launch qwen3_235b_a22b --cluster b200_8x400g --slurm --dry-run",
    "launch tiny_cpu --dry-run",
]


def too_wide(text: str, folder: object) -> list[str]:
    """Lines that are neither narrow nor, but for a path, a command of ours."""
    lines = [re.sub(rf"{re.escape(str(folder))}\S*", "PATH", line) for line in text.splitlines()]
    return [line for line in lines if len(line) > outputs.WIDTH and not COMMAND.search(line)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With loads and a placement of them."""
    load = [[(7 * e * e + 3 * n) % 1000 for e in range(64)] for n in (1, 2)]
    lines = [{"step": n, "expert_load": load, "rank_sent": [[9, 1], [3, 3]]} for n in (1, 2)]
    (tmp_path / "loads.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    placed = [str(tmp_path / name) for name in ("loads.jsonl", "one.yaml")]
    assert cli.main(["balance", "plan", placed[0], "--ep", "2", "--num-slots", "66", "-o", placed[1]]) == EXIT_OK
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS)
def test_a_line_has_at_most_120_columns(words, folder, capsys):
    capsys.readouterr()
    assert cli.main(words.format(folder=folder).split()) == EXIT_OK
    said = capsys.readouterr()
    script = words.startswith("launch") and said.out.startswith("#!")
    assert not too_wide(said.err + ("" if script else said.out), folder)


def test_findings_of_the_doctor_name_their_host_on_every_line_and_keep_remedies_whole():
    from hybrid_ep.cli.doctor.finding import Finding

    said = str(Finding("cuda library", "SKIP", "words " * 40, "pip install " + "x " * 90, "node17")).splitlines()
    assert len(said) == 4 and all("node17  " in line for line in said)
    assert max(map(len, said[:-1])) <= outputs.WIDTH < len(said[-1])


def test_an_assumption_of_a_predicted_step_has_a_line(folder, capsys):
    assert cli.main(["launch", "mixtral_8x7b", "--slurm", "--dry-run"]) == EXIT_OK
    said = capsys.readouterr().err.split("it assumes\n")[1].splitlines()
    assert said[1:5] == [
        "  what is recomputed counted as free",
        "  no exchange hidden",
        "  no load imbalance",
        "  nodes that differ by 3.4%",
    ]
