"""The TensorDict front of the denoising chain."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import distributions as D
from torch.distributions import kl_divergence
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import DenoisingModel, DiffusionActor, ScoreNetwork, StepSizes

N, A, O = 4, 2, 3  # noqa: E741
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
    def make(seed: int = 0, scale: float = 0.3, **kwargs) -> DiffusionActor:
        factory = {
            "device": kwargs.pop("device", None),
            "dtype": kwargs.pop("dtype", torch.float64),
        }
        kwargs = {"action_dim": A, "num_steps": N} | kwargs
        obs_dim = kwargs.pop("obs_dim", O)
        sizes = {"hidden_size": 8, "num_frequencies": 3, "step_dim": 4}
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # equal seeds, equal parameters
            network = ScoreNetwork(kwargs["action_dim"], obs_dim, **sizes, **factory)
        actor = DiffusionActor(score_network=network, **kwargs, **factory)
        return randomize(actor, scale, seed)

    return make


def data(*batch, device=None, dtype=torch.float64) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch, O, dtype=dtype)}, batch, device=device)


def box(low=-2.0, high=0.5, shape=(A,), **kwargs) -> Bounded:
    return Bounded(low, high, shape, **({"dtype": torch.float64} | kwargs))


class TestActing:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("exploration", [RANDOM, DETERMINISTIC])
    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
    def test_shapes(self, batch, exploration, device, make):
        actor = make(**RECORD, device=device)
        td = data(*batch, device=device)
        with set_exploration_type(exploration):
            out = actor(td)
        assert out is td and td.batch_size == batch
        shapes = {key: td[key].shape[len(batch) :] for key in actor.out_keys}
        assert shapes == {
            "action": (A,),
            CHAIN: (N + 1, A),
            LOC: (N, A),
            SCALE: (N, A),
            LOG_PROB: (),
            PATH_LOG_PROB: (),
        }
        assert all(td[key].shape[: len(batch)] == batch for key in actor.out_keys)

    @pytest.mark.parametrize("spec", [None, box()], ids=["unit", "box"])
    def test_records_what_the_model_computes(self, spec, make, literal_chain):
        actor = make(**RECORD, spec=spec, noise_key="noise")
        td = data(5)
        td["noise"] = torch.randn(5, N + 1, A, **F64)
        expected = literal_chain(actor.module, td["observation"], td["noise"])
        actor(td)
        for key, value in {
            "action": expected.action,
            CHAIN: expected.latents,
            LOC: expected.loc,
            SCALE: expected.scale.expand(5, N, A),
            LOG_PROB: expected.log_prob,
            PATH_LOG_PROB: expected.forward,
        }.items():
            torch.testing.assert_close(td[key], value, atol=1e-10, rtol=1e-10)

    @pytest.mark.parametrize(
        "flag, keys",
        [
            (None, []),
            ("return_chain", [CHAIN]),
            ("return_dist_params", [LOC, SCALE]),
            ("return_log_prob", [LOG_PROB]),
            ("return_path_log_prob", [PATH_LOG_PROB]),
        ],
    )
    def test_records_only_what_is_asked(self, flag, keys, make):
        actor = make(**({flag: True} if flag else {}))
        td = actor(data(5))
        assert actor.out_keys == ["action", *keys]
        assert set(td.keys(True, True)) == {"observation", "action", *keys}

    def test_random_differs_between_calls(self, make):
        actor = make(return_chain=True)
        td = data(5)
        first, second = actor(td.copy()), actor(td.copy())
        assert (first[CHAIN] != second[CHAIN]).all()
        with set_exploration_type(RANDOM):
            third = actor(td.copy())
        assert (first["action"] != third["action"]).all()
        torch.manual_seed(5)
        first = actor(td.copy())
        torch.manual_seed(5)
        assert torch.equal(first["action"], actor(td.copy())["action"])

    @pytest.mark.parametrize(
        "exploration",
        [DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN, InteractionType.MEDIAN],
    )
    def test_deterministic_is_a_function_of_the_observation(self, exploration, make):
        actor = make(**RECORD, spec=box())
        td = data(5)
        with set_interaction_type(exploration):
            first = actor(td.copy())
            state = torch.get_rng_state()
            second = actor(td.copy())
        assert torch.equal(state, torch.get_rng_state())
        for key in actor.out_keys:
            assert torch.equal(first[key], second[key])
        latents = actor.module.sample_deterministic(td["observation"])
        assert torch.equal(first[CHAIN], latents)
        assert torch.equal(first["action"], actor.module.squash(latents[:, -1]))
        # The means are those of the stochastic kernels at the same states.
        loc, scale = actor.module.score(td["observation"], latents)
        torch.testing.assert_close(first[LOC], loc, atol=1e-12, rtol=1e-12)
        assert torch.equal(first[SCALE], scale.expand(5, N, A))
        expected = D.Normal(loc, first[SCALE]).log_prob(loc).sum((-2, -1))
        torch.testing.assert_close(first[PATH_LOG_PROB], expected, atol=1e-10, rtol=1e-10)

    def test_default_interaction(self, make):
        random, fixed = make(), make(default_interaction_type=InteractionType.DETERMINISTIC)
        assert random.default_interaction_type is InteractionType.RANDOM
        td = data(5)
        assert torch.equal(fixed(td.copy())["action"], fixed(td.copy())["action"])
        with set_exploration_type(RANDOM):  # a context outranks the default
            assert (fixed(td.copy())["action"] != fixed(td.copy())["action"]).all()

    def test_noise_key_reproduces_any_chain(self, make):
        actor = make(**RECORD, noise_key=("denoising", "noise"))
        td = data(2, 3)
        free = actor(td.copy())
        start = free[CHAIN][..., :1, :] / 2.5
        steps = (free[CHAIN][..., 1:, :] - free[LOC]) / free[SCALE]
        td[("denoising", "noise")] = torch.cat([start, steps], -2)
        state = torch.get_rng_state()
        again = actor(td.copy())
        assert torch.equal(state, torch.get_rng_state())
        for key in actor.out_keys:
            torch.testing.assert_close(again[key], free[key], atol=1e-11, rtol=1e-11)
        # Without the option the entry is not read.
        other = make(**RECORD)(td.copy())
        assert (other[CHAIN] != free[CHAIN]).all()

    @pytest.mark.parametrize("exploration", [RANDOM, DETERMINISTIC])
    def test_stale_entries_are_ignored_and_overwritten(self, exploration, make):
        actor = make(**RECORD)
        td = data(5)
        stale = td.copy()
        for key in actor.out_keys:
            shape = actor(td.copy())[key].shape
            stale[key] = torch.full(shape, torch.nan, **F64)
        with set_exploration_type(exploration):
            torch.manual_seed(1)
            fresh = actor(td.copy())
            torch.manual_seed(1)
            actor(stale)
        for key in actor.out_keys:
            assert torch.equal(stale[key], fresh[key])

    @pytest.mark.parametrize(
        "spec", [None, box(-1.0, 1.0, dtype=torch.float32), box(-0.1, 0.3, dtype=torch.float32)]
    )
    def test_actions_are_in_the_spec(self, spec, make):
        actor = make(spec=spec, dtype=torch.float32, scale=2.0)
        action = actor(data(10_000, dtype=torch.float32))["action"]
        spec = Bounded(-1.0, 1.0, (A,)) if spec is None else spec
        assert spec.expand(10_000, A).is_in(action)
        low, high = spec.space.low, spec.space.high
        assert action.max() > high.max() - 1e-6 and action.min() < low.min() + 1e-6  # saturates

    @pytest.mark.parametrize("spec", [None, box(-0.1, 0.3)])
    def test_safe(self, spec, make):
        if spec is None:
            actor = make()
            assert actor.spec["action"] is None
            return
        actor = make(spec=spec, safe=True, **RECORD)
        td = actor(data(64))
        assert spec.expand(64, A).is_in(td["action"])
        torch.testing.assert_close(td["action"], actor.module.squash(td[CHAIN][:, -1]))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_non_finite_observation(self, value, make):
        actor = make()
        td = data(2, 3)
        td["observation"][1, 2, 0] = value
        td["observation"][0, 1] = value
        message = (
            r"\['observation'\] has non-finite values in rows \[\[0, 1\], \[1, 2\]\] \(2 of 6\)"
        )
        with pytest.raises(ValueError, match=message):
            actor(td)
        assert "action" not in td
        make(check_observation=False)(td)
        assert td["action"].isfinite().all(-1).sum() == 4 or value in (torch.inf, -torch.inf)

    def test_gradients_flow_through_the_action(self, make):
        actor = make(return_log_prob=True)
        td = actor(data(5))
        (td["action"].sum() + td[LOG_PROB].sum()).backward()
        for name, parameter in actor.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name

    def test_dispatch(self, make):
        actor = make(return_log_prob=True)
        observation = torch.randn(5, O, **F64)
        with set_exploration_type(DETERMINISTIC):
            action, log_prob = actor(observation=observation)
            positional = actor(observation)
            td = actor(TensorDict({"observation": observation}, [5]))
        assert torch.equal(action, td["action"]) and torch.equal(log_prob, td[LOG_PROB])
        assert torch.equal(positional[0], action)


class TestKeys:
    def test_several_inputs_are_concatenated_in_order(self, make):
        actor = make(in_keys=[("agent", "position"), "goal"], **RECORD, noise_key="noise")
        td = TensorDict(
            {
                "agent": {"position": torch.randn(5, 1, **F64)},
                "goal": torch.randn(5, 2, **F64),
                "noise": torch.randn(5, N + 1, A, **F64),
            },
            [5],
        )
        actor(td)
        observation = torch.cat([td["agent", "position"], td["goal"]], -1)
        expected = actor.module.sample(observation, td["noise"])
        assert torch.equal(td[CHAIN], expected.latents)
        assert torch.equal(actor.get_dist(td).loc, actor.module.score(observation, td[CHAIN])[0])

    @pytest.mark.parametrize("spec", [None, "action_spec", "composite"])
    def test_nested_action(self, spec, make):
        if spec is not None:
            spec = (
                box() if spec == "action_spec" else Composite({"agent": Composite({"act": box()})})
            )
        actor = make(out_keys=[("agent", "act")], return_chain=True, spec=spec)
        td = actor(data(5))
        assert set(td.keys(True, True)) == {"observation", ("agent", "act"), CHAIN}
        assert torch.equal(td["agent", "act"], actor.module.squash(td[CHAIN][:, -1]))
        if spec is not None:
            assert torch.equal(actor.module.low, torch.full((A,), -2.0, **F64))
            assert actor.spec["agent", "act"] == box()

    @pytest.mark.parametrize("prefix", [(), ("a", "b")], ids=["flat", "nested"])
    def test_set_keys(self, prefix, make):
        actor = make(**RECORD)
        roles = ("chain", "loc", "scale", "log_prob", "path_log_prob")
        names = {r: f"my_{r}" if not prefix else (*prefix, r) for r in roles}
        actor.set_keys(**names)
        td = actor(data(5))
        assert set(td.keys(True, True)) == {"observation", "action", *names.values()}
        assert actor.out_keys == ["action", *names.values()]
        assert actor.dist_sample_keys == [names["chain"]]
        assert actor.dist_params_keys == [names["loc"], names["scale"]]
        assert actor.log_prob_keys == [names["path_log_prob"]]
        assert actor.log_prob_key == names["path_log_prob"]
        assert actor.dist_module.in_keys == [names["loc"], names["scale"]]
        assert actor.dist_module.out_keys[0] == names["chain"]
        assert set(actor.spec.keys(True, True)) == {"action", *names.values()}
        expected = td[names["path_log_prob"]]
        torch.testing.assert_close(actor.log_prob(td), expected, atol=1e-12, rtol=1e-12)
        recorded = actor.build_dist_from_params(td).log_prob(td[names["chain"]])
        torch.testing.assert_close(recorded, expected, atol=1e-12, rtol=1e-12)

    def test_set_keys_one_at_a_time(self, make):
        actor = make(**RECORD)
        actor.set_keys(chain="latents")
        actor.set_keys(log_prob=("a", ("b", "c")))  # unravelled
        assert actor.tensor_keys.chain == "latents" and actor.tensor_keys.loc == LOC
        assert actor.tensor_keys.log_prob == ("a", "b", "c")
        assert make().tensor_keys.chain == CHAIN  # other actors are not affected
        with pytest.raises(ValueError, match="samples is not an accepted tensordict key.*'chain'"):
            actor.set_keys(samples="noise")

    def test_missing_input(self, make):
        actor = make(in_keys=["observation", ("agent", "goal")], obs_dim=4)
        message = r"inputs \[\('agent', 'goal'\)\] are not among the entries \['observation'\]"
        with pytest.raises(KeyError, match=message):
            actor(data(5))

    @pytest.mark.parametrize("clash", [{"chain": "action"}, {"loc": "x", "scale": "x"}])
    def test_clashing_keys(self, clash, make):
        with pytest.raises(ValueError, match="key"):
            make(**RECORD).set_keys(**clash)

    @pytest.mark.parametrize("out_keys", [[], ["action", "log_prob"]])
    def test_out_keys_is_the_action_alone(self, out_keys, make):
        with pytest.raises(ValueError, match="out_keys is the action key alone"):
            make(out_keys=out_keys)


class TestScoring:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("event_dims", [1, 2])
    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
    def test_ratio_is_one_right_after_acting(self, batch, event_dims, device, make):
        actor = make(**RECORD, event_dims=event_dims, backward_network=None, device=device)
        td = actor(data(*batch, device=device))
        expected_shape = batch if event_dims == 2 else (*batch, N)
        assert td[PATH_LOG_PROB].shape == expected_shape
        current, recorded = actor.get_dist(td), actor.build_dist_from_params(td)
        one = torch.ones(expected_shape, **F64, device=device)
        for log_prob in (
            current.log_prob(td[CHAIN]),
            recorded.log_prob(td[CHAIN]),
            actor.log_prob(td),
        ):
            ratio = (log_prob - td[PATH_LOG_PROB]).exp()
            torch.testing.assert_close(ratio, one, atol=1e-12, rtol=0)
        kl = kl_divergence(recorded, current)
        torch.testing.assert_close(kl, torch.zeros_like(one), atol=1e-12, rtol=0)

    def test_get_dist_is_the_current_policy(self, make):
        old, new = make(**RECORD, seed=1), make(**RECORD, seed=2)
        td = old(data(5))
        dist = new.get_dist(td)
        loc, scale = new.module.score(td["observation"], td[CHAIN])
        assert torch.equal(dist.loc, loc) and torch.equal(dist.scale, scale)
        recorded = new.build_dist_from_params(td)
        assert torch.equal(recorded.loc, td[LOC]) and torch.equal(recorded.scale, td[SCALE])
        assert (recorded.kl(dist) > 0.01).all()
        torch.testing.assert_close(new.log_prob(td), dist.log_prob(td[CHAIN]))
        assert dist.event_dims == 2

    def test_scoring_does_not_depend_on_the_exploration(self, make):
        actor = make(**RECORD)
        td = actor(data(5))
        with set_exploration_type(DETERMINISTIC):
            torch.testing.assert_close(actor.log_prob(td), td[PATH_LOG_PROB])

    def test_missing_records(self, make):
        actor = make()
        td = actor(data(5))
        for method in (actor.get_dist, actor.log_prob):
            with pytest.raises(KeyError, match="No chain under.*'chain'.*return_chain=True"):
                method(td)
        with pytest.raises(KeyError, match="No kernel parameters.*return_dist_params=True"):
            actor.build_dist_from_params(td)

    def test_inner_distribution_module(self, make):
        """Losses find the parameters' keys and the distribution through this module."""
        actor = make(**RECORD, event_dims=1)
        td = actor(data(5))
        dist = actor.dist_module.get_dist(td)
        assert dist.event_dims == 1 and dist.batch_shape == (5, N)
        torch.testing.assert_close(dist.log_prob(td[CHAIN]), td[PATH_LOG_PROB])


class TestRSample:
    def test_is_stochastic_whatever_the_exploration(self, make):
        actor = make()
        td = data(5)
        with set_exploration_type(DETERMINISTIC):
            first, chain, pieces = actor.rsample(td)
            second, _, _ = actor.rsample(td)
        assert (first != second).all()
        assert (chain.latents[:, 1:] != chain.loc).all()
        assert list(td.keys()) == ["observation"]
        (first.sum() + pieces.log_prob.sum()).backward()
        for name, parameter in actor.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name

    def test_given_noise(self, make, literal_chain):
        actor = make(spec=box())
        td, noise = data(5), torch.randn(5, N + 1, A, **F64)
        action, chain, pieces = actor.rsample(td, noise)
        expected = literal_chain(actor.module, td["observation"], noise)
        torch.testing.assert_close(action, expected.action)
        torch.testing.assert_close(chain.latents, expected.latents)
        torch.testing.assert_close(pieces.log_prob, expected.log_prob)


class TestSpec:
    def test_affine_jacobian_is_in_the_log_prob(self, make):
        low, high = torch.tensor([-2.0, 0.1], **F64), torch.tensor([3.0, 0.4], **F64)
        unit, scaled = make(), make(spec=box(low, high))
        td, noise = data(5), torch.randn(5, N + 1, A, **F64)
        (a, _, p), (b, _, q) = unit.rsample(td, noise), scaled.rsample(td, noise)
        torch.testing.assert_close(b, (low + high) / 2 + (high - low) / 2 * a)
        difference = -((high - low) / 2).log().sum().expand(5)
        torch.testing.assert_close(q.log_prob - p.log_prob, difference)

    @pytest.mark.parametrize("batch", [(7,), (7, 2)])
    def test_batched(self, batch, make):
        spec = box(shape=(*batch, A))
        actor = make(spec=spec, **RECORD)
        assert actor.module.low.shape == (A,)
        td = actor(data(*batch))
        assert spec.is_in(td["action"])
        assert actor.spec.shape == batch and actor.spec["action"] == spec

    def test_rows_with_other_bounds(self, make):
        low = torch.tensor([[-1.0, -1.0], [-1.0, -2.0]], **F64)
        with pytest.raises(ValueError, match="must be the same for all rows of a batched spec"):
            make(spec=box(low, torch.ones(2, A, **F64), (2, A)))

    @pytest.mark.parametrize("batch", [(), (7,)])
    def test_composite(self, batch, make):
        spec = Composite(
            {"action": box(shape=(*batch, A)), "other": Unbounded((*batch, 3))}, shape=batch
        )
        actor = make(spec=spec)
        assert set(actor.spec.keys(True, True)) == {"action"}
        assert spec["action"].is_in(actor(data(*batch))["action"])

    @pytest.mark.parametrize(
        "spec",
        [
            Unbounded((A,)),
            Bounded(-torch.inf, torch.inf, (A,)),
            Bounded(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, torch.inf]), (A,)),
            Bounded(0, 5, (A,), dtype=torch.int64),
            Categorical(5),
            OneHot(A),
            MultiCategorical([3, 4]),
            MultiOneHot([3, 4]),
            Binary(A),
        ],
        ids=lambda spec: type(spec).__name__,
    )
    @pytest.mark.parametrize("composite", [False, True])
    def test_not_a_bounded_box(self, spec, composite, make):
        wrapped = Composite({"action": spec}) if composite else spec
        with pytest.raises(NotImplementedError, match=f"spec.*{type(spec).__name__}") as error:
            make(spec=wrapped)
        assert str(spec) in str(error.value)

    def test_scalar_spec(self, make):
        with pytest.raises((ValueError, NotImplementedError), match="spec"):
            make(action_dim=1, spec=box(shape=()))

    def test_sizes_have_to_agree(self, make):
        with pytest.raises(ValueError, match="action_dim is 2, but the spec has 3 dimensions"):
            make(spec=box(shape=(3,)))
        with pytest.raises(ValueError, match="step_sizes are for 5 steps, the chain has 4"):
            make(step_sizes=StepSizes(5))
        with pytest.raises(ValueError, match="Pass obs_dim, or a score_network"):
            DiffusionActor(A)
        with pytest.raises(ValueError, match="event_dims must be 1 .* or 2"):
            make(event_dims=0)
        with pytest.raises(ValueError, match="observations of size 3, got 4"):
            make()(TensorDict({"observation": torch.zeros(5, 4, **F64)}, [5]))

    def test_options_reach_the_model(self, make):
        backward = ScoreNetwork(A, O, hidden_size=8, **F64)
        steps = StepSizes(N, learn="per_step", **F64)
        actor = make(
            step_sizes=steps,
            friction="scalar",
            learn_friction=False,
            init_std=0.7,
            learn_prior=True,
            backward_network=backward,
        )
        model = actor.module
        assert isinstance(model, DenoisingModel) and actor.num_steps == model.num_steps == N
        assert model.step_sizes is steps and model.backward_network is backward
        assert model.friction_raw.shape == (1,) and not model.friction_raw.requires_grad
        fresh = DiffusionActor(A, O, learn_prior=True, init_std=0.7)
        torch.testing.assert_close(fresh.module.prior()[1], torch.full((A,), 0.7))
        assert fresh.num_steps == 8 and fresh.module.score_network.obs_dim == O


class TestTransforms:
    def test_vmap_over_stacked_parameters(self, make):
        actors = [make(**RECORD, noise_key="noise", seed=seed) for seed in (1, 2, 3)]
        td = data(5)
        td["noise"] = torch.randn(5, N + 1, A, **F64)
        params = torch.stack([TensorDict.from_module(actor) for actor in actors]).detach()
        template = actors[0]

        def act(params):
            with params.to_module(template):
                out = template(td.copy())
                return out["action"], out[LOG_PROB], template.log_prob(out)

        results = torch.vmap(act)(params)
        for i, actor in enumerate(actors):
            out = actor(td.copy())
            for result, expected in zip(
                results, (out["action"], out[LOG_PROB], out[PATH_LOG_PROB]), strict=True
            ):
                torch.testing.assert_close(result[i], expected, atol=1e-12, rtol=1e-12)

    def test_vmap_over_observations(self, make):
        actor = make(noise_key="noise")
        td = data(3, 5)
        td["noise"] = torch.randn(3, 5, N + 1, A, **F64)
        expected = actor(td.copy())["action"]
        result = torch.vmap(lambda td: actor(td)["action"])(td.copy())
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)

    def test_compile_in_one_graph(self, make):
        torch._dynamo.reset()
        actor = make(spec=box(), num_steps=2)
        observation, noise = data(5)["observation"], torch.randn(5, 3, A, **F64)

        def surrogate(observation, noise):
            chain = actor.module.sample(observation, noise)
            pieces = actor.module.log_prob(observation, chain)
            loc, _ = actor.module.score(observation, chain.latents)
            return actor.module.squash(chain.latents[..., -1, :]), pieces.log_prob, loc

        compiled = torch.compile(surrogate, fullgraph=True, backend="eager")
        expected = surrogate(observation, noise)
        outputs = compiled(observation, noise)
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        parameters = tuple(actor.parameters())
        for a, b in zip(
            torch.autograd.grad(outputs[1].sum(), parameters),
            torch.autograd.grad(expected[1].sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)

    @pytest.mark.slow
    def test_compile_the_actor(self, make):
        torch._dynamo.reset()
        actor = make(**RECORD, noise_key="noise")
        td = data(5)
        td["noise"] = torch.randn(5, N + 1, A, **F64)
        expected = actor(td.copy())
        out = torch.compile(actor, backend="eager")(td.copy())
        for key in actor.out_keys:
            torch.testing.assert_close(out[key], expected[key], atol=1e-10, rtol=1e-10)

    @pytest.mark.parametrize(
        "clone",
        [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies(self, clone, make):
        actor = make(**RECORD, spec=box(), event_dims=1, noise_key="noise")
        actor.set_keys(chain="latents")
        other = clone(actor)
        td = data(5)
        td["noise"] = torch.randn(5, N + 1, A, **F64)
        expected = actor(td.copy())
        out = other(td.copy())
        assert other.out_keys == actor.out_keys
        for key in actor.out_keys:
            assert torch.equal(out[key], expected[key])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(actor(td.copy())["action"], expected["action"])
        assert (other(td.copy())["action"] != expected["action"]).all()

    @pytest.mark.parametrize("boxes", [(None, None), (box(), box()), (box(), None)])
    def test_state_dict_round_trip(self, boxes, make):
        source, target = (
            make(spec=spec, seed=seed, noise_key="noise") for seed, spec in enumerate(boxes)
        )
        td = data(5)
        td["noise"] = torch.randn(5, N + 1, A, **F64)
        expected = source(td.copy())["action"]
        assert (target(td.copy())["action"] != expected).all()
        target.load_state_dict(source.state_dict())
        assert torch.equal(target(td.copy())["action"], expected)

    def test_to_another_dtype(self, make):
        options = {"dtype": torch.float32, "return_chain": True}
        actor = make(spec=box(dtype=torch.float32), **options).double()
        out = actor(data(5))
        assert out["denoising", "chain"].dtype == torch.float64
        # The environment is still the same one.
        assert out["action"].dtype == torch.float32
        assert make(**options).double()(data(5))["action"].dtype == torch.float64
