"""What a run shows and draws, with and without the optional packages."""

import builtins
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from recipes import get_recipe, metrics, plots, report
from recipes.run_folder import RunFolder

ENTROPY = 3.0


def step(number, load=None, **more):
    load = load or [[number, 1, 1, 1]]
    return {
        "step": number,
        "train_loss": 4.0 / number,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 64 * number,
        "step_s": 0.5,
        "tokens_per_s": 128.0,
        "dispatch_s": 0.1,
        "combine_s": 0.05,
        "rank_imbalance": 0.2,
        "rank_imbalance_max": 0.2,
        "expert_imbalance": 0.2,
        "expert_load": load,
        **more,
    }


@pytest.fixture
def reporter(tmp_path):
    config = get_recipe("tiny_cpu_smoke").derive(
        logging={"runs_dir": str(tmp_path), "line_every": 2, "wandb": True, "tensorboard": True}
    )
    corpus = types.SimpleNamespace(unigram_entropy=ENTROPY)
    return report.Reporter(config, RunFolder.create(config, "run"), corpus)


@pytest.fixture
def without(monkeypatch):
    """Makes packages impossible to import."""
    real = builtins.__import__

    def hide(*names):
        def refuse(name, *args, **kwargs):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *args, **kwargs)

        for name in [name for name in sys.modules if name.split(".")[0] in names]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", refuse)

    return hide


def run_events(reporter):
    reporter.on_event(0, "start", {"step": 0, "num_parameters": 1_500_000})
    reporter.on_event(0, "held_out", {"step": 0, "held_out_loss": 5.5})
    for number in range(1, 5):
        reporter.on_event(0, "step", step(number, **({"held_out_loss": 1.5} if number == 4 else {})))
        reporter.on_event(1, "step", {"step": 99})
    reporter.on_event(0, "end", {"outcome": "done"})
    reporter.close()


def test_plain_lines_and_metrics_without_wandb(reporter, without, capsys):
    without("wandb")
    run_events(reporter)
    shown = capsys.readouterr().out
    assert "1.50 M parameters, 2 layers, 16 experts, top-4; 4 ranks, 2 nodes x 2" in shown
    assert "step     0  held-out loss 5.5000 nats/byte = 183% of the unigram entropy 3.0000" in shown
    assert "step     4  held-out loss 1.5000 nats/byte = 50% of the unigram entropy 3.0000" in shown
    assert "step     2/6" in shown and "step     3/6" not in shown, "line_every is 2"
    assert "dispatch 100 ms  combine 50 ms  imbalance 0.20" in shown and "wandb" not in shown
    records = reporter._folder.read_metrics()
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4], "events of other ranks must not count"
    assert (reporter.outcome, reporter.held_out_loss) == ("done", 1.5)


def test_wandb_logs_scalars_when_installed(reporter, monkeypatch, capsys):
    logged, asked = {}, {}

    class Run:
        def log(self, values, step):
            logged[step] = values

        def finish(self):
            logged["finished"] = True

    def init(**kwargs):
        asked.update(kwargs)
        return Run()

    fake = types.SimpleNamespace(init=init, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_events(reporter)
    assert asked["mode"] == "offline" and asked["config"] == reporter._config.to_dict()
    assert logged[2]["train_loss"] == 2.0 and "expert_load" not in logged[2] and logged["finished"]
    assert "wandb: logging offline" in capsys.readouterr().out


def test_tensorboard_gets_the_names_of_the_table(reporter, monkeypatch, without, capsys):
    written = {}

    class Writer:
        def __init__(self, folder, purge_step):
            written["folder"], written["purged from"] = folder, purge_step

        def add_scalar(self, name, value, step):
            written[name, step] = value

        def close(self):
            written["closed"] = True

    without("wandb")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    run_events(reporter)
    assert written["folder"] == reporter._folder.path / "tensorboard" and written["purged from"] == 1
    assert written["closed"] and written["train_loss", 2] == 2.0 and written["held_out_loss", 4] == 1.5
    assert written["expert_load_ratio/layer_1", 3] == pytest.approx(3 / 1.5)
    known = {*metrics.SCALARS, *(name.removesuffix("N") + "1" for name in metrics.BY_LAYER)}
    assert {key[0] for key in written if isinstance(key, tuple)} <= known
    assert "TensorBoard: logging to" in capsys.readouterr().out


def test_without_tensorboard_nothing_is_missing(reporter, without, capsys):
    without("wandb", "tensorboard")
    run_events(reporter)
    assert "TensorBoard" not in capsys.readouterr().out and reporter.outcome == "done"


def test_ratios_by_layer_before_and_after_balancing():
    record = step(1, [[4, 2, 1, 1], [0, 0, 0, 0]], balanced_rank_load=[[5, 3], [0, 0]])
    assert metrics.rank_load(record, 2).tolist() == [[6, 2], [0, 0]]
    flat = metrics.flatten(record, 2)
    assert flat["rank_load_ratio/layer_1"] == 1.5 and flat["balanced_load_ratio/layer_1"] == 1.25
    assert flat["expert_load_ratio/layer_1"] == 2.0 and flat["rank_load_ratio/layer_2"] == 1.0
    assert not set(flat) & {*metrics.LISTS, "step"}


def test_the_page_of_metrics_is_the_table():
    page = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
    assert metrics.table() in page.read_text(), "renew it: python -m recipes.metrics"
    assert set(step(1)) <= {"step", *metrics.SCALARS, *metrics.LISTS}


def test_a_broken_wandb_does_not_end_the_run(reporter, monkeypatch, capsys):
    def init(**_):
        raise RuntimeError("no disk")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=dict))
    run_events(reporter)
    assert "wandb does not start (RuntimeError: no disk)" in capsys.readouterr().out
    assert reporter.outcome == "done"


def test_plots_need_matplotlib_and_say_so(tmp_path, without):
    without("matplotlib")
    said = plots.draw_all(tmp_path, [step(1)], ENTROPY, 2)
    assert "matplotlib is missing" in said and not list(tmp_path.iterdir())


def test_plots_of_one_step_and_of_none(tmp_path):
    pytest.importorskip("matplotlib")
    assert "no step was finished" in plots.draw_all(tmp_path, [{"step": 0, "held_out_loss": 5.0}], ENTROPY, 2)
    plots.draw_all(tmp_path, [step(1)], ENTROPY, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{suffix}" for name in ("loss", "expert_load", "rank_load") for suffix in ("png", "svg")
    }
    assert "5th to the 95th percentile" in (tmp_path / "rank_load.svg").read_text()
    plots.draw_all(tmp_path, [step(n, balanced_rank_load=[[5, 3]]) for n in (1, 2)], ENTROPY, 2)
    said = plots.draw_all(tmp_path, [step(n, rank_sent=[[5, 3], [4, 4]]) for n in (1, 2)], ENTROPY, 2, 1)
    plots.draw_all(tmp_path, [step(1, rank_sent=[[9] * 4] * 4), step(2, rank_sent=[[5, 3], [4, 4]])], ENTROPY, 2, 1)
    assert "from rank" in (tmp_path / "traffic.svg").read_text(), "went on on fewer ranks"
    assert "traffic.png" in said and "from rank" in (tmp_path / "traffic.svg").read_text()
    assert "waits" not in said
    plots.draw_all(tmp_path, [step(1, rank_waited=[[0.0, 0.0]])], ENTROPY, 2, 1)
    assert not (tmp_path / "waits.svg").exists(), "nobody waited"
    said = plots.draw_all(tmp_path, [step(n, rank_waited=[[0.0, 0.2 * n], [0.0, 0.0]]) for n in (1, 2)], ENTROPY, 2, 1)
    picture = (tmp_path / "waits.svg").read_text()
    assert "waits.png" in said and "rank waited" in picture and "300" in picture, "the mean of two steps, in ms"


def test_binning_keeps_every_row():
    steps = [step(number, load=[[number, 0], [1, number]]) for number in range(11, 1011)]
    edges, load = plots.bin_load(steps)
    assert load.shape == (120, 2, 2) and len(edges) == 121
    assert (edges[0], edges[-1]) == (10, 1010) and (np.diff(edges) > 0).all()
    assert load.sum(0).tolist() == [[sum(range(11, 1011)), 0], [1000, sum(range(11, 1011))]]
