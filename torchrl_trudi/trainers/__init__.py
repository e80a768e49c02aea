"""Training: configuration, run directories and builders."""

from __future__ import annotations

from torchrl_trudi.trainers.config import (
    ConfigError,
    TrainConfig,
    config_table,
    register_configs,
    resolve_device,
    validate,
)
from torchrl_trudi.trainers.overrides import check_overrides, exit_on_config_error
from torchrl_trudi.trainers.run_dir import load_config, make_run_dir, resumed_config

__all__ = [
    "ConfigError",
    "TrainConfig",
    "check_overrides",
    "config_table",
    "exit_on_config_error",
    "load_config",
    "make_run_dir",
    "register_configs",
    "resolve_device",
    "resumed_config",
    "validate",
]
