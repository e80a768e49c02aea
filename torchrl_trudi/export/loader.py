"""Loading of policies that act without an environment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from torchrl_trudi.export.onnx_policy import (
    ExportedPolicy,
    OnnxPolicy,
    PolicyFileError,
    PolicyMetadata,
)
from torchrl_trudi.export.restore import restore_policy

__all__ = ["METADATA_FILE", "TorchPolicy", "load_policy"]

METADATA_FILE = "torchrl_trudi.json"
"""Where the metadata is in an archive of ``torch.export``."""


class TorchPolicy(ExportedPolicy):
    """A policy that acts by PyTorch, on the CPU.

    Args:
        module (nn.Module): from observations ``[B, O]``, and noise of a stochastic policy, to actions.
        metadata (PolicyMetadata): what the policy says of itself.

    Keyword Args:
        seed (int, optional): of the noise of a stochastic policy. Defaults to ``None``, not repeatable.
    """

    def __init__(
        self, module: nn.Module, metadata: PolicyMetadata, *, seed: int | None = None
    ) -> None:
        super().__init__(metadata, seed=seed)
        self.module = module

    @torch.no_grad()
    def _act(self, observation: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        inputs = [observation] if noise is None else [observation, noise]
        return self.module(*(torch.from_numpy(array) for array in inputs)).numpy()


def load_policy(
    path: str | os.PathLike, *, stochastic: bool = False, seed: int | None = None
) -> ExportedPolicy:
    """A policy that acts without an environment, a configuration file or Hydra.

    Args:
        path (str or Path): a checkpoint, the directory of a run (its newest checkpoint), or a file of
            :func:`~torchrl_trudi.export.export_policy`, ``.onnx`` or ``.pt2``.

    Keyword Args:
        stochastic (bool, optional): with a checkpoint, sample the chain instead of taking the noise-free
            one; an exported file is what it is. Defaults to ``False``.
        seed (int, optional): of the noise of a stochastic policy. Defaults to ``None``, not repeatable.

    Returns:
        ExportedPolicy: call it with an observation, see :meth:`ExportedPolicy.__call__`.

    Raises:
        FileNotFoundError: there is no such exported file.
        ConfigError: no checkpoint, or one that cannot be used.
        PolicyFileError: an exported file without its metadata, or with another's.
        ValueError: ``stochastic`` with a deterministic file.
    """
    suffix = Path(path).suffix
    policy: ExportedPolicy
    if suffix == ".onnx":
        policy = OnnxPolicy(path, seed=seed)
    elif suffix == ".pt2":
        policy = _load_pt2(path, seed)
    else:
        restored = restore_policy(path)
        metadata = restored.metadata(stochastic=stochastic)
        return TorchPolicy(restored.module(), metadata, seed=seed)
    if stochastic and not policy.metadata.stochastic:
        raise ValueError(
            f"{os.fspath(path)!r} is a deterministic policy: export it with stochastic=True"
        )
    return policy


def _load_pt2(path: str | os.PathLike, seed: int | None) -> TorchPolicy:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    extra = {METADATA_FILE: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    # A damaged archive fails in as many ways as there are bytes.
    except Exception as error:
        raise PolicyFileError(
            f"{os.fspath(path)!r} is not an archive of torch.export: {error}"
        ) from error
    try:
        metadata = _decode(extra[METADATA_FILE])
        _check_program(program, metadata)
    except PolicyFileError as error:
        raise PolicyFileError(f"{os.fspath(path)!r}: {error}") from error
    return TorchPolicy(program.module(), metadata, seed=seed)


def _decode(text: str | bytes) -> PolicyMetadata:
    import json

    try:
        return PolicyMetadata.decode(json.loads(text) if text else {})
    except json.JSONDecodeError as error:
        raise PolicyFileError(f"the metadata is damaged: {error}") from error


def _check_program(program: torch.export.ExportedProgram, metadata: PolicyMetadata) -> None:
    """Raises where inputs and outputs are not those of the metadata."""
    wanted = [[metadata.obs_dim]]
    if metadata.stochastic:
        wanted.append([metadata.num_steps + 1, metadata.action_dim])
    wanted.append([metadata.action_dim])
    signature = program.graph_signature
    names = {*signature.user_inputs, *signature.user_outputs}
    nodes = [node for node in program.graph.nodes if node.name in names]
    found = [list(node.meta["val"].shape[1:]) for node in nodes]
    if found != wanted:
        raise PolicyFileError(
            f"the metadata is not that of the graph: sizes {wanted} there, {found} in the graph"
        )
