"""What a run came to: who must learn, and what a recipe too short for it says."""

from types import SimpleNamespace

import pytest

from recipes import RECIPES, get_recipe, pretrain
from recipes.verdict import failed, verdict


@pytest.mark.parametrize(
    "loss, must_learn, begins, bad",
    [
        (2.0, True, "LEARNED", False),
        (2.0, False, "LEARNED", False),
        (4.0, True, "NOT LEARNED", True),
        (3.0, True, "NOT LEARNED", True),
        (4.0, False, "RAN: 6 steps are done", False),
    ],
)
def test_a_run_to_the_end(loss, must_learn, begins, bad):
    sentence, through = verdict("done", 6, loss, 3.0, "n", must_learn)
    assert sentence.startswith(begins) and through == bad == failed(sentence)


@pytest.mark.parametrize("must_learn", [True, False])
def test_a_run_that_was_stopped_says_how_to_go_on(must_learn):
    assert verdict("stopped", 3, 4.0, 3.0, "n", must_learn) == (
        "Stopped after step 3. Continue with: make pretrain RESUME=n",
        False,
    )


@pytest.mark.parametrize("must_learn, code", [(True, 3), (False, 0)])
def test_the_exit_code_says_so_too(must_learn, code, tmp_path, capsys):
    reporter = SimpleNamespace(outcome="done", step=6, held_out_loss=4.0)
    folder = SimpleNamespace(name="n", verdict_path=tmp_path / "verdict.txt")
    assert pretrain._verdict(reporter, 3.0, folder, None, must_learn) == code
    assert (tmp_path / "verdict.txt").read_text() == capsys.readouterr().out


def test_recipes_of_few_steps_are_not_asked_to_learn():
    for name in RECIPES:
        schedule = get_recipe(name).schedule
        assert schedule.must_learn == (schedule.train_steps >= 100), name
