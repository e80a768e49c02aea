"""Options that fit no other option: those of another kind of policy or objective."""

from __future__ import annotations

import pytest

from torchrl_trudi.trainers.checks import _READERS
from torchrl_trudi.trainers.config import ConfigError, TrainConfig, validate
from torchrl_trudi.trainers.options import options

SHARED = {"in_keys", "kind", "hidden_size", "num_layers", "norm", "activation"}


def refused(config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate(config)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    "section, name, value",
    [
        ("policy", "num_steps", 4),
        ("policy", "step_size_schedule", "linear"),
        ("policy", "learn_step_sizes", "shared"),
        ("policy", "friction", "scalar"),
        ("policy", "learn_friction", False),
        ("policy", "init_std", 1.0),
        ("policy", "learn_prior", True),
        ("policy", "backward_network", True),
        ("objective", "actor_gradient", "adjoint"),
        ("objective", "num_adjoint_steps", 1),
        ("objective", "elbo_coeff", 0.1),
    ],
)
def test_a_gaussian_policy_refuses_what_it_does_not_have(section, name, value):
    config = {"policy": {"kind": "gaussian"}}
    validate(config)
    config.setdefault(section, {})[name] = value
    (line,) = refused(config)
    assert line.startswith(f"{section}.{name}: got {value!r}, accepted: the default ")
    assert "policy.kind=gaussian" in line and line.endswith("policy.kind=diffusion")


def test_a_diffusion_policy_refuses_what_it_does_not_have():
    (line,) = refused({"policy": {"init_scale": 0.5}})
    assert line == (
        "policy.init_scale: got 0.5, accepted: the default 1.0 with policy.kind=diffusion, which "
        "does not have this option; other values with policy.kind=gaussian"
    )
    validate({"policy": {"kind": "gaussian", "init_scale": 0.5}})


def test_what_both_have_is_accepted():
    values = {"hidden_size": 8, "num_layers": 2, "norm": "rms", "activation": "silu"}
    for kind in ("diffusion", "gaussian"):
        config = {
            "policy": {"kind": kind, **values},
            "trust_region": {"kl": "simplified", "old_policy": "target", "bound": "step"},
            "objective": {"target_entropy_scale": 1.0},
        }
        assert validate(config).trust_region.kl == "simplified"


def test_unknown_kind():
    (line,) = refused({"policy": {"kind": "gausian"}})
    assert line.startswith("policy.kind: got 'gausian' (did you mean 'gaussian'?), accepted: ")


@pytest.mark.parametrize(
    "key, value",
    [
        ("objective.init_temperature", 0.1),
        ("objective.target_entropy_scale", 1.0),
        ("objective.actor_gradient", "adjoint"),
        ("objective.entropy_fraction", 0.5),
        ("objective.elbo_coeff", 0.1),
        ("objective.reuse_actions", True),
        ("trust_region.old_policy", "target"),
        ("collector.chain_dtype", "bfloat16"),
        ("optim.autocast", True),
        ("critic.aux_coeff", 0.5),
    ],
)
def test_the_surrogate_refuses_what_it_does_not_have(key, value):
    section, name = key.split(".")
    config = {"objective": {"kind": "surrogate"}}
    validate(config)
    config.setdefault(section, {})[name] = value
    line = refused(config)[0]
    assert line.startswith(f"{key}: got {value!r}, accepted: the default ")
    assert line.endswith("other values with objective.kind=pathwise")


@pytest.mark.parametrize(
    "key, value",
    [
        ("objective.ratio", "step"),
        ("objective.clip_epsilon", 0.1),
        ("objective.normalize_advantage", False),
        ("objective.entropy", "surrogate"),
        ("objective.entropy_coeff", 0.1),
        ("critic.kind", "mse"),
    ],
)
def test_the_pathwise_objective_refuses_what_it_does_not_have(key, value):
    section, name = key.split(".")
    (line,) = refused({section: {name: value}})
    assert line.startswith(f"{key}: got {value!r}, accepted: the default ")
    assert line.endswith("other values with objective.kind=surrogate")
    given = {"objective": {"kind": "surrogate"}}
    given.setdefault(section, {})[name] = value
    validate(given)


def test_one_ratio_per_step_needs_steps():
    config = {"policy": {"kind": "gaussian"}, "objective": {"kind": "surrogate", "ratio": "step"}}
    (line,) = refused(config)
    assert line.startswith("objective.ratio: got 'step', accepted: the default path with policy.k")


def test_learning_rate_schedule():
    schedule = {"lr_schedule": "kl_adaptive"}
    validate({"optim": {**schedule, "max_lr": 3e-4}})
    (line,) = refused({"optim": {"max_lr": 1e-2}})
    assert line.startswith("optim.max_lr: got 0.01, accepted: the default 0.001 with optim.lr_sche")
    (line,) = refused({"optim": {**schedule, "max_lr": 1e-4}})
    assert line == "optim.max_lr: got 0.0001, accepted: at least optim.lr=0.0003"
    (line,) = refused({"optim": {**schedule, "cudagraphs": True}})
    assert line.startswith("optim.lr_schedule: got 'kl_adaptive', accepted: 'constant'")


def test_every_option_of_the_policy_is_sorted():
    """A new option says whose it is."""
    keys = {leaf.key for leaf in options(TrainConfig)}
    for chooser, readers in _READERS.items():
        sorted_here = [key for group in readers.values() for key in group]
        assert chooser in keys and set(sorted_here) <= keys
        assert len(set(sorted_here)) == len(sorted_here)
    of_kinds = {key for group in _READERS["policy.kind"].values() for key in group}
    policy = {key.split(".")[1] for key in keys if key.startswith("policy.")}
    of_kinds = {key.split(".")[1] for key in of_kinds if key.startswith("policy.")}
    assert policy == SHARED | of_kinds and not SHARED & of_kinds


@pytest.mark.parametrize("old_policy", ["replayed", "target"])
@pytest.mark.parametrize(
    "key, value",
    [("chain_dtype", "bfloat16"), ("num_paths", 2), ("direction", "reverse")],
)
def test_what_needs_paths_of_a_kind(old_policy, key, value):
    section = "collector" if key == "chain_dtype" else "trust_region"
    config = {"trust_region": {"old_policy": old_policy}}
    config.setdefault(section, {})[key] = value
    if old_policy == "target" and key != "chain_dtype":
        validate(config)
        return
    (line,) = refused(config)
    assert line.startswith(f"{section}.{key}: got {value!r}, accepted: ")
    assert f"with trust_region.old_policy={old_policy}" in line


@pytest.mark.parametrize(
    "section, name, value",
    [
        ("trust_region", "mode", "lagrangian"),
        ("trust_region", "old_policy", "target"),
        ("optim", "compile", True),
        ("optim", "cudagraphs", True),
    ],
)
def test_entropy_of_some_states_needs_the_split(section, name, value):
    config = {"objective": {"entropy_fraction": 0.5}, section: {name: value}}
    (line,) = refused(config)
    assert line.startswith("objective.entropy_fraction: got 0.5, accepted: 1 with ")
    config["objective"]["entropy_fraction"] = 1.0
    validate(config)


@pytest.mark.parametrize(
    "section, name, value", [("collector", "chain_dtype", "bfloat16"), ("optim", "autocast", True)]
)
def test_a_gaussian_policy_is_not_rounded(section, name, value):
    (line,) = refused({"policy": {"kind": "gaussian"}, section: {name: value}})
    assert line.startswith(f"{section}.{name}: got {value!r}, accepted: ")


@pytest.mark.parametrize("gradient, steps", [("pathwise", 3), ("adjoint", 9)])
def test_adjoint_steps(gradient, steps):
    objective = {"actor_gradient": gradient, "num_adjoint_steps": steps}
    (line,) = refused({"objective": objective})
    assert line.startswith(f"objective.num_adjoint_steps: got {steps}, accepted: ")
    validate({"objective": {"actor_gradient": "adjoint", "num_adjoint_steps": 8}})


@pytest.mark.parametrize(
    "section, name, value",
    [
        ("trust_region", "share", "proportional"),
        ("trust_region", "old_policy", "target"),
        ("objective", "actor_gradient", "adjoint"),
        ("objective", "entropy_fraction", 0.5),
    ],
)
def test_what_a_projected_policy_cannot_do(section, name, value):
    config = {"trust_region": {"mode": "projection"}}
    validate(config)
    config.setdefault(section, {})[name] = value
    (line,) = refused(config)
    assert line.startswith(f"{section}.{name}: got {value!r}, accepted: ")


@pytest.mark.parametrize("name, value", [("share", "proportional"), ("regression_coeff", 0.5)])
def test_what_is_read_in_projection_mode_alone(name, value):
    (line,) = refused({"trust_region": {name: value}})
    assert line.startswith(f"trust_region.{name}: got {value!r}, accepted: the default ")
    assert "trust_region.mode=switch" in line and line.endswith("trust_region.mode=projection")


@pytest.mark.parametrize("kind", ["diffusion", "gaussian"])
def test_the_surrogate_objective_takes_projected_kernels(kind):
    config = {
        "policy": {"kind": kind},
        "trust_region": {"mode": "projection", "regression_coeff": 0.5},
        "objective": {"kind": "surrogate"},
    }
    validate(config)
    # Of equal shares, since its policy acts projected too.
    config["trust_region"]["share"] = "proportional"
    (line,) = refused(config)
    assert line.startswith("trust_region.share: got 'proportional', accepted: 'uniform'")
    assert "objective.kind=surrogate" in line and "acts projected" in line


def test_projection_mode_takes_the_rest():
    region = {"mode": "projection", "regression_coeff": 3.0, "eps": 0.2, "kl": "full"}
    for kind in ("diffusion", "gaussian"):
        for old_policy in ("recorded", "replayed"):
            validate(
                {"policy": {"kind": kind}, "trust_region": {**region, "old_policy": old_policy}}
            )


@pytest.mark.family
@pytest.mark.parametrize("name, value", [("old_policy", "target"), ("mode", "projection")])
def test_the_evidence_bound_needs_recorded_ends_and_backward_kernels(name, value):
    (line,) = refused({"objective": {"elbo_coeff": 0.1}, "trust_region": {name: value}})
    assert line.startswith("objective.elbo_coeff: got 0.1, accepted: 0 with ") and value in line
    validate({"objective": {"elbo_coeff": 0.1}, "trust_region": {"old_policy": "replayed"}})
