"""Observations of several entries, of which actor and critic read different ones."""

from __future__ import annotations

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import check_env_specs
from torchrl.modules import GRUModule, LSTMModule

from torchrl_trudi.envs import (
    MujocoBatchEnv,
    MujocoTask,
    get_observation_keys,
    get_observation_norm,
    make_env,
    register_task,
)
from torchrl_trudi.envs.mujoco.task import _REGISTRY
from torchrl_trudi.modules import DiffusionActor, HLGaussCritic, HLGaussValueOperator
from torchrl_trudi.objectives import (
    SoftTDLambdaEstimator,
    TrajectoryKLProjection,
    TruDiLoss,
    TruDiPPOLoss,
)
from torchrl_trudi.record import evaluate
from torchrl_trudi.trainers import ConfigError, validate
from torchrl_trudi.trainers import builders as builders_module
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss

LIMIT = 6
GYMNASIUM, MUJOCO = "TestPrivileged-v0", "TestPrivilegedHinge-v0"
PRIVILEGED = {"policy": {"in_keys": ["policy"]}, "critic": {"in_keys": ["privileged", "goal/xy"]}}


class Privileged(gymnasium.Env):
    """The policy sees noise and the last action; the step count is privileged, and the goal is nested."""

    def __init__(self) -> None:
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(
            policy=spaces.Box(-np.inf, np.inf, (3,), np.float32),
            privileged=spaces.Box(-np.inf, np.inf, (1,), np.float64),
            goal=spaces.Dict(xy=spaces.Box(-np.inf, np.inf, (2,), np.float32)),
            image=spaces.Box(0, 255, (2, 2), np.uint8),
        )

    def _observe(self, action):
        noise = self.np_random.standard_normal(1)
        return {
            "policy": np.concatenate([noise, action]).astype(np.float32),
            "privileged": np.array([self.count], np.float64),
            "goal": {"xy": np.array([10.0 + self.count, -self.count], np.float32)},
            "image": np.zeros((2, 2), np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(np.zeros(2)), {}

    def step(self, action):
        self.count += 1
        return self._observe(action), 1.0 - float(np.square(action).sum()), False, False, {}


HINGE = """<mujoco>
  <option timestep=".01"/>
  <worldbody>
    <body><joint name="hinge" axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 -.5" size=".03"/></body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator>
</mujoco>"""


class Hinge(MujocoTask):
    """The velocity is privileged. ``flat=True`` returns the same numbers as one entry."""

    def __init__(
        self, flat: bool = False, names: tuple[str, str] = ("policy", "privileged")
    ) -> None:
        model = mujoco.MjSpec.from_string(HINGE)
        super().__init__(model, frame_skip=2, max_episode_steps=LIMIT)
        self.flat, self.names = flat, names

    def initial_state(self, sims, rng):
        return rng.uniform(-1.0, 1.0, 1), rng.uniform(-1.0, 1.0, 1)

    def observation(self, sims):
        policy, privileged = (np.cos(sims.qpos), np.sin(sims.qpos)), sims.qvel
        if self.flat:
            return (*policy, privileged)
        # Not in the order of the names.
        return {self.names[1]: privileged, self.names[0]: policy}

    def reward(self, sims, action, before, after):
        return np.cos(sims.qpos[:, 0])


@pytest.fixture(autouse=True)
def _tasks():
    gymnasium.register(GYMNASIUM, entry_point=Privileged, max_episode_steps=LIMIT)
    register_task(MUJOCO, Hinge)
    yield
    del gymnasium.registry[GYMNASIUM], _REGISTRY[MUJOCO]


def config_of(name=GYMNASIUM, **sections):
    """A small run of the task."""
    config = {
        "env": {"name": name, "num_envs": 2, "backend": "gymnasium"},
        "policy": {"hidden_size": 8},
        "critic": {"hidden_size": 8, "num_bins": 21, "vmin": -10, "vmax": 10},
        "collector": {"total_frames": 64, "frames_per_batch": 32},
        "optim": {"num_minibatches": 2, "num_epochs": 1},
        "logger": {"eval_episodes": 2, "eval_interval": 64, "progress": False},
        "device": "cpu",
    }
    if name == MUJOCO:
        config["env"]["backend"] = "mujoco"
    for key, value in sections.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return validate(config)


def build(**sections):
    config = config_of(**{**PRIVILEGED, **sections})
    env = build_env(config)
    actor = build_actor(config, env)
    return env, actor, build_loss(config, actor, build_critic(config, env))


def collect(env, actor, frames=32):
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=frames,
        auto_register_policy_transforms=False,
    )
    return next(iter(collector))


SURROGATE = {"objective": {"kind": "surrogate"}}
each_objective = pytest.mark.parametrize(
    "objective", [{}, SURROGATE], ids=["pathwise", "surrogate"]
)
each_policy = pytest.mark.parametrize("kind", ["diffusion", "gaussian"])


# -- environments --------------------------------------------------------------------------


class TestEntriesOfATask:
    def test_the_same_numbers_as_in_one_entry(self):
        grouped, flat = (
            MujocoBatchEnv(Hinge(flat=flat), 3, seed=0, num_threads=1) for flat in (False, True)
        )
        check_env_specs(grouped)
        envs = [grouped, flat]
        for env in envs:
            env.set_seed(1)
        carried = [env.reset() for env in envs]
        for _ in range(LIMIT + 2):  # over the end of an episode
            stepped = []
            for i, env in enumerate(envs):
                carried[i]["action"] = torch.full((3, 1), 0.5)
                step, carried[i] = env.step_and_maybe_reset(carried[i])
                stepped.append(step["next"])
            for part, whole in (stepped, carried):
                both = torch.cat([part["policy"], part["privileged"]], -1)
                assert torch.equal(both, whole["observation"])

    def test_specs_and_normalisation(self):
        env = make_env(MUJOCO, 2, seed=0)
        check_env_specs(env)
        assert get_observation_keys(env) == ["policy", "privileged"]
        assert env.observation_spec["policy"].shape == (2, 2)
        norm = get_observation_norm(env)
        assert norm.in_keys == ["policy", "privileged"]
        assert norm.get_statistics("privileged").shape == (1,)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("policy", "reward"), "returns an entry 'reward', a name that the environment"),
            (("policy", 3), "a mapping from names to arrays; got .* under 3"),
        ],
    )
    def test_bad_names(self, names, message):
        with pytest.raises(ValueError, match=message):
            MujocoBatchEnv(Hinge(names=names))

    def test_a_nested_or_an_empty_entry(self):
        class Nested(Hinge):
            def observation(self, sims):
                return {"policy": {"cos": np.cos(sims.qpos)}}

        with pytest.raises(ValueError, match="got dict under 'policy'"):
            MujocoBatchEnv(Nested())

        class Empty(Hinge):
            def observation(self, sims):
                return {"policy": sims.qpos, "privileged": sims.qpos[:, :0]}

        with pytest.raises(ValueError, match="returns nothing under 'privileged'"):
            MujocoBatchEnv(Empty())


def test_final_observations_of_every_entry():
    env = make_env(GYMNASIUM, 3, seed=0, backend="gymnasium", normalize_observation=False)
    data = env.rollout(2 * LIMIT + 3, break_when_any_done=False)
    assert data["next", "done"].any()
    count = data["privileged"]
    assert torch.equal(data["next", "privileged"], count + 1)
    goal = torch.cat([11 + count, -1 - count], -1)
    assert torch.equal(data["next", "goal", "xy"], goal)
    # What the policy sees ends with the action.
    assert torch.equal(data["next", "policy"][..., 1:], data["action"])


def test_each_entry_has_statistics_of_its_own_which_evaluation_shares():
    config = config_of(
        env={"name": GYMNASIUM, "num_envs": 2, "normalize_keys": ["policy", "goal/xy"]}
    )
    env = build_env(config)
    norm = get_observation_norm(env)
    assert norm.in_keys == ["policy", ("goal", "xy")]
    data = env.rollout(20, break_when_any_done=False)
    assert data["privileged"].max() == LIMIT - 1  # as it came
    assert norm.get_statistics(("goal", "xy")).mean[0] > 10
    assert data["goal", "xy"].abs().max() < 10
    eval_env = build_env(config, num_envs=4, seed=1, observation_norm=norm)
    shared = get_observation_norm(eval_env)
    assert shared.frozen
    for key in norm.in_keys:
        assert shared.get_statistics(key) is norm.get_statistics(key)
        count = norm.get_statistics(key).count.item()
        eval_env.rollout(3)
        assert norm.get_statistics(key).count.item() == count


def test_the_state_of_all_normalisers_is_restored():
    env, other = (make_env(GYMNASIUM, 2, seed=seed, backend="gymnasium") for seed in (0, 1))
    env.rollout(7, break_when_any_done=False)
    norm, restored = get_observation_norm(env), get_observation_norm(other)
    restored.load_state_dict(norm.state_dict())
    for key in ("policy", "privileged", ("goal", "xy")):
        for name in ("count", "mean", "var"):
            first, second = (getattr(each.get_statistics(key), name) for each in (norm, restored))
            assert torch.equal(first, second) and (name != "count" or first == 18)


# -- which network reads what ----------------------------------------------------------------


@each_objective
@each_policy
def test_networks_read_their_own_entries(kind, objective):
    env, actor, loss = build(
        policy={"in_keys": ["policy"], "kind": kind, "hidden_size": 8}, **objective
    )
    assert actor.observation_keys == ["policy"]
    keys = list(loss.critic_network.in_keys)
    assert keys == ["privileged", ("goal", "xy"), *([] if objective else ["action"])]
    kept = loss.minibatch_keys
    assert {"policy", "privileged", ("goal", "xy")} <= set(kept) and "image" not in kept
    data = collect(env, actor)
    loss.value_estimator(data)
    batch = data.select(*kept).reshape(-1)
    losses = loss(batch)
    total = sum(value for key, value in losses.items() if key.startswith("loss_"))
    assert total.isfinite()
    total.backward()
    assert all(p.grad is not None for p in loss.actor_parameters())


@each_objective
def test_a_policy_that_acts_projected_reads_its_own_entries(objective):
    env, actor, loss = build(
        policy={"in_keys": ["policy"], "hidden_size": 8},
        trust_region={"mode": "projection"},
        **objective,
    )
    assert actor.observation_keys == ["policy"]
    data = collect(env, actor)
    loss.value_estimator(data)
    losses = loss(data.select(*loss.minibatch_keys).reshape(-1))
    assert all(value.isfinite().all() for value in losses.values())


def test_null_takes_every_entry_of_the_task():
    config = config_of(MUJOCO)
    env = build_env(config)
    actor, critic = build_actor(config, env), build_critic(config, env)
    assert actor.observation_keys == ["policy", "privileged"]
    assert list(critic.in_keys) == ["policy", "privileged", "action"]


def test_what_randomisation_drew_can_be_privileged():
    from torchrl_trudi.envs import ModelRandomization

    names = ["observation", "randomization/body_mass"]
    config = config_of(
        "InvertedPendulum-v5", env={"name": "InvertedPendulum-v5"}, critic={"in_keys": names}
    )
    env = make_env(
        "InvertedPendulum-v5", 2, seed=0, randomization=[ModelRandomization("body_mass", 0.5, 2.0)]
    )
    actor, critic = build_actor(config, env), build_critic(config, env)
    assert actor.observation_keys == ["observation"]
    assert list(critic.in_keys)[:2] == ["observation", ("randomization", "body_mass")]
    data = actor(env.reset())
    assert critic(data)["state_action_value"].shape == (2, 1)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"policy": {"in_keys": ["polcy"]}},
            "policy.in_keys: got 'polcy', which is not an entry .*mean 'policy'.*accepted: .*goal/xy",
        ),
        ({"critic": {"in_keys": ["goal.xy"]}}, "critic.in_keys: got 'goal.xy'.*mean 'goal/xy'"),
        (
            {"critic": {"in_keys": ["privileged", "image"]}},
            r"critic.in_keys: got 'image', .*shape \(2, 2\) and the type torch.uint8; accepted: ",
        ),
        ({"policy": {"in_keys": None}}, "policy.in_keys: got null, and the entry 'image' has"),
        (
            {"env": {"normalize_keys": ["polcy"]}},
            "env: the key 'polcy' cannot be normalised.*'policy'",
        ),
        ({"env": {"normalize_keys": ["image"]}}, "env: the key 'image' cannot be normalised"),
    ],
)
def test_bad_entries(sections, message):
    with pytest.raises(ConfigError, match=message):
        merged = {key: {**value, **sections.get(key, {})} for key, value in PRIVILEGED.items()}
        env = {"env": {"name": GYMNASIUM, "num_envs": 2, **sections.get("env", {})}}
        build(**{**merged, **env})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"in_keys": []}}, r"policy.in_keys: got \[\], accepted: null, or names"),
        ({"critic": {"in_keys": ["a", "a"]}}, r"critic.in_keys: got \[a, a\], .* each once"),
        ({"critic": {"in_keys": "a"}}, "critic.in_keys: got 'a', accepted: a list such as"),
        (
            {"env": {"normalize_keys": ["a"], "normalize_observation": False}},
            r"env.normalize_keys: got \[a\], accepted: null with env.normalize_observation=false",
        ),
    ],
)
def test_bad_options(sections, message):
    with pytest.raises(ConfigError, match=message):
        validate(sections)


# -- nothing privileged reaches the actor ----------------------------------------------------


@each_policy
def test_actions_do_not_depend_on_privileged_entries(kind):
    env, actor, _ = build(policy={"in_keys": ["policy"], "kind": kind, "hidden_size": 8})
    data = env.reset()
    other = data.clone()
    other["privileged"] += 100
    other["goal", "xy"] = torch.full_like(other["goal", "xy"], float("nan"))
    torch.manual_seed(0)
    first = actor(data)["action"]
    torch.manual_seed(0)
    assert torch.equal(first, actor(other)["action"])


@each_objective
def test_the_actor_has_no_gradient_to_privileged_entries(objective):
    env, actor, loss = build(**objective)
    data = collect(env, actor)
    loss.value_estimator(data)
    batch = data.reshape(-1)
    inputs = {key: batch[key].clone().requires_grad_() for key in ("policy", "privileged")}
    batch = batch.clone().update(inputs)
    # Through the policy alone: its distribution on the recorded chain, and a fresh chain.
    outputs = [actor.log_prob(batch).sum(), actor.rsample(batch)[0].sum()]
    for output in outputs:
        policy, privileged = torch.autograd.grad(
            output, list(inputs.values()), allow_unused=True, retain_graph=True
        )
        assert policy.abs().sum() > 0 and privileged is None
    if objective:  # no critic in the actor's loss
        losses = loss.actor_loss(batch)
        total = losses["loss_objective"] + losses["loss_trajectory_kl"]
        assert torch.autograd.grad(total, inputs["privileged"], allow_unused=True) == (None,)


def test_targets_read_the_privileged_entry_of_the_true_next_state():
    """With ``Q(s, a)`` the privileged count, which an autoreset would put back to zero."""
    from tensordict.nn import TensorDictModule

    env = make_env(GYMNASIUM, 2, seed=0, backend="gymnasium", normalize_observation=False)
    config = config_of(**PRIVILEGED)
    actor = build_actor(config, env)
    critic = TensorDictModule(
        lambda count, action: count, ["privileged", "action"], ["state_action_value"]
    )
    data = collect(env, actor, 2 * (2 * LIMIT + 3))
    SoftTDLambdaEstimator(gamma=0.5, lmbda=0.0, value_network=critic, actor_network=actor)(data)
    following = data["next"]
    assert following["truncated"].any()
    expected = following["reward"] + 0.5 * (data["privileged"] + 1)
    torch.testing.assert_close(data["value_target"], expected)


def test_evaluation():
    env, actor, _ = build()
    config = config_of(**PRIVILEGED)
    eval_env = build_env(config, num_envs=3, seed=1, observation_norm=get_observation_norm(env))
    env.rollout(5)
    result = evaluate(eval_env, actor, 4)
    assert result.lengths.tolist() == [LIMIT] * 4


# -- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param({}, id="pathwise"),
        pytest.param(SURROGATE, id="surrogate", marks=pytest.mark.slow),
    ],
)
def test_a_run_and_its_continuation(script, tmp_path, monkeypatch, objective):
    made = []

    def remembered(*args, **kwargs):
        made.append(build_env(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(builders_module, "build_env", remembered)
    sections = {**PRIVILEGED, **objective, "logger": {"dir": str(tmp_path / "run")}}
    run = script.train(config_of(**sections))
    norm = get_observation_norm(made[0])
    counts = {key: norm.get_statistics(key).count.item() for key in norm.in_keys}
    assert len(counts) == 3 and len(set(counts.values())) == 1
    made.clear()
    sections |= {"collector": {"total_frames": 96, "frames_per_batch": 32}}
    script.train(config_of(**sections, resume=str(run)))
    # 32 frames more, two resets at the start and one at each end.
    norm = get_observation_norm(made[0])
    for key in norm.in_keys:
        assert 34 <= norm.get_statistics(key).count.item() - counts[key] <= 34 + 32 // LIMIT + 2
    changed = {"critic": {"in_keys": ["privileged"]}}
    with pytest.raises(ConfigError, match=r"critic.in_keys: \[privileged, goal/xy\] -> \[priv"):
        script.train(config_of(**{**sections, **changed}, resume=str(run)))


def test_a_run_of_a_task_of_one_s_own(script, tmp_path):
    sections = {
        "policy": {"in_keys": ["policy"]},
        "critic": {"in_keys": ["policy", "privileged"]},
        "logger": {"dir": str(tmp_path / "run")},
    }
    script.train(config_of(MUJOCO, **sections))


# -- recurrent networks ----------------------------------------------------------------------


class Remembering(nn.Module):
    """A score network with a recurrent module of torchrl inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


LSTM = {"input_size": 3, "hidden_size": 4, "in_key": "observation", "out_key": "features"}
each_module = pytest.mark.parametrize("module", [LSTMModule, GRUModule])


class TestRecurrentNetworksAreRefused:
    @each_module
    def test_inside_of_the_policy(self, module):
        network = Remembering(module(**LSTM))
        with pytest.raises(
            NotImplementedError, match=f"the policy has {module.__name__}.*CatFrames"
        ):
            DiffusionActor(2, score_network=network)

    @pytest.mark.parametrize("key", ["is_init", "recurrent_state_h", ("agent", "recurrent_state")])
    def test_as_an_input_of_the_policy(self, key):
        with pytest.raises(NotImplementedError, match="the policy has the input"):
            DiffusionActor(2, obs_dim=4, in_keys=["observation", key])

    def test_as_an_input_of_the_critic(self):
        with pytest.raises(NotImplementedError, match="the critic has the input 'is_init'"):
            HLGaussValueOperator(HLGaussCritic(4, -1.0, 1.0), ["observation", "is_init"])

    @each_module
    def test_before_the_policy(self, module):
        from tensordict.nn import TensorDictSequential

        actor = DiffusionActor(2, obs_dim=4, in_keys=["features"], return_chain=True)
        policy = TensorDictSequential(module(**LSTM), actor)
        critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0))
        value = HLGaussValueOperator(HLGaussCritic(3, -1.0, 1.0), ["observation"])
        for made in (
            lambda: TrajectoryKLProjection(policy),
            lambda: TruDiLoss(policy, critic),
            lambda: TruDiPPOLoss(policy, value),
        ):
            with pytest.raises(NotImplementedError, match=f"the policy has {module.__name__}"):
                made()

    @each_module
    def test_before_the_critic(self, module):
        from tensordict.nn import TensorDictSequential

        actor = DiffusionActor(2, obs_dim=3)
        inner = HLGaussValueOperator(HLGaussCritic(6, -1.0, 1.0), ["features", "action"])
        critic = TensorDictSequential(module(**LSTM), inner)
        for made in (
            lambda: TruDiLoss(actor, critic),
            lambda: SoftTDLambdaEstimator(
                gamma=0.9, lmbda=0.9, value_network=critic, actor_network=actor
            ),
        ):
            with pytest.raises(NotImplementedError, match=f"the critic has {module.__name__}"):
                made()

    def test_a_window_of_observations_is_no_state(self):
        network = Remembering(nn.GRU(3, 4))
        DiffusionActor(2, score_network=network)
