"""A policy in an ONNX file: acts with numpy and onnxruntime alone.

This file imports nothing else, and nothing of this package: on a machine without PyTorch, use it by its
own or copy it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

__all__ = ["FORMAT_VERSION", "ExportedPolicy", "OnnxPolicy", "PolicyFileError", "PolicyMetadata"]

FORMAT_VERSION = 1
"""Version of the metadata of an exported policy."""

_PREFIX = "torchrl_trudi."


class PolicyFileError(ValueError):
    """A file that is no exported policy, or one whose metadata and graph disagree."""


@dataclass(frozen=True)
class PolicyMetadata:
    """What an exported policy says of itself.

    Args:
        observation (tuple of (str, int)): entries of the observation in the order in which the policy
            reads them, with their sizes; nested ones are ``"outer/inner"``.
        action_names (tuple of str): names of the ``A`` actions.
        low (tuple of float): lower bounds of the actions, in the units of the task.
        high (tuple of float): upper bounds.
        num_steps (int): number of steps ``N`` of the chain.
        stochastic (bool): whether the policy takes standard normals ``[B, N + 1, A]`` too.
        dt (float, optional): seconds between actions, ``None`` if unknown.
        normalizer_count (int): observations behind the normalisation, 0 without one.
        frames (int): environment steps of the training.
        policy (str): ``"diffusion"`` or ``"gaussian"``.
        config_hash (str): SHA-256 of the training's configuration.
        version (str): version of torchrl_trudi that wrote the file.
        format (int, optional): version of this metadata.

    Raises:
        PolicyFileError: sizes or bounds that do not fit together.

    Examples:
        >>> from torchrl_trudi.export import PolicyMetadata
        >>> metadata = PolicyMetadata(
        ...     (("observation", 3),), ("torque",), (-2.0,), (2.0,), 8, False, 0.05, 100, 64,
        ...     "diffusion", "0" * 64, "0.1.0",
        ... )
        >>> PolicyMetadata.decode(metadata.encode()) == metadata
        True
        >>> metadata.obs_dim, metadata.action_dim
        (3, 1)
    """

    observation: tuple[tuple[str, int], ...]
    action_names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: int
    stochastic: bool
    dt: float | None
    normalizer_count: int
    frames: int
    policy: str
    config_hash: str
    version: str
    format: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        names = [name for name, _ in self.observation]
        if not names or len(set(names)) < len(names) or min(s for _, s in self.observation) < 1:
            raise PolicyFileError(
                f"the entries of the observation make no sense: {self.observation}"
            )
        if not len(self.action_names) == len(self.low) == len(self.high) > 0:
            raise PolicyFileError(
                f"the actions make no sense: {len(self.action_names)} names, {len(self.low)} lower and "
                f"{len(self.high)} upper bounds"
            )
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise PolicyFileError(f"low < high does not hold: {self.low}, {self.high}")
        if self.num_steps < 1:
            raise PolicyFileError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def obs_dim(self) -> int:
        """Summed size ``O`` of the entries."""
        return sum(size for _, size in self.observation)

    @property
    def action_dim(self) -> int:
        """Number of actions ``A``."""
        return len(self.low)

    def encode(self) -> dict[str, str]:
        """JSON by name, with a digest of all."""
        texts = {_PREFIX + name: json.dumps(value) for name, value in asdict(self).items()}
        return {**texts, f"{_PREFIX}digest": _digest(texts)}

    @classmethod
    def decode(cls, texts: Mapping[str, str]) -> PolicyMetadata:
        """The inverse of :meth:`encode`; other names are passed over.

        Args:
            texts (Mapping): JSON by name.

        Returns:
            PolicyMetadata: the metadata.

        Raises:
            PolicyFileError: a field is missing, was changed or is of another format.
        """
        own = {name: text for name, text in texts.items() if name.startswith(_PREFIX)}
        if not own:
            raise PolicyFileError("the file has no metadata of torchrl_trudi")
        digest = own.pop(f"{_PREFIX}digest", None)
        try:
            values = {name[len(_PREFIX) :]: json.loads(text) for name, text in own.items()}
        except json.JSONDecodeError as error:
            raise PolicyFileError(f"the metadata is damaged: {error}") from error
        # First: another format may have other fields.
        if values.get("format") != FORMAT_VERSION:
            raise PolicyFileError(
                f"the file has format {values.get('format')!r}, this version reads {FORMAT_VERSION}"
            )
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            raise PolicyFileError(
                f"the metadata lacks {sorted(names - values.keys())}, and has "
                f"{sorted(values.keys() - names)} too many"
            )
        if digest != _digest(own):
            raise PolicyFileError("the metadata was changed after the export: its digest differs")
        values["observation"] = tuple((name, size) for name, size in values["observation"])
        for name in ("action_names", "low", "high"):
            values[name] = tuple(values[name])
        return cls(**values)


class ExportedPolicy:
    """Base of the policies that act without an environment: what they take, and what they refuse.

    Args:
        metadata (PolicyMetadata): what the policy says of itself.

    Keyword Args:
        seed (int, optional): of the noise of a stochastic policy. Defaults to ``None``, not repeatable.
    """

    def __init__(self, metadata: PolicyMetadata, *, seed: int | None = None) -> None:
        self.metadata = metadata
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Any, noise: Any = None) -> Any:
        """Act.

        Args:
            observation (numpy.ndarray, torch.Tensor or Mapping): ``[O]`` or ``[B, O]`` in the units of
                the task, or such arrays by name. A policy that reads several entries takes them by
                name only, so that their order cannot be wrong; nested ones as ``"outer/inner"`` or in
                nested mappings. Entries that it does not read are passed over.
            noise (numpy.ndarray or torch.Tensor, optional): of a stochastic policy, standard normals
                ``[N + 1, A]`` or ``[B, N + 1, A]``. Defaults to ``None``, drawn.

        Returns:
            numpy.ndarray or torch.Tensor: actions ``[A]`` or ``[B, A]``, float32, in the units of the
            task; of the kind of the observation.

        Raises:
            KeyError: an entry is missing.
            ValueError: another shape, several entries without names, numbers that are not finite,
                ``noise`` for a deterministic policy.
            TypeError: no numbers.
        """
        array, torch = self._read(observation)
        single = array.ndim == 1
        array = array[None] if single else array
        action = self._act(array, self._noise(noise, array.shape[0], single))
        action = action[0] if single else action
        return action if torch is None else torch.from_numpy(action)

    def _act(self, observation: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """``[B, O]``, and noise of a stochastic policy, to ``[B, A]``; all float32."""
        raise NotImplementedError

    def _read(self, observation: Any) -> tuple[np.ndarray, Any]:
        """The concatenated entries ``[O]`` or ``[B, O]``, and torch if they were its tensors."""
        entries = self.metadata.observation
        names = [name for name, _ in entries]
        if isinstance(observation, Mapping):
            values = [_entry(observation, name) for name in names]
        elif len(entries) == 1:
            values = [observation]
        else:
            raise ValueError(
                f"the policy reads the entries {names}: pass a dictionary, and not one array, whose "
                "order could be another"
            )
        kinds = [_to_numpy(value, name) for value, name in zip(values, names, strict=True)]
        parts = [array for array, _ in kinds]
        for (name, size), part in zip(entries, parts, strict=True):
            if part.ndim not in (1, 2) or part.shape[-1] != size:
                raise ValueError(
                    f"{name!r} must have the shape [{size}] or [B, {size}], got {list(part.shape)}"
                )
            if not np.isfinite(part).all():
                raise ValueError(f"{name!r} has numbers that are not finite")
        if len({part.shape[:-1] for part in parts}) > 1:
            shapes = {name: list(part.shape) for name, part in zip(names, parts, strict=True)}
            raise ValueError(f"the entries have different batch sizes: {shapes}")
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return array, kinds[0][1]

    def _noise(self, noise: Any, batch: int, single: bool) -> np.ndarray | None:
        meta = self.metadata
        if not meta.stochastic:
            if noise is not None:
                raise ValueError("the policy is deterministic: it takes no noise")
            return None
        shape = (batch, meta.num_steps + 1, meta.action_dim)
        if noise is None:
            return self._rng.standard_normal(shape, dtype=np.float32)
        array, _ = _to_numpy(noise, "noise")
        array = array[None] if single and array.ndim == 2 else array
        if array.shape != shape:
            raise ValueError(f"noise must have the shape {list(shape)}, got {list(array.shape)}")
        return array


class OnnxPolicy(ExportedPolicy):
    """A policy in a file of :func:`~torchrl_trudi.export.export_policy`, run by onnxruntime.

    Args:
        path (str or Path): the ONNX file.

    Keyword Args:
        seed (int, optional): of the noise of a stochastic policy. Defaults to ``None``, not repeatable.
        num_threads (int, optional): threads of a call. Defaults to ``1``, the fastest for a small
            network and one observation.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: onnxruntime is not installed.
        PolicyFileError: no ONNX file, no metadata, or metadata that does not belong to the graph.
    """

    def __init__(
        self, path: str | os.PathLike, *, seed: int | None = None, num_threads: int = 1
    ) -> None:
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no file {path!r}")
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                "an ONNX policy needs onnxruntime: pip install onnxruntime"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        # Its exceptions have no common base but this one.
        except Exception as error:
            raise PolicyFileError(
                f"{path!r} is not an ONNX file that can be read: {error}"
            ) from error
        try:
            metadata = PolicyMetadata.decode(session.get_modelmeta().custom_metadata_map)
            _check_graph(session, metadata)
        except PolicyFileError as error:
            raise PolicyFileError(f"{path!r}: {error}") from error
        super().__init__(metadata, seed=seed)
        self._session = session

    def _act(self, observation: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        inputs = {"observation": observation}
        if noise is not None:
            inputs["noise"] = noise
        return self._session.run(["action"], inputs)[0]


def _check_graph(session: Any, metadata: PolicyMetadata) -> None:
    """Raises where inputs and outputs are not those of the metadata."""
    wanted = {"observation": [metadata.obs_dim], "action": [metadata.action_dim]}
    if metadata.stochastic:
        wanted["noise"] = [metadata.num_steps + 1, metadata.action_dim]
    found = {
        value.name: list(value.shape[1:])
        for value in (*session.get_inputs(), *session.get_outputs())
    }
    if found != wanted:
        raise PolicyFileError(
            f"the metadata is not that of the graph: sizes {wanted} there, {found} in the graph"
        )


def _digest(texts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(texts.items()))).encode()).hexdigest()


def _entry(observation: Mapping, name: str) -> Any:
    """An entry by its flat name, or in nested mappings."""
    if name in observation:
        return observation[name]
    value: Any = observation
    for part in name.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(f"the observation has no entry {name!r}, only {list(observation)}")
        value = value[part]
    return value


def _to_numpy(value: Any, name: str) -> tuple[np.ndarray, Any]:
    """A float32 array, and torch if the value is a tensor: whoever has one has imported it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return np.ascontiguousarray(value.detach().float().cpu().numpy()), torch
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name!r} must hold numbers, got the type {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.float32), None
