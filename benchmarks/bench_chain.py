"""Cost of the denoising chain: ours against the same computation written naively, in one run.

    python benchmarks/bench_chain.py [--json] [--batch 1024] [--obs 348] [--act 17] [--width 256]

One thread, medians. The naive forms call the plain network on the concatenated input at every step.
Multiply-adds per sample, width h, L layers, N steps, observation O, action A, step embedding T:

- naive chain: N [(A + O + T) h + (L - 2) h^2 + h A]
- ours: O h + N [A h + (L - 2) h^2 + h A]; the step part, N T h, is paid once per call
- path KL with a frozen copy: one sequential chain and one batched evaluation of N steps; recorded: the
  batched evaluation alone
"""

from __future__ import annotations

import argparse
import json

import torch
from _learner_parts import Sizes, make_actor
from _timing import medians_ms
from tensordict import TensorDict

from torchrl_trudi.modules import DenoisingModel
from torchrl_trudi.objectives import TrajectoryKLProjection


def naive_sample(model: DenoisingModel, observation: torch.Tensor, noise: torch.Tensor):
    """The chain as the equations say it: the whole network at every step."""
    latent, latents = noise[:, 0] * model.prior_std, []
    eta, scale = model.kernel_coefficients()
    for n in range(model.num_steps):
        control = model.score_network(latent, observation, torch.tensor(n))
        latent = latent + eta[n] * (model.drift(latent) + control) + scale[n] * noise[:, n + 1]
        latents.append(latent)
    return torch.stack(latents, 1)


def run(batch: int, obs: int, act: int, width: int, repeats: int) -> dict[str, float]:
    """Times in ms, and naive / ours ratios."""
    torch.manual_seed(0)
    sizes = Sizes(obs, act, width)
    actor = make_actor(sizes, return_chain=True, return_dist_params=True)
    observation = torch.randn(batch, obs)
    noise = actor.module.draw_noise((batch,))
    with torch.no_grad():
        data = actor(TensorDict({"observation": observation}, [batch]))
        ours = actor.module.sample(observation, noise).latents[:, 1:]
        torch.testing.assert_close(
            naive_sample(actor.module, observation, noise), ours, atol=1e-3, rtol=1e-3
        )
    regions = {
        name: TrajectoryKLProjection(actor, mode="lagrangian", old_policy=name)
        for name in ("recorded", "target")
    }

    @torch.no_grad()
    def sample() -> None:
        actor.module.sample(observation, noise)

    @torch.no_grad()
    def sample_naive() -> None:
        naive_sample(actor.module, observation, noise)

    functions = {"sample": sample, "sample_naive": sample_naive}
    for name, region in regions.items():
        functions[f"kl_{name}"] = lambda region=region: region(data)[
            "loss_trajectory_kl"
        ].backward()
    out = {f"{name}_ms": value for name, value in medians_ms(functions, repeats).items()}
    out["sample_ratio"] = out["sample_naive_ms"] / out["sample_ms"]
    out["kl_ratio"] = out["kl_target_ms"] / out["kl_recorded_ms"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("batch", 1024),
        ("obs", 348),
        ("act", 17),
        ("width", 256),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    torch.set_num_threads(1)
    out = {key: round(value, 3) for key, value in run(**arguments).items()}
    print(json.dumps(out) if as_json else "\n".join(f"{k:>16}: {v}" for k, v in out.items()))


if __name__ == "__main__":
    main()
