"""Every array of the golden files, on the folder TRUDI_GOLDEN_DIR (default test/golden)."""

from __future__ import annotations

import pytest
import torch
from _golden import Golden, actor_map, files, make_actor, make_critic
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_trudi.envs.running_mean_var import RunningMeanVar
from torchrl_trudi.modules import (
    DenoisingChain,
    DenoisingPath,
    DiffusionActor,
    HLGaussSupport,
    gaussian_kl,
    gaussian_log_prob,
    step_size_weights,
)
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss, soft_td_lambda_return

ACTOR_FILES = files("actor_")
RL_FILES = files("rl_")
if not ACTOR_FILES + RL_FILES:
    raise FileNotFoundError(
        "No golden files found; set TRUDI_GOLDEN_DIR to a folder that has some."
    )


@pytest.fixture(scope="module", params=ACTOR_FILES, ids=lambda p: p.stem)
def golden(request):
    return Golden(request.param)


@pytest.fixture(scope="module", params=RL_FILES, ids=lambda p: p.stem)
def rl(request):
    return Golden(request.param)


def need(golden: Golden, *keys: str) -> None:
    """Skip, by name, the blocks that a file does not have."""
    for key in keys:
        if key not in golden:
            pytest.skip(f"{golden.path.name} has no {key}")


def time_first(tensor: torch.Tensor) -> torch.Tensor:
    """[B, N, A] -> [N, B, A]."""
    return tensor.transpose(0, 1)


def noise(golden: Golden, name: str) -> torch.Tensor:
    """Standard normals of one block, [B, N + 1, A]."""
    return torch.cat([golden[f"in/{name}_z0"][None], golden[f"in/{name}_eps"]]).transpose(0, 1)


class TestActor:
    def test_step_sizes(self, golden):
        if "in/schedule" in golden:
            kind, minimum, *rest = golden.meta["schedule"]
            options = dict(zip(("offset", "power"), rest, strict=False)) if kind == "cosine" else {}
            weights = step_size_weights(
                golden.meta["N"], kind, minimum=minimum, dtype=golden.dtype, **options
            )
            golden.close(weights, "in/schedule")
        for which in ("new", "old"):
            model = make_actor(golden, which).module
            golden.close(model.step_sizes(), f"{which}/dt")
            golden.close(model.friction(), f"{which}/friction")

    def test_sde(self, golden):
        need(golden, "sde/x")
        actor = make_actor(golden, "new")
        model, obs = actor.module, golden["in/obs"]
        chain = model.sample(obs, noise(golden, "sde"))
        eta, scale = model.kernel_coefficients()
        x = golden["sde/x"].transpose(0, 1)
        golden.close(model.step_sizes(), "sde/dt")
        golden.close(eta, "sde/eta")
        golden.close(scale, "sde/fwd_std")
        golden.close(time_first(chain.latents), "sde/x")
        golden.close(time_first(chain.loc), "sde/fwd_mean")
        golden.close(time_first(model.drift(x[:, :-1])), "sde/drift")
        # The control network, one step at a time and with the plain (latent, obs, step) call.
        control = [
            model.score_network(x[:, n], obs, torch.tensor(n)) for n in range(model.num_steps)
        ]
        golden.close(torch.stack(control), "sde/u")
        if model.backward_network is None:
            back = torch.zeros_like(golden["sde/bwd_u"])
        else:
            back = torch.stack(
                [
                    model.backward_network(x[:, n + 1], obs, torch.tensor(n + 1))
                    for n in range(model.num_steps)
                ]
            )
        golden.close(back, "sde/bwd_u")
        golden.close(time_first(model.backward_mean(obs, x)), "sde/bwd_mean")
        path = DenoisingPath(chain.loc, chain.scale, event_dims=1)
        golden.close(path.log_prob(chain.latents).T, "sde/fwd_logp")
        backward = gaussian_log_prob(
            chain.latents[:, :-1], model.backward_mean(obs, chain.latents), scale
        )
        golden.close(backward.T, "sde/bwd_logp")
        pieces = model.log_prob(obs, chain)
        golden.close(pieces.log_weight, "sde/log_w")
        golden.close(pieces.log_det, "sde/tanh_logdet")
        golden.close(pieces.running, "sde/running_cost")
        golden.close(pieces.terminal, "sde/terminal_cost")
        golden.close(pieces.log_prob, "sde/log_prob")
        golden.close(model.squash(chain.latents[:, -1]), "sde/action")

    def test_sde_through_the_tensordict_module(self, golden):
        need(golden, "sde/x")
        actor = make_actor(
            golden,
            "new",
            noise_key="noise",
            return_chain=True,
            return_dist_params=True,
            return_log_prob=True,
        )
        data = TensorDict(
            {"observation": golden["in/obs"], "noise": noise(golden, "sde")}, [golden.meta["B"]]
        )
        data = actor(data)
        golden.close(data["action"], "sde/action")
        golden.close(time_first(data["denoising", "chain"]), "sde/x")
        golden.close(time_first(data["denoising", "loc"]), "sde/fwd_mean")
        golden.close(data["denoising", "scale"][0], "sde/fwd_std")
        golden.close(data["denoising", "log_prob"], "sde/log_prob")
        golden.close(time_first(actor.get_dist(data).loc), "sde/fwd_mean")

    def test_ode(self, golden):
        need(golden, "ode/x")
        model, obs = make_actor(golden, "new").module, golden["in/obs"]
        mean, std = model.prior()
        start = mean + std * golden["in/ode_z0"]
        chains = torch.stack(
            [
                model.sample_deterministic(obs, start, score_scale=float(k))
                for k in golden["ode/coefs"]
            ]
        )
        golden.close(chains.transpose(1, 2), "ode/x")
        golden.close(model.squash(chains[..., -1, :]), "ode/action")
        golden.close(-model.log_det(chains[..., -1, :]), "ode/running_cost")
        golden.close(gaussian_log_prob(start, mean, std), "ode/terminal_cost")


class TestPathKL:
    """Path KL of the reference estimator, with fresh paths of the old policy."""

    def projection(self, golden, **kwargs) -> TrajectoryKLProjection:
        new, old = make_actor(golden, "new"), make_actor(golden, "old")
        projection = TrajectoryKLProjection(new, old_policy="target", **kwargs)
        projection.target_actor_network_params.data.update_(TensorDict.from_module(old).data)
        return projection

    def kernels(self, golden):
        """Old path and both kernels on it, one row per state and sample."""
        new, old = make_actor(golden, "new").module, make_actor(golden, "old").module
        obs = golden["in/obs"].repeat_interleave(golden.meta["K"], 0)
        z = noise(golden, "klf")
        path = old.sample_detached(
            obs, z, initial_latent=new.initial_latent(z[:, 0]), step_sizes=new.step_sizes()
        )
        return path, *new.score(obs, path.latents)

    def test_forward_per_step(self, golden):
        need(golden, "klf/x")
        path, loc, scale = self.kernels(golden)
        golden.close(time_first(path.latents), "klf/x")
        golden.close(time_first(path.loc), "klf/mean_old")
        golden.close(path.scale, "klf/std_old")
        golden.close(time_first(loc), "klf/mean_new")
        golden.close(scale, "klf/std_new")
        for kind in ("simplified", "full"):
            kl = gaussian_kl(path.loc, path.scale, loc, scale, kind)
            golden.close(kl.T, f"klf/step_{kind}")
        old = DenoisingPath(path.loc, path.scale, event_dims=1)
        new = DenoisingPath(loc, scale, event_dims=1)
        sampled = old.log_prob(path.latents) - new.log_prob(path.latents)
        golden.close(sampled.T, "klf/step_mc")
        per_state = sampled.sum(-1).reshape(-1, golden.meta["K"]).mean(-1)
        golden.close(per_state, "klf/kl_mc")

    @pytest.mark.parametrize("kind, key", [("simplified", "klf/kl"), ("full", "klf/kl_full")])
    def test_forward(self, golden, kind, key):
        need(golden, key)
        K = golden.meta["K"]
        projection = self.projection(golden, kl=kind, num_paths=K)
        z = noise(golden, "klf")
        kl = projection.path_kl(
            TensorDict({"observation": golden["in/obs"]}, [golden.meta["B"]]),
            z.reshape(-1, K, *z.shape[1:]),
        )
        golden.close(kl.kl, key)
        golden.close(kl.per_step_full.sum(-1), "klf/kl_full")

    def test_recorded(self, golden):
        """The chain in the batch gives the same numbers as a fresh one with the same noise."""
        need(golden, "klf/x")
        K = golden.meta["K"]
        path, _, _ = self.kernels(golden)
        projection = TrajectoryKLProjection(make_actor(golden, "new"))
        data = TensorDict(
            {
                "observation": golden["in/obs"].repeat_interleave(K, 0),
                "denoising": {
                    "chain": path.latents,
                    "loc": path.loc,
                    "scale": path.scale.expand_as(path.loc),
                },
            },
            [golden.meta["B"] * K],
        )
        kl = projection.path_kl(data.detach())
        golden.close(kl.per_step.T, "klf/step_simplified")
        golden.close(kl.kl.reshape(-1, K).mean(-1), "klf/kl")

    def test_reverse(self, golden):
        need(golden, "klr/kl")
        projection = self.projection(golden, direction="reverse")
        data = TensorDict({"observation": golden["in/obs"]}, [golden.meta["B"]])
        golden.close(projection.path_kl(data, noise(golden, "klr")).kl, "klr/kl")
        action, _, log_prob = make_actor(golden, "new").rsample(data, noise(golden, "klr"))
        golden.close(action, "klr/action")
        golden.close(log_prob.running, "klr/running_cost")
        golden.close(log_prob.terminal, "klr/terminal_cost")

    def test_sampled_log_ratio(self, golden):
        """Both kernels with the new step sizes and scale, on a path of the old control."""
        need(golden, "klj/x")
        new, old = make_actor(golden, "new").module, make_actor(golden, "old").module
        obs = golden["in/obs"].repeat_interleave(golden.meta["K"], 0)
        z = noise(golden, "klj")
        mixed = make_actor(golden, "old").module
        mixed.friction_raw.data.copy_(new.friction_raw.data)
        start = new.initial_latent(z[:, 0])
        path = mixed.sample_detached(obs, z, initial_latent=start, step_sizes=new.step_sizes())
        golden.close(time_first(path.latents), "klj/x")
        loc, scale = new.score(obs, path.latents)
        log_old = DenoisingPath(path.loc, path.scale, 1).log_prob(path.latents)
        sampled = log_old - DenoisingPath(loc, scale, 1).log_prob(path.latents)
        golden.close(sampled.T, "klj/step_mc")
        golden.close(sampled.sum(-1).reshape(-1, golden.meta["K"]).mean(-1), "klj/kl")
        assert old.num_steps == new.num_steps


class QuadraticQ(nn.Module):
    """The fixed critic of the golden files."""

    def __init__(self, golden: Golden) -> None:
        super().__init__()
        for name in "PMmc":
            self.register_buffer(name, golden[f"in/q_{name}"])

    def forward(self, observation, action):
        d = action - observation @ self.M.T - self.m
        value = observation @ self.c - 0.5 * ((d @ self.P) * d).sum(-1)
        return value.unsqueeze(-1)


# Golden name of a loss variant -> our mode.
MODES = {"clipped": "switch", "full": "lagrangian", "value": "none"}


class TestLoss:
    def build(self, golden, mode) -> TruDiLoss:
        new, old = make_actor(golden, "new"), make_actor(golden, "old")
        meta = golden.meta
        projection = TrajectoryKLProjection(
            new,
            mode=MODES[mode],
            old_policy="target",
            num_paths=meta["K"],
            eps=meta["kl_bound"],
            init_multiplier=meta["lagrangian"],
        )
        if mode == "value":
            # The published form steps the multiplier even where the actor ignores it.
            projection.log_multiplier = nn.Parameter(projection._buffers.pop("log_multiplier"))
        projection.target_actor_network_params.data.update_(TensorDict.from_module(old).data)
        critic = TensorDictModule(
            QuadraticQ(golden), in_keys=["observation", "action"], out_keys=["state_action_value"]
        )
        loss = TruDiLoss(
            new,
            critic,
            trajectory_kl=projection,
            init_temperature=meta["temperature"],
            target_entropy_scale=meta["ent_target_mult"],
        )
        with torch.no_grad():
            loss.log_temperature.copy_(golden["new/log_temperature"])
            projection.log_multiplier.copy_(golden["new/log_lagrangian"])
        return loss

    def run(self, golden, loss):
        K = golden.meta["K"]
        z = noise(golden, "klf")
        data = TensorDict({"observation": golden["in/obs"]}, [golden.meta["B"]])
        return loss.actor_loss(
            data, noise=noise(golden, "sde"), kl_noise=z.reshape(-1, K, *z.shape[1:])
        )

    def params(self, loss) -> dict[str, torch.Tensor]:
        names = {k: p for k, p in actor_map(loss.actor_network).items() if p.requires_grad}
        names["log_temperature"] = loss.log_temperature
        names["log_lagrangian"] = loss.trajectory_kl.log_multiplier
        return names

    @pytest.mark.parametrize("mode", list(MODES))
    def test_values_and_gradients(self, golden, mode):
        need(golden, f"loss/{mode}/total")
        loss = self.build(golden, mode)
        out = self.run(golden, loss)
        golden.close(out["loss_actor"], f"loss/{mode}/primary")
        golden.close(out["loss_temperature"].reshape(1), "loss/entropy_loss")
        golden.close(out["loss_kl_multiplier"].reshape(1), "loss/lagrangian_loss")
        golden.close(out["entropy"], "loss/entropy")
        total = out["loss_actor"] + out["loss_temperature"] + out["loss_kl_multiplier"]
        golden.close(total, f"loss/{mode}/total")
        params = self.params(loss)
        grads = dict(
            zip(
                params,
                torch.autograd.grad(total, list(params.values()), allow_unused=True),
                strict=True,
            )
        )
        prefix = f"loss/{mode}/grad_norm/"
        expected = [k.removeprefix(prefix) for k in golden if k.startswith(prefix)]
        assert expected
        for name in expected:
            grad = grads[name]
            norm = torch.zeros((), dtype=golden.dtype) if grad is None else grad.norm()
            golden.close(norm, prefix + name, gradient=True)
        total_norm = torch.stack([g.norm() for g in grads.values() if g is not None]).norm()
        golden.close(total_norm, f"loss/{mode}/grad_norm_total", gradient=True)
        prefix = f"loss/{mode}/grad/"
        for key in (k for k in golden if k.startswith(prefix)):
            golden.close(grads[key.removeprefix(prefix)], key, gradient=True)

    def test_pieces(self, golden):
        need(golden, "loss/qf")
        loss = self.build(golden, "clipped")
        data = TensorDict({"observation": golden["in/obs"]}, [golden.meta["B"]])
        action, _, log_prob = loss.actor_network.rsample(data, noise(golden, "sde"))
        golden.close(action, "loss/action")
        golden.close(log_prob.log_prob, "loss/log_prob")
        value = loss.critic_network(data.set("action", action))["state_action_value"]
        golden.close(value.squeeze(-1), "loss/qf")
        z = noise(golden, "klf")
        kl = loss.trajectory_kl.path_kl(data, z.reshape(-1, golden.meta["K"], *z.shape[1:]))
        golden.close(kl.kl, "loss/kl")
        golden.close(loss.trajectory_kl.inside(kl), "loss/gate")

    def test_adam_step(self, golden):
        prefix = "loss/clipped/adam1/"
        names = [k.removeprefix(prefix) for k in golden if k.startswith(prefix)]
        if not names:
            pytest.skip(f"{golden.path.name} has no {prefix}")
        loss = self.build(golden, "clipped")
        optimizer = torch.optim.Adam(loss.actor_param_groups(lr=3e-4))
        out = self.run(golden, loss)
        (out["loss_actor"] + out["loss_temperature"] + out["loss_kl_multiplier"]).backward()
        params = self.params(loss)
        nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        for name in names:
            golden.close(params[name], prefix + name)


class TestHLGauss:
    def test_targets(self, rl):
        names = rl.groups("hl")
        if not names:
            pytest.skip(f"{rl.path.name} has no hl/")
        for name in names:
            vmin, vmax, bins = rl[f"hl/{name}/support"].tolist()
            support = HLGaussSupport(vmin, vmax, int(bins), dtype=rl.dtype)
            values = rl[f"hl/{name}/values"]
            probs = support.probs(values)
            rl.close(probs, f"hl/{name}/probs_clean")
            # The published form adds 1e-6 to two denominators.
            published = HLGaussSupport(vmin, vmax, int(bins), eps=1e-6, dtype=rl.dtype)
            rl.close(published.probs(values), f"hl/{name}/probs_ref")
            zero = torch.zeros((), dtype=rl.dtype)
            rl.close(published.probs(zero), f"hl/{name}/prior_zero")

    def test_critic(self, rl):
        need(rl, "critic/value")
        critic = make_critic(rl)
        value, logits, embedding, prediction = critic.module(rl["critic/obs"], rl["critic/action"])
        rl.close(value.squeeze(-1), "critic/value")
        rl.close(logits, "critic/logits")
        rl.close(embedding, "critic/embedding")
        rl.close(prediction, "critic/pred")

    @pytest.mark.parametrize("partial_reset", [0, 1])
    def test_critic_loss(self, rl, partial_reset):
        prefix = f"critic/partial_reset_{partial_reset}"
        need(rl, f"{prefix}/loss")
        # The losses of the files are on the published targets.
        critic = make_critic(rl, support_eps=1e-6)
        obs, action = rl["critic/obs"], rl["critic/action"]
        actor = DiffusionActor(action.shape[-1], obs.shape[-1], dtype=rl.dtype)
        loss = TruDiLoss(actor, critic)
        data = TensorDict(
            {
                "observation": obs,
                "action": action,
                "value_target": rl["critic/target"],
                "next": {"critic": {"embedding": rl["critic/next_embedding"]}},
            },
            [obs.shape[0]],
        )
        if not partial_reset:
            data["mask"] = 1 - rl["critic/truncated"]
        out = loss.critic_loss(data)
        rl.close(out["loss_critic"], f"{prefix}/loss")
        rl.close(out["value_cross_entropy"], f"{prefix}/ce")
        rl.close(out["auxiliary_error"], f"{prefix}/aux")
        out["loss_critic"].backward()
        norm = nn.utils.get_total_norm([p.grad for p in loss.critic_parameters()])
        rl.close(norm, f"{prefix}/grad_norm_total", gradient=True)


class TestReturns:
    def test_soft_td_lambda(self, rl):
        names = rl.groups("td")
        if not names:
            pytest.skip(f"{rl.path.name} has no td/")
        for name in names:
            block = {
                k: rl[f"td/{name}/{k}"]
                for k in ("reward", "next_value", "next_log_prob", "terminated", "truncated")
            }
            gamma, lmbda, alpha = rl[f"td/{name}/gamma_lambda_alpha"].tolist()
            reward, value, log_prob = (
                block[k].unsqueeze(-1) for k in ("reward", "next_value", "next_log_prob")
            )
            terminated, truncated = (
                block[k].bool().unsqueeze(-1) for k in ("terminated", "truncated")
            )

            def returns(
                truncated,
                mask,
                *,
                gamma=gamma,
                lmbda=lmbda,
                alpha=alpha,
                reward=reward,
                value=value,
                log_prob=log_prob,
                terminated=terminated,
            ):
                return soft_td_lambda_return(
                    gamma,
                    lmbda,
                    alpha,
                    value,
                    log_prob,
                    reward,
                    truncated | terminated,
                    terminated,
                    mask_terminal_entropy=mask,
                    time_dim=0,
                ).squeeze(-1)

            rl.close(returns(truncated, True), f"td/{name}/returns_entropy_masked")
            rl.close(returns(truncated, False), f"td/{name}/returns")
            rl.close((reward - gamma * alpha * log_prob).squeeze(-1), f"td/{name}/soft_reward")
            after = truncated.clone()
            after[-1] = True
            rl.close(after.squeeze(-1).to(rl.dtype), f"td/{name}/truncated_after")
            # The last row bootstraps whether or not it is flagged.
            torch.testing.assert_close(returns(after, True), returns(truncated, True))
            # A variant whose gate is the next row's flag, and wins over termination.
            gate = torch.cat([truncated[1:], torch.ones_like(truncated[:1])])
            gated = returns(gate, False, terminated=terminated & ~gate)
            rl.close(gated, f"td/{name}/returns_jax_gate")


class TestNormalizer:
    def test_statistics(self, rl):
        need(rl, "norm/x0")
        batches = sorted(k for k in rl if k.startswith("norm/x"))
        eps = float(rl["norm/eps"]) if "norm/eps" in rl else 1e-2
        for inside, name in ((False, "std_plus_eps"), (True, "sqrt_var_plus_eps")):
            # The files hold the published update of the variance, which is not exact.
            stats = RunningMeanVar(
                rl["norm/x0"].shape[-1:], eps=eps, eps_inside_sqrt=inside, exact_variance=False
            )
            for i, key in enumerate(batches):
                stats.update(rl[key])
                rl.close(stats.mean, f"norm/mean{i}")
                rl.close(stats.var, f"norm/var{i}")
                rl.close(stats.normalize(rl[key]), f"norm/y{i}_{name}")


def test_chain_type():
    """The tuple that sampling returns is what scoring takes."""
    assert DenoisingChain._fields == ("latents", "loc", "scale")
