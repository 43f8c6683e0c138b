"""--json of commands whose answer is a table of loads, a placement, a list of recipes, or a run that could start."""

from __future__ import annotations

import json
import subprocess

import pytest

from hybrid_ep import cli
from hybrid_ep.cli import EXIT_OK, EXIT_USAGE

LOADS = [
    {"step": 1, "expert_load": [[10, 2, 3, 4], [1, 2, 3, 4]], "rank_sent": [[10, 2], [3, 4]]},
    {"step": 2, "expert_load": [[12, 2, 3, 4], [1, 2, 3, 4]], "rank_sent": [[10, 2], [3, 4]]},
]
DRY = ["launch", "mixtral_8x7b", "--slurm", "--dry-run"]


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """asked(words): the document of --json - and the text beside it. {folder} in words is one with loads."""
    (tmp_path / "loads.jsonl").write_text("\n".join(map(json.dumps, LOADS)) + "\n")
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    monkeypatch.chdir(tmp_path)

    def answer(words):
        capsys.readouterr()
        assert cli.main([*words.format(folder=tmp_path).split(), "--json", "-"]) == EXIT_OK
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    return answer


def test_a_balance_report_has_every_number_of_its_table(asked):
    found, text = asked("balance report {folder}/loads.jsonl --ep 2 --spare-slots 1 --sources")
    assert found["schema"] == "hybrid_ep.balance-report/1" and found["iterations"] == [1, 2]
    assert (found["experts"], found["ranks"], found["ranks_are"]) == (4, 2, "--ep")
    assert [layer["tokens"] for layer in found["layers"]] == [[22, 4, 6, 8], [2, 4, 6, 8]]
    for row in (*found["layers"], found["average"]):
        assert f"| {row['by_rank']:.3f} | " in text and f"| {row['exact']:.3f} | {row['bound']:.3f} |" in text
    assert f"static placement: {found['noise_floor']:.3f}" in text and found["sent"] == [[20, 4], [6, 8]]
    found, text = asked("balance report {folder}/loads.jsonl")
    assert found["ranks_are"] in text and found["sent"] is None and found["layers"][0]["exact"] is None


def test_a_placement_says_what_it_leaves_layer_by_layer(asked, tmp_path):
    pytest.importorskip("yaml")
    found, text = asked("balance plan {folder}/loads.jsonl --ep 2 --num-slots 6 -o {folder}/one.yaml")
    assert found["schema"] == "hybrid_ep.balance-plan/1" and (tmp_path / "one.yaml").is_file()
    left = [layer["imbalance"] for layer in found["layers"]]
    assert f"(max {max(left):.4f}, bound 0)" in text and "moved" not in found["layers"][0]
    again = "balance plan {folder}/loads.jsonl --ep 2 --num-slots 6 -o {folder}/two.yaml --current {folder}/one.yaml"
    found, text = asked(f"{again} --front")
    assert [(layer["moved"], layer["stopped"]) for layer in found["layers"]] == [(0, "near_fresh")] * 2
    assert [layer["front"][0]["moved"] for layer in found["layers"]] == [0, 0] and found["current"].endswith("one.yaml")


def test_recipes_are_listed_with_the_gpus_of_each_cluster(asked):
    found, text = asked("launch --list")
    assert [recipe["name"] for recipe in found["recipes"]] == [line.split()[0] for line in text.splitlines()]
    by_name = {recipe["name"]: recipe for recipe in found["recipes"]}
    assert by_name["mixtral_8x7b"]["gpus"]["b200_8x400g"] == 16 and by_name["tiny_cpu"]["gpus"] is None
    assert all(recipe["says"] in text for recipe in found["recipes"])


def test_layouts_have_what_sets_them(asked):
    found, text = asked("launch mixtral_8x7b --layouts")
    best, own = found["layouts"][0], found["as_it_is"]
    assert found["simulated"] and own["set"] == {} and best["step_s"] < own["step_s"]
    assert f"the first: --set micro_batch_size={best['set']['micro_batch_size']}" in text
    assert all(layout["need_bytes"] <= found["budget_bytes"] for layout in found["layouts"])
    other, text = asked("launch mixtral_8x7b --layouts --nodes 4 --set micro_batch_size=8")
    assert other["as_it_is"] is None and "over the" in other["as_it_is_why_not"] and "as it is: --nodes 4: " in text


def test_a_dry_run_has_its_prediction_beside_the_script(asked, tmp_path, capsys):
    found, text = asked(" ".join(DRY))
    assert found["simulated"] and found["gpus"] == found["nodes"] * 8 == 64
    assert f"step time: {found['step']['seconds']:.2f} s" in text and "\n#!/bin/bash\n" in text
    assert all(f"\n  {assumption}\n" in text for assumption in found["assumes"])
    assert f"  {'total':<12}{found['memory_bytes']['total'] / 1e9:>10.2f} GB" in text
    assert [c["change"] for c in found["candidates"]] == ["", "dispatcher=alltoall"]
    assert cli.main([*DRY, "--json", str(tmp_path / "x.json")]) == EXIT_OK
    said = capsys.readouterr()
    assert json.loads((tmp_path / "x.json").read_text()) == found and f"# written: {tmp_path / 'x.json'}" in said.err
    assert said.out.startswith("#!/bin/bash") and "written" not in said.out.splitlines()[-1]
    subprocess.run(["bash", "-n"], input=said.out, text=True, check=True)


@pytest.mark.parametrize(
    "words",
    ["balance report {folder}/loads.jsonl", "balance plan {folder}/loads.jsonl --ep 2 --num-slots 6 -o {folder}/p"]
    + ["launch --list", "launch mixtral_8x7b --layouts", " ".join(DRY)],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(words, asked, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert cli.main([*words.format(folder=tmp_path).split(), "--json", "no/x.json"]) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.err.endswith("--json no/x.json: no such folder; create it first\n") and said.err.count("\n") == 1
    assert said.out == "" and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words, why",
    [
        ("launch mixtral_8x7b", "--json x: for --list"),
        ("launch tiny_cpu --dry-run", "of a GPU recipe"),
        ("launch --resume mine", "--json x: for --list"),
        ("balance report {folder}/loads.jsonl --layout tensorrt", "leave the other output flags out"),
        ("balance plan {folder}/loads.jsonl --ep 2 --num-slots 6 -o ./x", "is where --json writes"),
    ],
)
def test_where_it_would_hold_nothing_it_is_refused(words, why, asked, tmp_path, capsys):
    assert cli.main([*words.format(folder=tmp_path).split(), "--json", "x"]) == EXIT_USAGE
    assert why in capsys.readouterr().err and not (tmp_path / "x").exists()
