"""Checks of a configuration as a whole: names and types, and what does not go together."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_trudi.trainers.options import (
    ConfigError,
    convert,
    format_value,
    nearest,
    options,
    sections,
)

if TYPE_CHECKING:
    import torch

    from torchrl_trudi.trainers.config import TrainConfig

__all__ = ["contradictions", "misfits", "resolve_device"]

_READERS = {
    "policy.kind": {
        "diffusion": (
            "policy.num_steps",
            "policy.step_size_schedule",
            "policy.learn_step_sizes",
            "policy.friction",
            "policy.learn_friction",
            "policy.init_std",
            "policy.learn_prior",
            "policy.backward_network",
            "objective.actor_gradient",
            "objective.num_adjoint_steps",
            "objective.elbo_coeff",
            "objective.ratio",
        ),
        "gaussian": ("policy.init_scale",),
    },
    "objective.kind": {
        "pathwise": (
            "objective.init_temperature",
            "objective.target_entropy_scale",
            "objective.actor_gradient",
            "objective.num_adjoint_steps",
            "objective.entropy_fraction",
            "objective.elbo_coeff",
            "objective.reuse_actions",
            "trust_region.old_policy",
            "collector.chain_dtype",
            "optim.autocast",
            "critic.aux_coeff",
        ),
        "surrogate": (
            "objective.ratio",
            "objective.clip_epsilon",
            "objective.normalize_advantage",
            "objective.entropy",
            "objective.entropy_coeff",
            "critic.kind",
        ),
    },
    "optim.lr_schedule": {"constant": (), "kl_adaptive": ("optim.max_lr",)},
}
"""Options that are read with one choice alone."""


def misfits(given: Mapping[Any, Any], schema: type) -> list[str]:
    """Unknown keys, and values that cannot be converted to the type of their option.

    Args:
        given: settings by section and name.
        schema: dataclass of the options.

    Returns:
        One line for each problem.
    """
    leaves = {leaf.key: leaf for leaf in options(schema)}
    inner = set(sections(schema))
    problems: list[str] = []

    def check(tree: Mapping[Any, Any], prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = dataclasses.asdict(value)
            if key in inner and isinstance(value, Mapping):
                check(value, f"{key}.")
            elif key in inner:
                problems.append(f"{key}: got {value!r}, accepted: a section of options")
            elif key in leaves:
                converted, problem = convert(leaves[key], value)
                # Values of the right type outside their bounds are reported later.
                if problem and converted is None:
                    problems.append(problem)
            else:
                hint = nearest(key, [*leaves, *inner])
                problems.append(
                    f"{key}: unknown option" + (f", did you mean {hint!r}?" if hint else "")
                )

    check(given, "")
    return problems


def contradictions(config: TrainConfig) -> list[str]:
    """Problems between options that are each acceptable on their own.

    Args:
        config: the configuration, every option of which is acceptable.

    Returns:
        One line for each problem.
    """
    problems = _options_of_another_kind(config)
    collector, env, optim = config.collector, config.env, config.optim
    critic, trust_region = config.critic, config.trust_region
    frames = collector.frames_per_batch
    for key, divisor in (
        ("env.num_envs", env.num_envs),
        ("optim.num_minibatches", optim.num_minibatches),
    ):
        if frames % divisor:
            both = math.lcm(env.num_envs, optim.num_minibatches)
            fitting = max(both, round(frames / both) * both)
            problems.append(
                f"collector.frames_per_batch: got {frames}, accepted: a multiple of "
                f"{key}={divisor}, for instance {fitting}"
            )
    if collector.total_frames < frames:
        problems.append(
            f"collector.total_frames: got {collector.total_frames}, accepted: at least "
            f"collector.frames_per_batch={frames}"
        )
    if not critic.vmin < critic.vmax:
        problems.append(
            f"critic.vmin: got {critic.vmin}, accepted: less than critic.vmax={critic.vmax}"
        )
    problems += _options_of_the_update(config)
    problems += _options_of_the_projection(config)
    recorded = trust_region.old_policy
    if collector.chain_dtype != "float32" and recorded != "recorded":
        problems.append(
            f"collector.chain_dtype: got {collector.chain_dtype!r}, accepted: 'float32' with "
            f"trust_region.old_policy={recorded}, which keeps no chains; a shorter type with "
            "trust_region.old_policy=recorded"
        )
    if config.objective.elbo_coeff > 0 and recorded == "target":
        problems.append(
            f"objective.elbo_coeff: got {config.objective.elbo_coeff}, accepted: 0 with "
            "trust_region.old_policy=target, which keeps no record of where chains ended"
        )
    if trust_region.num_paths > 1 and recorded != "target":
        problems.append(
            f"trust_region.num_paths: got {trust_region.num_paths}, accepted: 1 with "
            f"trust_region.old_policy={recorded}, because one path per state is recorded; more with "
            "trust_region.old_policy=target"
        )
    if trust_region.direction == "reverse":
        if recorded != "target":
            problems.append(
                "trust_region.direction: got 'reverse', accepted: 'forward' with "
                f"trust_region.old_policy={recorded}, because the batch has paths of the old policy "
                "alone; 'reverse' with trust_region.old_policy=target"
            )
        if trust_region.num_paths > 1:
            problems.append(
                f"trust_region.num_paths: got {trust_region.num_paths}, accepted: 1 with "
                "trust_region.direction=reverse"
            )
    for key, names in (
        ("env.normalize_keys", env.normalize_keys),
        ("policy.in_keys", config.policy.in_keys),
        ("critic.in_keys", critic.in_keys),
    ):
        if names is not None and not (names and len(set(names)) == len(names) and all(names)):
            problems.append(
                f"{key}: got {format_value(names)}, accepted: null, or names of entries of the "
                "observation, at least one, each once"
            )
    if env.normalize_keys is not None and not env.normalize_observation:
        problems.append(
            f"env.normalize_keys: got {format_value(env.normalize_keys)}, accepted: null with "
            "env.normalize_observation=false"
        )
    for key, text in (("env.name", env.name), ("logger.dir", config.logger.dir)):
        if not text.strip():
            problems.append(f"{key}: got {text!r}, accepted: text that is not empty")
    return problems


def _options_of_the_update(config: TrainConfig) -> list[str]:
    """What the update could not do, or would not look at."""
    problems = []
    optim, fraction = config.optim, config.objective.entropy_fraction
    if optim.lr_schedule == "kl_adaptive":
        if optim.cudagraphs:
            problems.append(
                "optim.lr_schedule: got 'kl_adaptive', accepted: 'constant' with "
                "optim.cudagraphs=true, whose graph holds the learning rates"
            )
        if optim.max_lr < optim.lr:
            problems.append(
                f"optim.max_lr: got {optim.max_lr}, accepted: at least optim.lr={optim.lr}"
            )
    whole = {
        "trust_region.mode": config.trust_region.mode != "switch" and config.trust_region.mode,
        "trust_region.old_policy": config.trust_region.old_policy == "target" and "target",
        "optim.compile": optim.compile and "true",
        "optim.cudagraphs": optim.cudagraphs and "true",
    }
    for key, value in whole.items():
        if fraction < 1 and value:
            problems.append(
                f"objective.entropy_fraction: got {fraction}, accepted: 1 with {key}={value}, where "
                "states inside and beyond the trust region are evaluated together"
            )
    chosen, num_steps = config.objective.num_adjoint_steps, config.policy.num_steps
    if chosen is not None and config.policy.kind == "diffusion":
        if config.objective.actor_gradient != "adjoint":
            problems.append(
                f"objective.num_adjoint_steps: got {chosen}, accepted: null with "
                f"objective.actor_gradient={config.objective.actor_gradient}; a number with "
                "objective.actor_gradient=adjoint"
            )
        elif chosen > num_steps:
            problems.append(
                f"objective.num_adjoint_steps: got {chosen}, accepted: at most "
                f"policy.num_steps={num_steps}"
            )
    if config.policy.kind == "gaussian":
        # Its means lie as close together as its scale is small: rounding them is no small matter.
        if config.collector.chain_dtype != "float32":
            problems.append(
                f"collector.chain_dtype: got {config.collector.chain_dtype!r}, accepted: 'float32' "
                "with policy.kind=gaussian, whose record is short and whose KL would be that of "
                "the rounding"
            )
        if optim.autocast:
            problems.append(
                "optim.autocast: got True, accepted: False with policy.kind=gaussian, whose KL "
                "would be that of the rounding"
            )
    return problems


def _options_of_the_projection(config: TrainConfig) -> list[str]:
    """What a projected policy cannot do, and what no other would look at."""
    region, problems = config.trust_region, []
    if region.mode != "projection":
        for name, default in (("share", "uniform"), ("regression_coeff", 1.0)):
            value = getattr(region, name)
            if value != default:
                problems.append(
                    f"trust_region.{name}: got {value!r}, accepted: the default "
                    f"{format_value(default)} with trust_region.mode={region.mode}; other values with "
                    "trust_region.mode=projection"
                )
        return problems
    if region.share == "proportional":
        problems.append(
            "trust_region.share: got 'proportional', accepted: 'uniform', also with "
            "objective.kind=surrogate: the policy of a run acts projected and does not know the later "
            "steps of a chain that it is making; the loss alone takes 'proportional'"
        )
    if region.old_policy == "target":
        problems.append(
            "trust_region.old_policy: got 'target', accepted: 'recorded' or 'replayed' with "
            "trust_region.mode=projection, which needs the kernels that acted"
        )
    if config.objective.actor_gradient == "adjoint":
        problems.append(
            "objective.actor_gradient: got 'adjoint', accepted: 'pathwise' with "
            "trust_region.mode=projection, whose means are no linear function of the control"
        )
    if config.objective.elbo_coeff > 0:
        problems.append(
            f"objective.elbo_coeff: got {config.objective.elbo_coeff}, accepted: 0 with "
            "trust_region.mode=projection, whose policy is a chain without backward kernels of its own"
        )
    return problems


def _options_of_another_kind(config: TrainConfig) -> list[str]:
    """Options that this configuration would ignore, and that are not at their default."""
    problems: dict[str, str] = {}
    for chooser, readers in _READERS.items():
        chosen, _ = _value(config, chooser)
        for kind, keys in readers.items():
            for key in keys if kind != chosen else ():
                value, default = _value(config, key)
                if value != default:
                    problems.setdefault(
                        key,
                        f"{key}: got {value!r}, accepted: the default {format_value(default)} with "
                        f"{chooser}={chosen}, which does not have this option; other values with "
                        f"{chooser}={kind}",
                    )
    return list(problems.values())


def _value(config: TrainConfig, key: str) -> tuple[Any, Any]:
    """Value and default of an option."""
    section_name, name = key.split(".")
    section = getattr(config, section_name)
    (default,) = (f.default for f in dataclasses.fields(section) if f.name == name)
    return getattr(section, name), default


def resolve_device(device: str) -> torch.device:
    """Turn ``device`` into a device that this machine has.

    Args:
        device: ``"auto"`` (CUDA if it is available), ``"cpu"``, ``"cuda"`` or ``"cuda:INDEX"``.

    Returns:
        The device.

    Raises:
        ConfigError: if the text is something else, or this machine lacks the device.
    """
    # Imported here so that reading options (``--help``, a misspelt key) does not wait for it.
    import torch

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        hint = nearest(device, ["auto", "cpu", "cuda"])
        raise ConfigError(
            f"device: got {device!r}{f' (did you mean {hint!r}?)' if hint else ''}, "
            "accepted: auto | cpu | cuda | cuda:INDEX"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if ":" not in device and count:
            # With an index: TorchRL takes "cuda" and "cuda:0" for two devices.
            return torch.device("cuda:0")
        if (resolved.index or 0) >= count:
            found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            raise ConfigError(f"device: got {device!r}, accepted on this machine: auto, {found}")
    return resolved
