"""The Gaussian actor: what its record means, and the front that it shares."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import distributions as D
from torch.distributions import kl_divergence
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.envs.utils import check_env_specs
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.testing import get_default_devices

from torchrl_trudi.envs import make_env
from torchrl_trudi.modules import (
    ChainActor,
    DiffusionActor,
    GaussianActor,
    GaussianModel,
    GaussianNetwork,
    HLGaussCritic,
    HLGaussValueOperator,
)

A, O = 2, 3  # noqa: E741
F64 = {"dtype": torch.float64}
RECORD = {
    "return_chain": True,
    "return_dist_params": True,
    "return_log_prob": True,
    "return_path_log_prob": True,
}
CHAIN, LOC, SCALE, LOG_PROB, PATH_LOG_PROB = (
    ("denoising", name) for name in ("chain", "loc", "scale", "log_prob", "path_log_prob")
)
RANDOM, DETERMINISTIC = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


@pytest.fixture
def make(randomize):
    def make(seed: int = 0, **kwargs) -> GaussianActor:
        factory = {"device": kwargs.pop("device", None), "dtype": kwargs.pop("dtype", F64["dtype"])}
        network = GaussianNetwork(A, O, hidden_size=8, output_gain=1.0, **factory)
        return randomize(GaussianActor(A, network=network, **kwargs, **factory), seed=seed)

    return make


def data(*batch: int, device=None, dtype=torch.float64) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch, O, dtype=dtype)}, batch, device=device)


def box(dtype=torch.float64) -> Bounded:
    low, high = torch.tensor([-3.0, 0.1], dtype=dtype), torch.tensor([1.0, 0.7], dtype=dtype)
    return Bounded(low, high, (A,), dtype=dtype)


class TestActing:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("exploration", [RANDOM, DETERMINISTIC])
    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
    def test_shapes(self, batch, exploration, device, make):
        actor = make(**RECORD, device=device)
        with set_exploration_type(exploration):
            td = actor(data(*batch, device=device))
        shapes = {key: tuple(td[key].shape) for key in actor.out_keys}
        assert shapes == {
            "action": (*batch, A),
            CHAIN: (*batch, 2, A),
            LOC: (*batch, 1, A),
            SCALE: (*batch, 1, A),
            LOG_PROB: batch,
            PATH_LOG_PROB: batch,
        }

    def test_records_the_gaussian(self, make):
        actor = make(**RECORD, spec=box(), noise_key="noise")
        td = data(6)
        td["noise"] = torch.randn(6, 2, A, **F64)
        loc, scale = actor.module.network(td["observation"])
        latent = loc + scale * td["noise"][:, 1]
        low, high = box().space.low, box().space.high
        action = (high + low) / 2 + (high - low) / 2 * latent.tanh()
        gaussian = D.Independent(D.Normal(loc, scale), 1)
        squash = [D.TanhTransform(), D.AffineTransform((high + low) / 2, (high - low) / 2, 1)]
        expected = D.TransformedDistribution(gaussian, squash).log_prob(action)
        actor(td)
        for key, value in {
            "action": action,
            CHAIN: torch.stack([torch.zeros_like(latent), latent], 1),
            LOC: loc.unsqueeze(1),
            SCALE: scale.unsqueeze(1),
            LOG_PROB: expected,
            PATH_LOG_PROB: gaussian.log_prob(latent),
        }.items():
            torch.testing.assert_close(td[key], value, rtol=1e-8, atol=1e-8)

    def test_deterministic_action_is_that_of_the_mean(self, make):
        actor = make(**RECORD, spec=box())
        td = data(5)
        with set_exploration_type(DETERMINISTIC):
            first, second = actor(td.copy()), actor(td.copy())
        loc, scale = actor.module.network(td["observation"])
        assert torch.equal(first["action"], actor.module.squash(loc))
        assert torch.equal(first["action"], second["action"])
        assert torch.equal(first[SCALE][:, 0], scale)
        with set_exploration_type(RANDOM):
            assert (actor(td.copy())["action"] != first["action"]).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_the_action_is_in_its_box(self, dtype, make):
        actor = make(spec=box(dtype), dtype=dtype)
        with torch.no_grad():
            actor.module.network.output.weight.mul_(100)  # saturates
        td = actor(data(500, dtype=dtype))
        assert actor.spec["action"].is_in(td["action"])
        assert (td["action"] == box(dtype).space.high).any()

    def test_stale_entries_are_ignored(self, make):
        actor = make(**RECORD)
        td = data(5)
        stale = actor(td.copy())
        for key in actor.out_keys:
            stale[key] = torch.full_like(stale[key], torch.nan)
        torch.manual_seed(1)
        fresh = actor(td.copy())
        torch.manual_seed(1)
        actor(stale)
        assert all(torch.equal(stale[key], fresh[key]) for key in actor.out_keys)


class TestScoring:
    def test_kl_is_that_of_the_actions(self, make):
        """One step from a fixed state: the path KL is the KL of the two Gaussians."""
        old, new = make(**RECORD), make(seed=1)
        td = old(data(7))
        recorded, current = old.build_dist_from_params(td), new.get_dist(td)
        expected = kl_divergence(
            *(
                D.Independent(D.Normal(*actor.module.network(td["observation"])), 1)
                for actor in (old, new)
            )
        )
        torch.testing.assert_close(kl_divergence(recorded, current), expected)
        assert (expected > 0.01).all()
        torch.testing.assert_close(old.log_prob(td), td[PATH_LOG_PROB])
        squashed = td[PATH_LOG_PROB] - old.module.log_det(td[CHAIN][:, -1])
        torch.testing.assert_close(td[LOG_PROB], squashed)

    def test_per_step_distributions(self, make):
        actor = make(**RECORD, event_dims=1)
        td = actor(data(7))
        assert td[PATH_LOG_PROB].shape == actor.log_prob(td).shape == (7, 1)

    def test_rsample_is_stochastic_and_differentiable(self, make):
        actor = make()
        td = data(5)
        with set_exploration_type(DETERMINISTIC):
            (first, chain, log_prob), (second, _, _) = actor.rsample(td), actor.rsample(td)
        assert (first != second).all()
        assert first.requires_grad and log_prob.log_prob.requires_grad
        assert chain.latents.shape == (5, 2, A)
        assert set(td.keys()) == {"observation"}


class TestFront:
    def test_shares_it_with_the_diffusion_actor(self, make):
        ours, other = make(), DiffusionActor(A, O)
        assert isinstance(ours, ChainActor) and isinstance(other, ChainActor)
        assert ours.num_steps == 1
        for name in ("in_keys", "dist_params_keys", "dist_sample_keys", "log_prob_keys"):
            assert getattr(ours, name) == getattr(other, name)

    def test_set_keys(self, make):
        actor = make(**RECORD)
        names = {"chain": "x", "loc": "mu", "scale": "sigma", "log_prob": "lp"}
        actor.set_keys(**names, path_log_prob=("a", "b"))
        td = actor(data(5))
        assert set(td.keys(True, True)) == {"observation", "action", *names.values(), ("a", "b")}
        torch.testing.assert_close(actor.log_prob(td), td["a", "b"])
        with pytest.raises(ValueError, match="samples is not an accepted tensordict key"):
            actor.set_keys(samples="n")

    def test_several_observations_and_nested_action(self, make):
        network = GaussianNetwork(A, 5, hidden_size=8, **F64)
        spec = Composite({"agent": Composite({"action": box()})})
        actor = GaussianActor(
            A, network=network, in_keys=["observation", "goal"], out_keys=[("agent", "action")],
            spec=spec, **F64
        )  # fmt: skip
        td = data(4)
        td["goal"] = torch.randn(4, 2, **F64)
        assert actor(td)["agent", "action"].shape == (4, A)
        assert torch.equal(actor.module.low, box().space.low)

    def test_state_dict_round_trip(self, make):
        actor, other = make(**RECORD, spec=box()), make(seed=1, **RECORD, spec=box())
        td = data(5)
        with set_exploration_type(DETERMINISTIC):
            expected = actor(td.copy())
            assert not torch.equal(other(td.copy())["action"], expected["action"])
            other.load_state_dict(actor.state_dict())
            for each in (other, copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))):
                found = each(td.copy())
                assert all(torch.equal(found[key], expected[key]) for key in actor.out_keys)
        assert {"module.low", "module.high"} < set(actor.state_dict())

    def test_default_network(self):
        actor = GaussianActor(A, O)
        assert isinstance(actor.module.network, GaussianNetwork)
        assert actor(data(4, dtype=torch.float32))["action"].shape == (4, A)

    def test_errors(self, make):
        with pytest.raises(ValueError, match="Pass obs_dim, or a network"):
            GaussianActor(A)
        with pytest.raises(ValueError, match="action_dim is 3, but the spec has 2"):
            GaussianActor(3, O, spec=box())
        with pytest.raises(NotImplementedError, match="spec.*Unbounded"):
            GaussianActor(A, O, spec=Unbounded((A,)))
        with pytest.raises(ValueError, match="observations of size 3, got 4"):
            make()(TensorDict({"observation": torch.randn(5, 4, **F64)}, [5]))
        bad = data(5)
        bad["observation"][2, 0] = torch.nan
        with pytest.raises(ValueError, match="non-finite values in rows"):
            make()(bad)
        with pytest.raises(KeyError, match="No chain under"):
            make().get_dist(data(5))

    def test_the_box_of_a_given_model_is_checked(self):
        model = GaussianModel(GaussianNetwork(A, O, **F64), A, low=-2.0, **F64)
        with pytest.raises(ValueError, match=r"low is \[-2.0, -2.0\], the spec's \[-3.0, 0.1\]"):
            ChainActor(model, spec=box())
        assert ChainActor(model)(data(4))["action"].shape == (4, A)


class TestTransforms:
    def test_vmap_over_stacked_parameters(self, make):
        actors = [make(**RECORD, noise_key="noise", seed=seed) for seed in (1, 2, 3)]
        td = data(5)
        td["noise"] = torch.randn(5, 2, A, **F64)
        params = torch.stack([TensorDict.from_module(actor) for actor in actors]).detach()

        def act(params):
            with params.to_module(actors[0]):
                out = actors[0](td.copy())
                return out["action"], out[LOG_PROB]

        actions, log_probs = torch.vmap(act)(params)
        for i, actor in enumerate(actors):
            out = actor(td.copy())
            torch.testing.assert_close(actions[i], out["action"], atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(log_probs[i], out[LOG_PROB], atol=1e-12, rtol=1e-12)

    def test_compile_in_one_graph(self, make):
        torch._dynamo.reset()
        model = make(spec=box()).module
        observation, noise = data(5)["observation"], torch.randn(5, 2, A, **F64)

        def surrogate(observation, noise):
            chain = model.sample(observation, noise)
            loc, _ = model.score(observation, chain.latents)
            return model.squash(chain.latents[:, -1]), model.log_prob(observation, chain)[0], loc

        compiled = torch.compile(surrogate, fullgraph=True, backend="eager")
        expected = surrogate(observation, noise)
        for a, b in zip(compiled(observation, noise), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("event_dims", [1, 2])
def test_in_torchrl(event_dims):
    """Environment, collector, and PPO on the latent."""
    env = make_env("Pendulum-v1", 2, seed=0, backend="gymnasium")
    actor = GaussianActor(
        1,
        network=GaussianNetwork(1, 3, hidden_size=8, output_gain=1.0),
        spec=env.action_spec,
        event_dims=event_dims,
        **RECORD,
    )
    check_env_specs(env)
    collector = Collector(
        env,
        actor,
        frames_per_batch=32,
        total_frames=32,
        exploration_type=RANDOM,
        auto_register_policy_transforms=False,
    )
    try:
        batch = next(iter(collector)).clone()
    finally:
        collector.shutdown()
    assert batch[CHAIN].shape == (2, 16, 2, 1) and batch[SCALE].shape == (2, 16, 1, 1)
    assert len(batch[CHAIN][..., 1, :].unique()) == 32
    torch.testing.assert_close(actor.module.squash(batch[CHAIN][..., 1, :]), batch["action"])
    assert env.action_spec.is_in(batch["action"][:, 0])

    critic = HLGaussValueOperator(
        HLGaussCritic(3, -5.0, 5.0, num_bins=21, hidden_size=8), in_keys=["observation"]
    )
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    out = loss(batch.reshape(-1))
    assert out["kl_approx"].abs() < 1e-5 and out["clip_fraction"] == 0
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    assert actor.module.network.output.weight.grad.abs().sum() > 0
