"""The parts together, with torchrl's, and the example script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.envs.utils import check_env_specs
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss
from torchrl.objectives.value import GAE

from torchrl_trudi.envs import get_observation_norm, make_env
from torchrl_trudi.modules import DiffusionActor, HLGaussCritic, HLGaussValueOperator, ScoreNetwork
from torchrl_trudi.record import evaluate, read_scalars
from torchrl_trudi.trainers import ConfigError, make_run_dir, resumed_config, validate
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "trudi_humanoid.py"
STEPS = 3


def build(num_envs=2, *, event_dims=2, name="Pendulum-v1", num_steps=STEPS):
    env = make_env(name, num_envs, seed=0)
    action_dim = env.action_spec.shape[-1]
    obs_dim = env.observation_spec["observation"].shape[-1]
    actor = DiffusionActor(
        action_dim,
        score_network=ScoreNetwork(action_dim, obs_dim, hidden_size=8, output_gain=1.0),
        num_steps=num_steps,
        spec=env.action_spec,
        return_chain=True,
        return_dist_params=True,
        return_log_prob=True,
        return_path_log_prob=True,
        event_dims=event_dims,
    )
    return env, actor


def state_value(obs_dim=3):
    critic = HLGaussCritic(obs_dim, -5.0, 5.0, num_bins=21, hidden_size=8)
    return HLGaussValueOperator(critic, in_keys=["observation"])


def collect(env, actor, frames=32):
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=frames,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


class TestActorInTorchRL:
    @pytest.mark.parametrize("name", ["Pendulum-v1", "InvertedPendulum-v5"])
    def test_rollout(self, name):
        env, actor = build(3, name=name)
        check_env_specs(env)
        data = env.rollout(4, actor, break_when_any_done=False)
        assert data.shape == (3, 4)
        action, spec = data["action"], env.action_spec
        assert (action >= spec.space.low.unsqueeze(1)).all()
        assert (action <= spec.space.high.unsqueeze(1)).all()
        assert action.std() > 0
        env.close()

    def test_collector(self):
        """The batch holds the acting policy: its chain, means and scales at every step."""
        env, actor = build(2)
        data = collect(env, actor)
        assert data.shape == (2, 16)
        shapes = {
            "chain": (2, 16, STEPS + 1, 1),
            "loc": (2, 16, STEPS, 1),
            "scale": (2, 16, STEPS, 1),
            "log_prob": (2, 16),
            "path_log_prob": (2, 16),
        }
        assert {key: tuple(data["denoising", key].shape) for key in shapes} == shapes
        assert ("next", "denoising", "chain") not in data.keys(True)
        chain = data["denoising", "chain"]
        torch.testing.assert_close(actor.module.squash(chain[..., -1, :]), data["action"])
        # Each row's chain belongs to that row's observation.
        with torch.no_grad():
            loc, scale = actor.module.score(data["observation"], chain)
        torch.testing.assert_close(loc, data["denoising", "loc"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scale.expand_as(loc), data["denoising", "scale"])
        # A new chain at every step.
        assert len(chain[..., 0, :].unique()) == 32

    def test_a_new_chain_where_an_old_one_is(self):
        _, actor = build()
        data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        before = data["denoising", "chain"].clone()
        with set_exploration_type(ExplorationType.RANDOM):
            assert (actor(data)["denoising", "chain"] != before).all()

    @pytest.mark.parametrize("event_dims", [1, 2])
    def test_clip_ppo_with_gae(self, event_dims):
        """Ratio 1 before the first step, and a step that lowers the loss."""
        env, actor = build(2, event_dims=event_dims)
        critic = state_value()
        data = collect(env, actor)
        GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)(data)
        loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0)
        # PPO's per-sample weights come from the chain's log-probability.
        assert data["denoising", "path_log_prob"].shape == (2, 16, STEPS)[: event_dims % 2 + 2]
        flat = data.reshape(-1)
        out = loss(flat)
        losses = [value for key, value in out.items() if key.startswith("loss_")]
        assert len(losses) >= 2 and all(value.isfinite() for value in losses)
        assert out["kl_approx"].abs() < 1e-4
        assert out["clip_fraction"] == 0
        ess = out["ESS"]
        torch.testing.assert_close(ess, torch.ones_like(ess), rtol=1e-3, atol=0)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
        sum(losses).backward()
        assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)
        assert actor.module.score_network.output.weight.grad.abs().sum() > 0
        optimizer.step()
        after = loss(flat)
        assert after["kl_approx"].abs() > out["kl_approx"].abs()
        assert after["loss_objective"] < out["loss_objective"]

    @pytest.mark.parametrize(
        "loss_class, options",
        [
            (PPOLoss, {"entropy_coeff": 0.01}),
            (KLPENPPOLoss, {"entropy_coeff": 0.01}),
            (A2CLoss, {"entropy_coeff": 0.01}),
            (ReinforceLoss, {}),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_other_policy_gradient_losses(self, loss_class, options):
        env, actor = build(2)
        critic = state_value()
        data = collect(env, actor)
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)
        loss = loss_class(actor, critic, **options)
        if loss_class in (A2CLoss, ReinforceLoss):
            # These do not ask the actor which entry is its sample.
            loss.set_keys(action=actor.tensor_keys.chain)
        out = loss(data.reshape(-1))
        losses = {key: value for key, value in out.items() if key.startswith("loss_")}
        assert len(losses) >= 2
        assert all(value.isfinite().all() for value in losses.values()), losses
        sum(value.sum() for value in losses.values()).backward()
        grad = actor.module.score_network.output.weight.grad
        assert grad.isfinite().all() and grad.abs().sum() > 0
        if loss_class is KLPENPPOLoss:
            assert out["kl"].abs().max() < 1e-5


TINY = {
    "env": {"name": "InvertedPendulum-v5", "num_envs": 2, "max_episode_steps": 30},
    "collector": {"frames_per_batch": 32, "total_frames": 64},
    "policy": {"hidden_size": 8, "num_steps": 3},
    "critic": {"hidden_size": 8, "num_bins": 21, "vmin": -5.0, "vmax": 15.0},
    "optim": {"num_minibatches": 2, "num_epochs": 1},
    "logger": {"eval_episodes": 2, "progress": False},
    "device": "cpu",
    "num_threads": 1,
}


def tiny(**sections):
    """The configuration of a run of two iterations, with changes by section."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for key, value in sections.items():
        if isinstance(value, dict):
            config.setdefault(key, {}).update(value)
        else:
            config[key] = value
    return validate(config)


def train_from_parts(seed, *, iterations=3, evaluations=False):
    """A training loop of the library's parts; returns the state of the loss."""
    config = tiny(seed=seed)
    torch.manual_seed(seed)
    env = build_env(config)
    eval_env = build_env(config, seed=99, observation_norm=get_observation_norm(env))
    actor = build_actor(config, env)
    loss = build_loss(config, actor, build_critic(config, env))
    optimizer = torch.optim.Adam(
        [*loss.actor_param_groups(lr=1e-3), {"params": list(loss.critic_parameters())}], lr=1e-3
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=16
    )
    collector = Collector(
        env,
        actor,
        frames_per_batch=32,
        total_frames=32 * iterations,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )
    for data in collector:
        loss.value_estimator(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for batch in buffer:
            out = loss(batch)
            total = sum(value for key, value in out.items() if key.startswith("loss_"))
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        loss.update_old_policy()
        if evaluations:
            with torch.random.fork_rng():
                evaluate(eval_env, actor, 2, max_steps=10)
                evaluate(eval_env, actor, 2, max_steps=10, exploration_type=ExplorationType.RANDOM)
    collector.shutdown()
    eval_env.close()
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    stats = get_observation_norm(env).get_statistics("observation")
    return {**state, "norm_mean": stats.mean.clone(), "norm_var": stats.var.clone()}


def same(a, b):
    assert a.keys() == b.keys()
    return {key: torch.equal(a[key], b[key]) for key in a}


@pytest.fixture(scope="module")
def reference():
    return train_from_parts(0)


class TestReproducibility:
    def test_same_seed_gives_the_same_bits(self, reference):
        assert all(same(reference, train_from_parts(0)).values())

    def test_another_seed_does_not(self, reference):
        equal = same(reference, train_from_parts(1))
        weights = [key for key in equal if key.endswith("weight") and "norm" not in key]
        moved = [key for key in weights if not equal[key]]
        # Norm weights start at one, but even those are trained.
        assert len(moved) == len(weights) > 5
        assert not equal["norm_mean"]

    def test_evaluation_changes_nothing(self, reference):
        assert all(same(reference, train_from_parts(0, evaluations=True)).values())


@pytest.fixture
def example(script):
    """The example script as a module."""
    return script


def command(*options, cwd):
    """Run the script from the command line."""
    tests_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": tests_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def frames(run) -> list[int]:
    """The frames at which an iteration was logged."""
    return read_scalars(run)["train/loss_actor"][0].tolist()


class TestExample:
    @pytest.mark.parametrize(
        "policy",
        [
            pytest.param(["policy.num_steps=3"], id="diffusion"),
            pytest.param(["policy.kind=gaussian"], id="gaussian", marks=pytest.mark.slow),
        ],
    )
    def test_from_the_command_line(self, policy, tmp_path):
        options = [
            *policy,
            *("task=inverted_pendulum", "env.num_envs=2", "collector.total_frames=64"),
            *("collector.frames_per_batch=32", "optim.num_minibatches=2", "optim.num_epochs=1"),
            *("policy.hidden_size=8", "critic.hidden_size=8", "logger.dir=run"),
            *("logger.eval_episodes=2", "logger.progress=false", "device=cpu"),
            *("env.max_episode_steps=30", "num_threads=1"),
        ]
        done = command(*options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "64 in" in done.stdout and "learning curve" in done.stdout
        run = tmp_path / "run"
        for name in ("config.yaml", "versions.json", "scalars.csv", "learning_curve.png"):
            assert (run / name).stat().st_size > 0, name
        assert list(run.rglob("events.out.tfevents.*"))
        assert any(path.is_file() for path in (run / "checkpoints").rglob("*"))
        # Nothing elsewhere: Hydra makes no directory of its own.
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize(
        "word, hint",
        [
            ("collector.total_frame=64", "collector.total_frames"),
            ("task=inverted_pendulm", "inverted_pendulum"),
            ("policy.kind=gausian", "gaussian"),
        ],
    )
    def test_a_slip_on_the_command_line(self, tmp_path, word, hint):
        done = command(word, cwd=tmp_path)
        assert done.returncode == 2
        assert hint in done.stderr and "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_repeat_and_resume(self, example, tmp_path):
        target = str(tmp_path / "run")
        run = example.train(tiny(logger={"dir": target}))
        assert run == tmp_path / "run"
        assert frames(run) == [32, 64]

        # The same directory again is another run, with the same numbers, also if it is evaluated
        # on the way.
        scalars = (run / "scalars.csv").read_bytes()
        other = example.train(tiny(logger={"dir": target, "eval_interval": 32}))
        assert other == tmp_path / "run-1"
        assert (run / "scalars.csv").read_bytes() == scalars
        first, second = (read_scalars(each) for each in (run, other))
        assert len(second["eval/return_deterministic"][0]) == 2
        trained = [name for name in first if name.startswith("train/")]
        assert len(trained) > 10
        for name in trained:
            np.testing.assert_array_equal(first[name][1], second[name][1], err_msg=name)

        # Nothing is left to do, and nothing is added.
        with pytest.raises(ConfigError, match="has 64 frames already"):
            example.train(tiny(logger={"dir": target}, resume=target))
        assert (run / "scalars.csv").read_bytes() == scalars

        resumed = example.train(
            tiny(logger={"dir": target}, collector={"total_frames": 128}, resume=target)
        )
        assert resumed == run
        assert frames(run) == [32, 64, 96, 128]
        after = read_scalars(run)["train/loss_critic"][1]
        np.testing.assert_array_equal(after[:2], first["train/loss_critic"][1])

        with pytest.raises(ConfigError, match=r"env.name: InvertedPendulum-v5 -> Pendulum-v1"):
            example.train(tiny(logger={"dir": target}, env={"name": "Pendulum-v1"}, resume=target))
        assert frames(run) == [32, 64, 96, 128]

    def test_gaussian_policy(self, example, tmp_path):
        """The control arm trains, repeats, resumes and is not mixed up with the other kind."""
        target = str(tmp_path / "run")
        policy = {"kind": "gaussian", "num_steps": 8}
        run = example.train(tiny(policy=policy, logger={"dir": target}))
        scalars = read_scalars(run)
        # One step; the policy has moved, and the full form is the KL in use.
        assert "train/kl_per_step/0" in scalars and "train/kl_per_step/1" not in scalars
        np.testing.assert_array_equal(scalars["train/kl"][1], scalars["train/kl_full"][1])
        assert (scalars["train/kl"][1] > 0).all()
        assert np.isfinite(scalars["eval/return_deterministic"][1]).all()
        again = read_scalars(example.train(tiny(policy=policy, logger={"dir": target})))
        np.testing.assert_array_equal(scalars["train/loss_actor"][1], again["train/loss_actor"][1])

        longer = {"collector": {"total_frames": 128}, "resume": target, "logger": {"dir": target}}
        with pytest.raises(ConfigError, match="policy.kind: gaussian -> diffusion"):
            example.train(tiny(policy={"num_steps": 8}, **longer))
        assert example.train(tiny(policy=policy, **longer)) == run
        assert frames(run) == [32, 64, 96, 128]

    @pytest.mark.parametrize("kind", ["diffusion", "gaussian"])
    def test_projection_mode(self, example, tmp_path, kind):
        """It trains, stays within its bound, and resumes; a run in another mode is another run."""
        target = str(tmp_path / "run")
        settings = {
            "policy": {"kind": kind, "num_steps": 8 if kind == "gaussian" else 3},
            "trust_region": {"mode": "projection", "eps": 1e-5},
            "optim": {"num_minibatches": 2, "num_epochs": 4, "lr": 3e-3},
        }
        run = example.train(tiny(logger={"dir": target}, **settings))
        longer = {"collector": {"total_frames": 128}, "resume": target, "logger": {"dir": target}}
        assert example.train(tiny(**settings, **longer)) == run
        scalars = read_scalars(run)
        assert frames(run) == [32, 64, 96, 128]
        assert (scalars["train/kl_projected_max"][1] <= 1e-5 + 1e-6).all()
        assert scalars["train/kl_unprojected"][1].max() > 1e-5
        assert scalars["train/regression"][1].max() > 0 and scalars["train/anchor_gap"][1].max() > 0
        assert np.isfinite(scalars["eval/return_deterministic"][1]).all()
        settings["trust_region"] = {"mode": "switch", "eps": 1e-5}
        longer["collector"] = {"total_frames": 256}
        with pytest.raises(ConfigError, match="trust_region.mode: projection -> switch"):
            example.train(tiny(**settings, **longer))

    @pytest.mark.parametrize("ratio", ["path", "step"])
    def test_projection_mode_of_the_surrogate(self, example, tmp_path, ratio):
        """The ratio is that of kernels within their bound; the run resumes."""
        target = str(tmp_path / "run")
        settings = {
            "objective": {"kind": "surrogate", "ratio": ratio},
            "trust_region": {"mode": "projection", "eps": 1e-5},
            "optim": {"num_minibatches": 2, "num_epochs": 4, "lr": 3e-3},
        }
        run = example.train(tiny(logger={"dir": target}, **settings))
        longer = {"collector": {"total_frames": 128}, "resume": target, "logger": {"dir": target}}
        assert example.train(tiny(**settings, **longer)) == run
        scalars = read_scalars(run)
        assert scalars["train/loss_objective"][0].tolist() == [32, 64, 96, 128]
        assert (scalars["train/kl_projected_max"][1] <= 1e-5 + 1e-6).all()
        assert scalars["train/kl_unprojected"][1].max() > 1e-5
        assert scalars["train/loss_trajectory_kl"][1].max() > 0
        assert np.isfinite(scalars["train/loss_objective"][1]).all()
        assert np.isfinite(scalars["eval/return_deterministic"][1]).all()

    def test_resume_takes_the_run_s_own_settings(self, tmp_path):
        config = tiny(seed=3, logger={"dir": str(tmp_path / "run")})
        run = make_run_dir(tmp_path / "run", config)
        words = ["collector.total_frames=128", "trust_region.eps=0.2", f"resume={run}"]
        found, merged = resumed_config(str(run), "runs", words)
        resumed = validate(merged)
        assert found == run and resumed.resume == str(run)
        assert (resumed.seed, resumed.env.name) == (3, config.env.name)
        assert (resumed.collector.total_frames, resumed.trust_region.eps) == (128, 0.2)
        with pytest.raises(ConfigError, match="task=hopper"):
            resumed_config(str(run), "runs", ["task=hopper"])

    @pytest.mark.gpu
    def test_on_cuda(self, example, tmp_path):
        """Collection, updates, evaluation, checkpoint and resume with the networks on a GPU."""
        target = str(tmp_path / "run")
        example.train(tiny(device="cuda", logger={"dir": target}))
        example.train(
            tiny(
                device="cuda",
                logger={"dir": target},
                collector={"total_frames": 128},
                resume=target,
            )
        )
        assert frames(tmp_path / "run") == [32, 64, 96, 128]

    def test_nothing_is_lost_where_there_is_no_checkpoint(self, example, tmp_path):
        config = tiny(logger={"dir": str(tmp_path / "run")})
        run = make_run_dir(tmp_path / "run", config)
        (run / "scalars.csv").write_text("frames,name,value\n32,train/kl,0.5\n")
        with pytest.raises(ConfigError, match="no checkpoint"):
            example.train(tiny(logger={"dir": str(run)}, resume=str(run)))
        assert "32,train/kl,0.5" in (run / "scalars.csv").read_text()

    @pytest.mark.parametrize(
        "wrong, message",
        [
            ({"optim": {"num_minibatches": 5}}, "frames_per_batch.*num_minibatches=5.*instance 3"),
            ({"env": {"num_envs": 0}}, "env.num_envs: got 0"),
            ({"env": {"num_envs": 3}}, "frames_per_batch.*num_envs=3"),
        ],
    )
    def test_numbers_that_do_not_fit(self, wrong, message):
        with pytest.raises(ConfigError, match=message):
            tiny(**wrong)

    def test_unknown_task(self, example, tmp_path):
        config = tiny(env={"name": "InvertedPendulm-v5"}, logger={"dir": str(tmp_path / "run")})
        with pytest.raises(ValueError, match="Did you mean .*'InvertedPendulum-v5'"):
            example.train(config)
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_that_cannot_be_made(self, example, tmp_path):
        (tmp_path / "file").write_text("mine")
        config = tiny(logger={"dir": str(tmp_path / "file" / "run")})
        with pytest.raises(ConfigError, match=r"logger\.dir.*file"):
            example.train(config)
        assert (tmp_path / "file").read_text() == "mine"


def test_any_value_module_serves_the_actor_loss():
    """A plain Q network without histogram."""
    from torch import nn

    from torchrl_trudi.objectives import TruDiLoss

    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    env, actor = build(2)
    critic = TensorDictModule(
        Q(), in_keys=["observation", "action"], out_keys=["state_action_value"]
    )
    out = TruDiLoss(actor, critic).actor_loss(collect(env, actor).reshape(-1))
    assert out["loss_actor"].isfinite()
