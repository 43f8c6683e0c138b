"""Configurations: complete, checked, and the same after a round trip through YAML."""

import pytest

from recipes import RECIPES, get_recipe
from recipes.config import RunConfig, dump_yaml, load_yaml
from recipes.pretrain import main, make_config, parse_args, resumable_step
from recipes.run_folder import RunFolder


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name):
    config = get_recipe(name)
    assert config.recipe == name
    assert load_yaml(dump_yaml(config)) == config
    assert RunConfig.from_dict(config.to_dict()) == config


def test_floats_survive_yaml_exactly():
    config = get_recipe("tiny_cpu").derive(optimizer={"lr": 1 / 3, "min_lr": 1e-05, "adam_eps": 1e-15})
    assert load_yaml(dump_yaml(config)).optimizer == config.optimizer


def test_tiny_cpu_is_the_promised_model():
    config = get_recipe("tiny_cpu")
    model, parallel = config.model, config.parallel
    assert model.num_layers >= 4 and model.num_experts == 16 and model.topk == 4
    assert (parallel.num_ranks, parallel.expert_parallel_size, parallel.ranks_per_node) == (4, 4, 2)
    assert parallel.dispatcher == "hybrid_ep" and config.optimizer.distributed


def test_derive_changes_only_what_it_names():
    base = get_recipe("tiny_cpu")
    derived = base.derive(seed=7, schedule={"train_steps": 60})
    assert derived.seed == 7 and derived.schedule.train_steps == 60
    assert derived.derive(seed=base.seed, schedule={"train_steps": base.schedule.train_steps}) == base


BAD = [
    ({"model": {"topk": 17}}, "model.topk=17"),
    ({"model": {"topk": 0}}, "model.topk=0"),
    ({"model": {"num_layers": -1}}, "model.num_layers=-1"),
    ({"model": {"hidden_size": 100}}, "model.hidden_size=100"),
    ({"model": {"num_experts": 18}}, "model.num_experts=18"),
    ({"model": {"dtype": "fp8"}}, "model.dtype='fp8'"),
    ({"model": {"aux_loss_coeff": -0.1}}, "model.aux_loss_coeff=-0.1"),
    ({"model": {"topk": "4"}}, "must be of type int"),
    ({"model": {"topk": True}}, "must be of type int"),
    ({"model": {"tpok": 4}}, "model.tpok: unknown field"),
    ({"parallel": {"dispatcher": "nccl"}}, "parallel.dispatcher='nccl'"),
    ({"parallel": {"expert_parallel_size": 3}}, "parallel.expert_parallel_size=3"),
    ({"parallel": {"ranks_per_node": 3}}, "parallel.ranks_per_node=3"),
    ({"parallel": {"balance_clones": "far"}}, "parallel.balance_clones='far'"),
    ({"parallel": {"balance_push": "mail"}}, "parallel.balance_push='mail'"),
    ({"parallel": {"num_ranks": 0}}, "parallel.num_ranks=0"),
    ({"data": {"held_out_one_in": 1}}, "data.held_out_one_in=1"),
    ({"data": {"source": ""}}, "data.source=''"),
    ({"optimizer": {"lr": 0.0}}, "optimizer.lr=0.0"),
    ({"optimizer": {"min_lr": 1.0}}, "optimizer.min_lr=1.0"),
    ({"optimizer": {"adam_beta2": 1.0}}, "optimizer.adam_beta2=1.0"),
    ({"schedule": {"train_steps": 0}}, "schedule.train_steps=0"),
    ({"schedule": {"warmup_steps": 10_000}}, "schedule.warmup_steps=10000"),
    ({"schedule": {"eval_sequences": 3}}, "schedule.eval_sequences=3"),
    ({"runtime": {"device": "tpu"}}, "runtime.device='tpu'"),
    ({"runtime": {"timeout_s": 0.0}}, "runtime.timeout_s=0.0"),
    ({"logging": {"checkpoint_every": 0}}, "logging.checkpoint_every=0"),
    ({"logging": {"profile_step": -1}}, "logging.profile_step=-1"),
    ({"schedule": {"train_steps": 50}, "logging": {"profile_step": 51}}, "logging.profile_step=51"),
    ({"modell": {}}, "modell"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError) as refusal:
        get_recipe("tiny_cpu").derive(**changes)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) > len(message) + 10, "the refusal must also say what to do"


@pytest.mark.parametrize("text", ["[1, 2]", "recipe: [", "seed: 3", "recipe: x\nmodel: 3"])
def test_damaged_yaml_is_refused(text):
    with pytest.raises(ValueError, match="config"):
        load_yaml(text)


def test_ranks_and_nodes_of_the_command_line_are_one_layout():
    parallel = make_config(parse_args(["tiny_cpu", "--ranks", "8", "--ranks-per-node", "8"]))[0].parallel
    assert (parallel.num_ranks, parallel.expert_parallel_size, parallel.ranks_per_node) == (8, 8, 8)
    assert make_config(parse_args(["tiny_cpu", "--ranks-per-node", "4"]))[0].parallel.ranks_per_node == 4
    with pytest.raises(ValueError, match="ranks_per_node=3: must divide"):
        make_config(parse_args(["tiny_cpu", "--ranks-per-node", "3"]))


def test_short_runs_shorten_the_warm_up(tmp_path):
    config, folder = make_config(parse_args(["tiny_cpu", "--steps", "20", "--runs-dir", str(tmp_path)]))
    assert folder is None
    assert (config.schedule.train_steps, config.schedule.warmup_steps) == (20, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huge_gpu"], "recipe='huge_gpu': unknown; choose one of tiny_cpu"),
        (["deepseek_v3"], "'deepseek_v3': runs on GPUs, by hybrid-ep launch deepseek_v3 --dry-run; deepseek_v3_proxy"),
        (
            ["tiny_cpu", "--ranks", "3"],
            "--ranks 3: parallel.ranks_per_node=2: must divide expert_parallel_size=3; --ra",
        ),
        (["tiny_cpu", "--spare-slots", "2"], "--spare-slots 2: needs --balance exact or both, not off"),
        (
            ["tiny_cpu", "--balance", "exact", "--balance-interval", "9"],
            "--balance-interval 9: needs --balance slow or both, not exact",
        ),
        (["tiny_cpu_smoke", "--stop-after", "100"], "stop_after=100: the run has 6 steps; give fewer, or --steps N"),
        (["tiny_cpu", "--steps", "0"], "schedule.train_steps=0"),
        (["tiny_cpu", "--steps", "9", "--stop-after", "0"], "stop_after=0"),
        (["tiny_cpu", "--steps", "9", "--profile-step", "10"], "logging.profile_step=10"),
        (["tiny_cpu", "--name", "../elsewhere"], "name='../elsewhere'"),
        (["--resume", "nothing"], "resume='nothing': no such run"),
    ],
)
def test_bad_command_lines_exit_2(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--runs-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a refused command must leave nothing behind"


def test_a_wrong_choice_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["tiny_cpu", "--balance", "exakt"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "argument --balance: invalid choice: 'exakt'" in said and said.count("\n") == 1


def test_a_resumed_run_profiles_a_step_that_is_still_to_come(tmp_path):
    config = get_recipe("tiny_cpu").derive(schedule={"train_steps": 60}, logging={"runs_dir": str(tmp_path)})
    folder = RunFolder.create(config, "halves")
    assert resumable_step(30, config, folder) == resumable_step(30, config, folder, profile_step=31) == 30
    assert resumable_step(30, config, folder, profile_step=0) == 30
    with pytest.raises(ValueError, match="profile_step=30: 'halves' goes on behind step 30; give a later step"):
        resumable_step(30, config, folder, profile_step=30)
    profiled = config.derive(logging={"profile_step": 4})  # of the run's first part: nothing that was asked for now
    assert resumable_step(30, profiled, folder) == 30


def test_list_shows_every_recipe(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
