"""The published settings, value by value."""

from __future__ import annotations

import pytest

from torchrl_trudi.envs.suites import PRESETS, get_preset, list_tasks, maniskill_gamma
from torchrl_trudi.trainers import TrainConfig, validate
from torchrl_trudi.trainers.options import options

# envs, T, minibatches, epochs, gamma, vmin, vmax, layers, width, norm, alpha_0
PUBLISHED = {
    "playground_dmc": (1024, 128, 64, 8, 0.99, 0, 150, 4, 256, "none", 0.01),
    "playground_dmc_small": (1024, 32, 16, 8, 0.99, 0, 150, 4, 256, "none", 0.01),
    "playground_humanoid": (1024, 128, 16, 8, 0.97, -10, 10, 4, 256, "none", 1.0),
    "maniskill": (1024, 128, 64, 4, None, -15, 15, 3, 512, "layer", 1.0),
    "humanoid_bench": (64, 128, 4, 8, 0.99, -250, 250, 3, 512, "layer", 1.0),
}


def test_names():
    assert set(PRESETS) == set(PUBLISHED)
    assert {task.preset for task in list_tasks()} <= {*PUBLISHED, None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_values(name):
    preset = get_preset(name)
    assert (
        preset.num_envs,
        preset.steps_per_env,
        preset.num_minibatches,
        preset.num_epochs,
        preset.gamma,
        preset.vmin,
        preset.vmax,
        preset.num_layers,
        preset.hidden_size,
        preset.norm,
        preset.init_temperature,
    ) == PUBLISHED[name]
    assert preset.total_frames == 50_000_000
    assert (preset.num_steps, preset.eps, preset.init_multiplier) == (8, 0.1, 0.01)
    assert (preset.target_entropy_scale, preset.reward_scale) == (4, 1)


@pytest.mark.parametrize(
    ("task", "bound"),
    [
        ("reach", 2000),
        ("truck", 1000),
        ("maze", 1000),
        ("push", 1000),
        ("basketball", 2000),
        ("package", 10_000),
        ("walk", 250),
        ("sit_hard", 250),
    ],
)
def test_value_ranges_of_humanoid_bench(task, bound):
    for name in (f"h1hand-{task}-v0", f"humanoid_bench/h1hand-{task}-v0", f"h1-{task}-v0"):
        assert get_preset("humanoid_bench").value_range(name) == (-bound, bound)


def test_gamma_of_maniskill():
    assert maniskill_gamma(50) == pytest.approx(0.8)
    assert maniskill_gamma(100) == pytest.approx(0.9)
    assert get_preset("maniskill").discount(200) == pytest.approx(0.95)
    with pytest.raises(ValueError, match="give max_episode_steps"):
        get_preset("maniskill").settings("PickCube-v1")
    with pytest.raises(ValueError, match="at least 11"):
        maniskill_gamma(10)


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_those_of_a_run(name):
    settings = get_preset(name).settings("any", max_episode_steps=50)
    assert set(settings) <= {leaf.key for leaf in options(TrainConfig)}
    nested: dict = {}
    for key, value in settings.items():
        section, option = key.split(".")
        nested.setdefault(section, {})[option] = value
    config = validate(nested)
    assert config.collector.frames_per_batch == PUBLISHED[name][0] * PUBLISHED[name][1]


def test_unknown():
    with pytest.raises(ValueError, match="Did you mean 'maniskill'"):
        get_preset("maniskil")
