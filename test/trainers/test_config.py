from __future__ import annotations

import typing
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from torchrl_trudi.modules.networks import ActivationName, NormName
from torchrl_trudi.modules.step_sizes import ScheduleName
from torchrl_trudi.trainers.config import (
    ConfigError,
    TrainConfig,
    config_table,
    resolve_device,
    validate,
)
from torchrl_trudi.trainers.options import options

LEAVES = {leaf.key: leaf for leaf in options(TrainConfig)}


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_defaults_are_valid():
    assert validate(TrainConfig()) == TrainConfig()
    assert validate({}) == TrainConfig()


def test_published_defaults():
    config = TrainConfig()
    assert (config.policy.num_steps, config.policy.init_std) == (8, 2.5)
    assert (config.policy.kind, config.trust_region.mode) == ("diffusion", "switch")
    # Null: those of the policy's kind, see test_builders.py.
    assert config.trust_region.kl is config.objective.target_entropy_scale is None
    assert (config.trust_region.eps, config.trust_region.init_multiplier) == (0.1, 0.01)
    assert config.optim.lr == 3e-4
    assert config.collector.frames_per_batch == 32 * config.env.num_envs


def test_every_option_is_documented():
    for leaf in LEAVES.values():
        assert leaf.help.endswith("."), leaf.key
        assert f"| `{leaf.key}` |" in config_table()


def test_names_are_those_the_modules_accept():
    assert set(LEAVES["policy.activation"].choices) == set(typing.get_args(ActivationName))
    assert set(LEAVES["policy.norm"].choices) == set(typing.get_args(NormName))
    assert set(LEAVES["policy.step_size_schedule"].choices) == set(typing.get_args(ScheduleName))


def test_validate_copies():
    config = TrainConfig()
    config.env.kwargs["a"] = 1
    checked = validate(config)
    assert checked == config
    checked.env.kwargs["a"] = 2
    assert config.env.kwargs["a"] == 1


def test_validate_accepts_dictconfig_and_resolves_it():
    config = OmegaConf.create({"seed": 5, "env": {"num_envs": 4}, "logger": {"dir": "x/${seed}"}})
    checked = validate(config)
    assert (checked.seed, checked.env.num_envs, checked.logger.dir) == (5, 4, "x/5")


def test_validate_converts_text():
    checked = validate({"optim": {"lr": "1.0e-4"}, "collector": {"total_frames": "400_000"}})
    assert checked.optim.lr == 1e-4
    assert checked.collector.total_frames == 400_000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("num_threads", 0),
        ("env.num_envs", 0),
        ("env.reward_scale", 0.0),
        ("env.max_episode_steps", 0),
        ("env.name", " "),
        ("env.vectorization", "threads"),
        ("collector.total_frames", 2047),
        ("collector.frames_per_batch", 0),
        ("collector.frames_per_batch", 2048 + 8),  # a multiple of num_minibatches only
        ("policy.num_steps", 0),
        ("policy.num_layers", 1),
        ("policy.init_std", 0.0),
        ("trust_region.eps", 0.0),
        ("trust_region.eps", -0.1),
        ("trust_region.eps", float("nan")),
        ("trust_region.init_multiplier", 0.0),
        ("trust_region.num_paths", 2),  # needs old_policy=target
        ("critic.vmin", 130.0),
        ("critic.vmin", float("-inf")),
        ("critic.num_bins", 1),
        ("critic.aux_coeff", -1.0),
        ("objective.gamma", 0.0),
        ("objective.gamma", 1.01),
        ("objective.lmbda", -0.1),
        ("objective.lmbda", 1.1),
        ("objective.init_temperature", 0.0),
        ("optim.lr", -1e-3),
        ("optim.lr", 0.0),
        ("optim.dual_lr", -1.0),
        ("optim.weight_decay", -1.0),
        ("optim.max_grad_norm", 0.0),
        ("optim.num_epochs", 0),
        ("logger.eval_interval", 0),
        ("logger.keep_checkpoints", 0),
        ("logger.dir", ""),
    ],
)
def test_bad_values(key, value):
    with pytest.raises(ConfigError) as error:
        validate(nested(key, value))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{key}: got {value!r}") and "accepted: " in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("objective.gamma", 1.0),
        ("objective.lmbda", 0.0),
        ("objective.lmbda", 1.0),
        ("optim.dual_lr", 0.0),
        ("critic.aux_coeff", 0.0),
        ("critic.num_layers", 1),
        ("collector.total_frames", 2048),
        ("logger.eval_episodes", 0),
        ("trust_region.old_policy", "target"),
    ],
)
def test_values_on_the_edge(key, value):
    validate(nested(key, value))


def test_cross_field_problems_are_all_listed():
    with pytest.raises(ConfigError) as error:
        validate(
            {
                "env": {"num_envs": 3},
                "collector": {"frames_per_batch": 100, "total_frames": 50},
                "critic": {"vmin": 2.0, "vmax": 1.0},
            }
        )
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "collector.frames_per_batch",
        "collector.frames_per_batch",
        "collector.total_frames",
        "critic.vmin",
    ]
    assert "env.num_envs=3" in lines[0] and "for instance 96" in lines[0]
    assert "optim.num_minibatches=8" in lines[1]
    assert "critic.vmax=1.0" in lines[3]


def test_more_paths_are_fine_with_target_parameters():
    validate({"trust_region": {"num_paths": 2, "old_policy": "target"}})


def test_unknown_choice_names_the_nearest():
    with pytest.raises(ConfigError, match=r"trust_region\.mode: got 'swich'.*'switch'.*none"):
        validate({"trust_region": {"mode": "swich"}})


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_unknown_key_names_the_nearest(wrap):
    with pytest.raises(ConfigError, match=r"^env\.nmae: unknown option, did you mean 'env\.name'"):
        validate(wrap({"env": {"nmae": "x"}}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "abc"}, r"^seed: got 'abc', accepted: an integer"),
        ({"seed": 1.5}, r"^seed: got 1\.5, accepted: an integer"),
        ({"seed": None}, r"^seed: got None, accepted: an int"),
        ({"optim": {"lr": "fast"}}, r"^optim\.lr: got 'fast', accepted: a number"),
        ({"policy": {"learn_prior": "maybe"}}, r"^policy\.learn_prior: .* true or false"),
        ({"policy": 3}, r"^policy: got 3, accepted: a section"),
        (["seed"], r"got a list, accepted: a TrainConfig"),
    ],
)
def test_wrong_types(given, message):
    with pytest.raises(ConfigError, match=message):
        validate(given)


def test_wrong_type_in_a_dataclass():
    config = TrainConfig()
    config.optim.lr = "fast"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"optim\.lr: got 'fast'"):
        validate(config)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="got 'cuda', accepted on this machine: auto, cpu$"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="got 'gpu'.*accepted: auto | cpu"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="^device: got 'tpu'"):
        validate({"device": "tpu"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="got 'cuda:2', accepted .*: auto, cpu, cuda:0, cuda:1$"):
        resolve_device("cuda:2")


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_no_option_is_read_from_a_file_by_accident():
    # The schema alone decides the defaults: the primary config file holds only Hydra's settings.
    root = Path(__file__).parents[2]
    primary = OmegaConf.load(root / "examples" / "config" / "trudi_humanoid.yaml")
    assert set(primary) == {"defaults", "hydra"}
