"""Observation normalisation as an environment transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from torchrl_trudi.envs.running_mean_var import RunningMeanVar


# Not torchrl's VecNormV2(reduce_batch_dims=True, decay=1.0): in 0.14.1 it counts every row of the
# batch on a partial reset (rows that go on are counted twice, with a stale observation), keeps
# E[x^2] in the dtype of the data (float32: the variance of an offset feature is lost, and can be
# NaN) and clamps the scale from below instead of adding eps. The `test_upstream_*` tests of this
# transform fail on the day this changes.
class RunningObservationNorm(Transform):
    """Normalises observations with running statistics that count every state exactly once.

    Each step counts its ``("next", key)``: the true final observation when an episode ends. Each
    reset counts the observations of the rows that are being reset, and no other. The carried-over
    observation at the root of a step is never counted again, nor are specs and zero tensordicts.
    Steps that an environment has marked as faulty (:class:`Quarantine`) are not counted: what they return
    is a stand-in. Statistics are updated first; the values are then normalised with the updated statistics and
    written over the raw ones (or under ``out_keys``).

    Append it once, outside the batch: the statistics are shared by all sub-environments, one per
    feature.

    Updating is governed by :meth:`freeze` and :meth:`unfreeze` and not by ``train()`` and
    ``eval()``: :class:`~torchrl.envs.TransformedEnv` calls ``eval()`` on any transform it is
    given. ``clone()``, which TorchRL calls when an environment is wrapped again, keeps the same
    statistics.

    As a replay-buffer transform (:meth:`forward`) it normalises and never updates.

    Args:
        statistics (Mapping[NestedKey, RunningMeanVar]): statistics of each key to normalise. The
            keys become the ``in_keys``.
        out_keys (Sequence[NestedKey], optional): where the normalised values go, one per key.
            Defaults to ``None``, in place.

    Keyword Args:
        frozen (bool, optional): starts without updating. Defaults to ``False``.
        quarantined_key (NestedKey, optional): the mark of faulty steps, an optional entry. Defaults
            to ``"quarantined"``.

    Raises:
        ValueError: if ``statistics`` is empty, or if ``out_keys`` has another length.

    Examples:
        >>> import torch
        >>> from torchrl.envs import PendulumEnv, TransformedEnv
        >>> from torchrl_trudi.envs import RunningMeanVar, RunningObservationNorm
        >>> norm = RunningObservationNorm({"thdot": RunningMeanVar(())})
        >>> env = TransformedEnv(PendulumEnv(), norm)
        >>> rollout = env.rollout(10)
        >>> norm.get_statistics("thdot").count.item()  # one reset and ten steps
        11
        >>> eval_norm = norm.share(frozen=True)
        >>> eval_norm.get_statistics("thdot") is norm.get_statistics("thdot")
        True
    """

    def __init__(
        self,
        statistics: Mapping[NestedKey, RunningMeanVar],
        out_keys: Sequence[NestedKey] | None = None,
        *,
        frozen: bool = False,
        quarantined_key: NestedKey = "quarantined",
    ) -> None:
        in_keys = [unravel_key(key) for key in statistics]
        if not in_keys:
            raise ValueError("statistics must have at least one key to normalise.")
        out_keys = list(in_keys if out_keys is None else out_keys)
        if len(out_keys) != len(in_keys):
            raise ValueError(
                f"out_keys must have one entry per key: got {out_keys} for the keys {in_keys}."
            )
        super().__init__(in_keys=in_keys, out_keys=out_keys)
        names = [_module_name(key) for key in in_keys]
        if len(set(names)) != len(names):
            raise ValueError(f"the keys {in_keys} are not distinct once joined: {names}.")
        self.statistics = nn.ModuleDict(dict(zip(names, statistics.values(), strict=True)))
        self.quarantined_key = unravel_key(quarantined_key)
        self._frozen = bool(frozen)
        self._keys_with_data: set[NestedKey] = set()

    @classmethod
    def from_spec(
        cls,
        observation_spec: Composite,
        in_keys: Sequence[NestedKey],
        *,
        frozen: bool = False,
        **kwargs: Any,
    ) -> RunningObservationNorm:
        """Builds fresh statistics with the shapes and the device of a spec.

        Args:
            observation_spec (Composite): spec of a batched environment; its ``shape`` is the
                batch size.
            in_keys (Sequence[NestedKey]): the keys to normalise, floating point leaves.

        Keyword Args:
            frozen (bool, optional): starts without updating. Defaults to ``False``.
            **kwargs: options of :class:`RunningMeanVar`, such as ``eps`` and ``clip``.

        Returns:
            RunningObservationNorm: the transform.

        Raises:
            KeyError: if a key is not in ``observation_spec``.
        """
        statistics = {}
        for key in in_keys:
            leaf = observation_spec[key]
            shape = leaf.shape[observation_spec.ndim :]
            statistics[key] = RunningMeanVar(shape, device=leaf.device, **kwargs)
        return cls(statistics, frozen=frozen)

    @property
    def frozen(self) -> bool:
        """Whether the statistics are left as they are."""
        return self._frozen

    def freeze(self) -> RunningObservationNorm:
        """Stops updating the statistics.

        Returns:
            RunningObservationNorm: itself.
        """
        self._frozen = True
        return self

    def unfreeze(self) -> RunningObservationNorm:
        """Goes on updating the statistics.

        Returns:
            RunningObservationNorm: itself.
        """
        self._frozen = False
        return self

    def get_statistics(self, key: NestedKey) -> RunningMeanVar:
        """The statistics of one of the ``in_keys``.

        Args:
            key (NestedKey): the key.

        Returns:
            RunningMeanVar: the module itself, not a copy.

        Raises:
            KeyError: if ``key`` is not one of the ``in_keys``.
        """
        key = unravel_key(key)
        if key not in self.in_keys:
            raise KeyError(f"{key!r} is not normalised here; the keys are {self.in_keys}.")
        return cast(RunningMeanVar, self.statistics[_module_name(key)])

    def share(self, *, frozen: bool) -> RunningObservationNorm:
        """Another transform over the same statistics, for a second environment.

        Args:
            frozen (bool): whether the new transform leaves the statistics as they are. ``True``
                for an evaluation environment.

        Returns:
            RunningObservationNorm: a transform without parent. Updates made through either are
            seen by both; each has its own ``frozen`` flag.
        """
        statistics = {key: self.get_statistics(key) for key in self.in_keys}
        return type(self)(
            statistics,
            list(self.out_keys),
            frozen=frozen,
            quarantined_key=self.quarantined_key,
        )

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        mask = self._sound(next_tensordict)
        return self._normalize(next_tensordict, update=not self._frozen, mask=mask)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # `_step` marks the rows that really step in a partial step.
        mask = tensordict.get("_step", None)
        sound = self._sound(next_tensordict)
        if sound is not None:
            mask = sound if mask is None else sound & mask.reshape(sound.shape)
        return self._normalize(next_tensordict, update=not self._frozen, mask=mask)

    def _sound(self, next_tensordict: TensorDictBase) -> torch.Tensor | None:
        """The rows that are not marked as faulty, ``None`` for all."""
        marked = next_tensordict.get(self.quarantined_key, None)
        # On an accelerator the question would synchronise; the masked update is a little slower.
        if marked is None or (marked.device.type == "cpu" and not marked.any()):
            return None
        return ~marked

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # Rows that are not being reset carry a stale raw observation here. It must not be
        # counted; the environment puts their normalised one back afterwards.
        mask = tensordict.get("_reset", None)
        return self._normalize(tensordict_reset, update=not self._frozen, mask=mask)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalises the keys of a tensordict without updating the statistics.

        Args:
            tensordict (TensorDictBase): holds raw values under the ``in_keys``, with any batch
                size.

        Returns:
            TensorDictBase: the same tensordict, with the ``out_keys`` written.

        Raises:
            KeyError: if one of the ``in_keys`` is missing.
        """
        return self._normalize(tensordict, update=False)

    def _normalize(
        self, tensordict: TensorDictBase, *, update: bool, mask: torch.Tensor | None = None
    ) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = tensordict.get(in_key, None)
            if value is None:
                if self.missing_tolerance:
                    continue
                raise KeyError(f"{in_key!r} is not in the tensordict, nothing to normalise.")
            statistics = self.get_statistics(in_key)
            if update:
                statistics.update(value, mask)
            else:
                self._check_has_data(in_key, statistics)
            tensordict.set(out_key, statistics.normalize(value))
        return tensordict

    def _check_has_data(self, key: NestedKey, statistics: RunningMeanVar) -> None:
        # Remembered once seen: reading `count` at every step would synchronise an accelerator.
        if key in self._keys_with_data:
            return
        if statistics.count.item() == 0:
            raise RuntimeError(
                f"the statistics of {key!r} are empty and are not being updated, so there is "
                "nothing to normalise with. Share those of the training environment "
                "(observation_norm=... in make_env), load a state_dict, or call unfreeze()."
            )
        self._keys_with_data.add(key)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Makes the normalised entries unbounded, same shape and dtype.

        Args:
            observation_spec (Composite): the spec before the transform.

        Returns:
            Composite: the spec after it.
        """
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            leaf = observation_spec[in_key]
            observation_spec[out_key] = Unbounded(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return observation_spec


def _module_name(key: NestedKey) -> str:
    # Names of submodules end up in the state_dict, where dots separate levels.
    parts = (key,) if isinstance(key, str) else key
    return "/".join(parts).replace(".", "/")
