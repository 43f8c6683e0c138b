"""Run folders: never overwritten, one writer, metrics rewound to the checkpoint."""

import pytest

from recipes import get_recipe
from recipes.run_folder import RunFolder


@pytest.fixture
def config(tmp_path):
    return get_recipe("tiny_cpu_smoke").derive(logging={"runs_dir": str(tmp_path / "runs")})


def test_default_names_never_collide(config):
    folders = [RunFolder.create(config, None) for _ in range(3)]
    assert len({folder.name for folder in folders}) == 3
    assert all(folder.name.startswith("tiny_cpu_smoke-") for folder in folders)
    assert all(folder.read_config() == config for folder in folders)


def test_a_name_is_used_once(config):
    first = RunFolder.create(config, "mine")
    with pytest.raises(ValueError, match=r"name='mine'.*exists; choose another name"):
        RunFolder.create(config.derive(seed=5), "mine")
    assert first.read_config() == config
    assert RunFolder.open(config.logging.runs_dir, "mine").read_config() == config


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("place, said", [("/proc/x", "No such file"), ("file/runs", "Not a directory")])
def test_a_place_that_takes_no_folder_is_refused_by_its_flag(config, tmp_path, place, said, name):
    (tmp_path / "file").write_text("")
    root = str(tmp_path / place)
    with pytest.raises(ValueError, match=rf"--runs-dir {root}: {said}.*; name a folder that can be written"):
        RunFolder.create(config.derive(logging={"runs_dir": root}), name)


def test_opening_an_unknown_run_names_the_known_ones(config):
    RunFolder.create(config, "known")
    with pytest.raises(ValueError, match="choose one of: known"):
        RunFolder.open(config.logging.runs_dir, "unknown")


def test_one_job_at_a_time(config):
    folder = RunFolder.create(config, "locked")
    with folder.lock(), pytest.raises(ValueError, match="another job is writing"), folder.lock():
        pass
    with folder.lock():
        pass


def test_metrics_rewind_and_survive_a_cut_line(config):
    folder = RunFolder.create(config, "metrics")
    assert folder.read_metrics() == []
    for step in range(1, 6):
        folder.append_metrics({"step": step, "train_loss": 0.1 * step})
    with open(folder.metrics_path, "a") as file:
        file.write('{"step": 6, "train_')
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 3, 4, 5]
    folder.rewind_metrics(3)
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 3]
    assert folder.read_metrics()[2]["train_loss"] == 0.1 * 3
