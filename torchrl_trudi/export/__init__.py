"""Export: policies that act without an environment, and without PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_trudi.export.exporter import ExportError, export_policy
    from torchrl_trudi.export.loader import TorchPolicy, load_policy
    from torchrl_trudi.export.onnx_policy import (
        ExportedPolicy,
        OnnxPolicy,
        PolicyFileError,
        PolicyMetadata,
    )
    from torchrl_trudi.export.policy_module import PolicyModule

# Imported when asked for: `torchrl_trudi.export.onnx_policy` needs no PyTorch, and must not get it by way
# of this package.
_HOMES = {
    "ExportError": "exporter",
    "ExportedPolicy": "onnx_policy",
    "OnnxPolicy": "onnx_policy",
    "PolicyFileError": "onnx_policy",
    "PolicyMetadata": "onnx_policy",
    "PolicyModule": "policy_module",
    "TorchPolicy": "loader",
    "export_policy": "exporter",
    "load_policy": "loader",
}

__all__ = [
    "ExportError",
    "ExportedPolicy",
    "OnnxPolicy",
    "PolicyFileError",
    "PolicyMetadata",
    "PolicyModule",
    "TorchPolicy",
    "export_policy",
    "load_policy",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
