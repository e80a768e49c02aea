"""Loading of golden files into our modules (layout: test/golden/README.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from torchrl_trudi.modules import (
    DiffusionActor,
    HLGaussCritic,
    HLGaussValueOperator,
    ScoreNetwork,
    StepSizes,
)

GOLDEN_DIR = Path(os.environ.get("TRUDI_GOLDEN_DIR", Path(__file__).parent / "golden"))


def files(prefix: str) -> list[Path]:
    """Golden files of one kind; an empty folder fails at collection instead of passing."""
    if not GOLDEN_DIR.is_dir():
        raise FileNotFoundError(f"TRUDI_GOLDEN_DIR={GOLDEN_DIR} is not a folder.")
    return sorted(GOLDEN_DIR.glob(f"{prefix}*.npz"))


class Golden(dict):
    """Arrays of one file as tensors, with the file's tolerances."""

    def __init__(self, path: Path) -> None:
        raw = dict(np.load(path))
        self.path = path
        self.meta = json.loads(str(raw.pop("meta"))) if "meta" in raw else {}
        self.text = {k: str(raw.pop(k)) for k in list(raw) if raw[k].dtype.kind == "U"}
        self.double = path.stem.endswith("f64")
        self.dtype = torch.float64 if self.double else torch.float32
        for key, value in raw.items():
            tensor = torch.from_numpy(np.array(value))
            super().__setitem__(
                key, tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            )

    def close(self, actual: torch.Tensor, key: str, *, gradient: bool = False) -> None:
        """Compare with an array, relative to 1 + |x|."""
        expected = self[key]
        tol = 1e-9 if self.double else (1e-3 if gradient else 1e-4)
        if actual.dtype != torch.bool:
            actual = actual.detach().to(expected.dtype)
        assert actual.shape == expected.shape, (key, actual.shape, expected.shape)
        torch.testing.assert_close(
            actual, expected, rtol=tol, atol=tol, msg=lambda m: f"{key}: {m}"
        )

    def groups(self, prefix: str) -> list[str]:
        """Names of the blocks below a prefix, such as the cases of ``td/``."""
        return sorted({k.split("/")[1] for k in self if k.startswith(prefix + "/")})


def _load(target: torch.Tensor, value: torch.Tensor) -> None:
    assert target.shape == value.shape, (target.shape, value.shape)
    with torch.no_grad():
        target.copy_(value)


def network_map(net: ScoreNetwork, prefix: str) -> dict[str, torch.Tensor]:
    """Golden name -> tensor of a score network."""
    time, main = f"{prefix}/time", f"{prefix}/net"
    names = {
        f"{time}/freq": net.step_embedding.frequencies,
        f"{time}/phase": net.step_embedding.phase,
        f"{time}/w1": net.step_embedding.mlp[0].weight,
        f"{time}/b1": net.step_embedding.mlp[0].bias,
        f"{time}/w2": net.step_embedding.mlp[2].weight,
        f"{time}/b2": net.step_embedding.mlp[2].bias,
        f"{main}/w0": net.input.weight,
        f"{main}/b0": net.input.bias,
        f"{main}/w_out": net.output.weight,
        f"{main}/b_out": net.output.bias,
    }
    linears = [m for m in net.hidden if isinstance(m, nn.Linear)]
    norms = [m for m in net.hidden if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]
    for i, linear in enumerate(linears, start=1):
        names[f"{main}/w{i}"] = linear.weight
        names[f"{main}/b{i}"] = linear.bias
    for i, norm in enumerate(norms, start=1):
        names[f"{main}/norm{i}_w"] = norm.weight
        if getattr(norm, "bias", None) is not None:
            names[f"{main}/norm{i}_b"] = norm.bias
    return names


def actor_map(actor: DiffusionActor) -> dict[str, torch.Tensor]:
    """Golden name -> tensor of an actor."""
    model = actor.module
    names = network_map(model.score_network, "fwd")
    if model.backward_network is not None:
        names.update(network_map(model.backward_network, "bwd"))
    names["friction_raw"] = model.friction_raw
    names["dt_raw"] = model.step_sizes.raw
    if model.learn_prior:
        names["prior_mean"] = model.prior_mean
        names["prior_std_raw"] = model.prior_std_raw
    return names


def make_actor(golden: Golden, which: str, **kwargs) -> DiffusionActor:
    """The actor ``new`` or ``old`` of a file."""
    meta, net = golden.meta, golden.meta["net"]
    norm = "none"
    if net["layer_norm"]:
        norm = {"LayerNorm": "layer", "RMSNorm": "rms"}[net["layer_norm_type"]]

    def score_network() -> ScoreNetwork:
        return ScoreNetwork(
            meta["act"],
            meta["obs"],
            num_layers=net["num_layers"],
            hidden_size=net["num_hid"],
            num_frequencies=net["num_time_hid"],
            step_dim=net["num_time_out"],
            output_clip=net["outer_clip"],
            norm=norm,
            dtype=golden.dtype,
        )

    schedule, minimum, *cosine = meta["schedule"]
    options = dict(zip(("offset", "power"), cosine, strict=False)) if schedule == "cosine" else {}
    learn = "per_step" if meta["per_step_dt"] else ("shared" if meta["learn_dt"] else "none")
    actor = DiffusionActor(
        meta["act"],
        score_network=score_network(),
        num_steps=meta["N"],
        step_sizes=StepSizes(
            meta["N"],
            schedule=schedule,
            minimum=minimum,
            learn=learn,
            dtype=golden.dtype,
            **options,
        ),
        friction="scalar" if golden[f"{which}/friction_raw"].numel() < meta["act"] else "per_dim",
        learn_friction=meta["learn_friction"],
        init_std=meta["init_std"],
        learn_prior=meta["learn_prior"],
        backward_network=score_network() if meta["backward_net"] else None,
        dtype=golden.dtype,
        **kwargs,
    )
    actor.module.step_sizes.raw.requires_grad_(meta["learn_dt"])
    for name, tensor in actor_map(actor).items():
        _load(tensor, golden[f"{which}/{name}"])
    return actor


def make_critic(golden: Golden, **kwargs) -> HLGaussValueOperator:
    """The critic of an ``rl`` file."""
    cfg = json.loads(golden.text["critic/cfg"])
    critic = HLGaussCritic(
        cfg["obs"] + cfg["act"],
        cfg["vmin"],
        cfg["vmax"],
        num_bins=cfg["bins"],
        hidden_size=cfg["hid"],
        num_layers=cfg["layers"],
        dtype=golden.dtype,
        **kwargs,
    )
    parts = {"enc": critic.encoder, "head": critic.head, "pred": critic.predictor}
    for key in golden:
        if not key.startswith("critic/w/"):
            continue
        name = key.removeprefix("critic/w/")
        if name == "zero_dist":
            _load(critic.prior_logits, golden[key])
            continue
        part, name = name.split(".", 1)
        module = parts[part]
        # The last Linear of a part is not wrapped in a block: "1.0.weight" -> "1.weight".
        params = dict(module.named_parameters())
        block, _, leaf = name.split(".")
        target = params.get(name, params.get(f"{block}.{leaf}"))
        _load(target, golden[key])
    return HLGaussValueOperator(critic)
