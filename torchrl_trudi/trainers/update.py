"""One gradient step of the critic and of the actor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import CudaGraphModule
from torch import nn

from torchrl_trudi.objectives import TruDiLoss, TruDiPPOLoss

__all__ = ["TruDiUpdate", "keep_settings"]

_log = logging.getLogger(__name__)


@contextmanager
def keep_settings(*optims: torch.optim.Optimizer, states: Container[str] = ()) -> Iterator[None]:
    """Context in which optimisers may load a state, and afterwards have the settings they had before.

    The state of an optimiser brings learning rates and the like with it, those of the run that saved
    it. A run that goes on with others means them.

    Args:
        *optims (torch.optim.Optimizer): the optimisers.

    Keyword Args:
        states (Container of str, optional): settings of the first optimiser's first group that are state all
            the same, such as the ``"lr"`` of a schedule. Defaults to none.
    """
    settings = [
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in each.param_groups
        ]
        for each in optims
    ]
    yield
    for number, (each, groups) in enumerate(zip(optims, settings, strict=True)):
        for index, (group, given) in enumerate(zip(each.param_groups, groups, strict=True)):
            group.update({k: v for k, v in given.items() if number or index or k not in states})


class TruDiUpdate:
    """The published step on a minibatch: the critic's, then the actor's on the stepped critic.

    A step whose loss or gradient is not finite is skipped: neither the parameters nor the optimiser's moments
    and step counters change, bit for bit. Critic and actor (with the duals) are judged separately. On a
    GPU no step waits for the answer if the optimiser is fused: its kernel gets it, as from
    ``torch.amp.GradScaler``. With other optimisers each minibatch waits for the device twice.

    Args:
        loss (TruDiLoss or TruDiPPOLoss): the losses.
        optim_actor (torch.optim.Optimizer): of the policy and the duals, see
            :meth:`~torchrl_trudi.objectives.TruDiLoss.actor_param_groups`.
        optim_critic (torch.optim.Optimizer): of the critic.

    Keyword Args:
        max_grad_norm (float, optional): the gradients are scaled down to this norm.
            Defaults to ``0.5``.
        compile (bool or dict, optional): evaluate the losses through ``torch.compile``; a dict
            holds its arguments. All minibatches must then have one size, for which the first call
            compiles, once. If it fails, a warning says so and the losses are evaluated as
            without it. Compiled losses evaluate both branches of the gate for every state.
            Defaults to ``False``.
        autocast_dtype (torch.dtype, optional): type in which the networks compute
            (``torch.bfloat16``); log-probabilities, divergences and histograms keep the type of
            the parameters. The recorded means were made without it, so that the path KL of a
            policy that has not moved is that of the rounding, 1e-3 to 3e-2 for a diffusion policy.
            Defaults to ``None``, that of the parameters.
        cudagraphs (bool, optional): replay the whole step as one CUDA graph. The optimisers must
            be ``capturable`` and ``fused``, the policy on a CUDA device. The graph holds the learning rates as they
            are at the third call, unless they are tensors, and the optimisers' state as it lies in
            memory: load a checkpoint before. Defaults to ``False``.
        reduce_gradients (Callable, optional): called with the list of parameters between their
            backward pass and the clipping, such as
            :meth:`~torchrl_trudi.trainers.distributed.Ranks.average_gradients`. Not with CUDA graphs.
            Defaults to ``None``.

    Attributes:
        warmup_seconds (float or None): duration of the first call if something was compiled in it.

    Raises:
        ValueError: an optimiser of other parameters; ``max_grad_norm <= 0``; an ``autocast_dtype`` that needs a gradient scaler; CUDA
            graphs of a policy on another device, with optimisers that are not capturable and fused, or
            with ``reduce_gradients``.
        TypeError: ``compile`` is no bool or dict.
        RuntimeError: a learning rate that changed after the CUDA graph was captured.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import DiffusionActor, HLGaussCritic, HLGaussValueOperator
        >>> from torchrl_trudi.objectives import TruDiLoss, TruDiPPOLoss
        >>> from torchrl_trudi.trainers.update import TruDiUpdate
        >>> actor = DiffusionActor(2, 3, return_chain=True, return_dist_params=True)
        >>> critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0, hidden_size=16))
        >>> loss = TruDiLoss(actor, critic)
        >>> update = TruDiUpdate(
        ...     loss,
        ...     torch.optim.Adam(loss.actor_param_groups(lr=3e-4)),
        ...     torch.optim.Adam(loss.critic_parameters(), lr=3e-4),
        ... )
        >>> with torch.no_grad():
        ...     batch = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> batch["value_target"] = torch.randn(4, 1)
        >>> batch["next", "critic", "embedding"] = torch.randn(4, 16)
        >>> metrics = update(batch)
        >>> metrics["grad_norm"].shape
        torch.Size([])
    """

    def __init__(
        self,
        loss: TruDiLoss | TruDiPPOLoss,
        optim_actor: torch.optim.Optimizer,
        optim_critic: torch.optim.Optimizer,
        *,
        max_grad_norm: float = 0.5,
        compile: bool | dict[str, Any] = False,
        autocast_dtype: torch.dtype | None = None,
        cudagraphs: bool = False,
        reduce_gradients: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        if not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}.")
        if not isinstance(compile, bool | dict):
            raise TypeError(f"compile must be a bool or a dict of arguments, got {compile!r}.")
        if autocast_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast_dtype must be torch.bfloat16 or None, got {autocast_dtype}: float16 would "
                "need its gradients scaled."
            )
        for name, optim, owned in (
            ("actor", optim_actor, [*loss.actor_parameters(), *loss.dual_parameters()]),
            ("critic", optim_critic, [*loss.critic_parameters()]),
        ):
            given = {id(p) for group in optim.param_groups for p in group["params"]}
            if not given or not given.issubset(map(id, owned)):
                raise ValueError(
                    f"optim_{name} holds parameters that are not those of this loss's {name}: build "
                    f"it on loss.{'actor_param_groups' if name == 'actor' else 'critic_parameters'}."
                )
        device = next(loss.actor_parameters()).device
        if cudagraphs:
            if reduce_gradients is not None:
                raise ValueError(
                    "CUDA graphs do not hold what reduce_gradients does between steps."
                )
            if device.type != "cuda":
                raise ValueError(f"CUDA graphs need a policy on a CUDA device, it is on {device}.")
            for optim in (optim_actor, optim_critic):
                for option in ("capturable", "fused"):
                    if not all(group.get(option, False) for group in optim.param_groups):
                        raise ValueError(
                            f"CUDA graphs need optimisers built with {option}=True, got "
                            f"{type(optim).__name__} without."
                        )
        self.loss = loss
        self.optim_actor, self.optim_critic = optim_actor, optim_critic
        self.max_grad_norm = max_grad_norm
        self.autocast_dtype = autocast_dtype
        self.warmup_seconds: float | None = None
        self._reduce_gradients = reduce_gradients
        self._device_type = device.type
        # A fused kernel can be told to change nothing. On the CPU to look at a number costs nothing, and
        # an optimiser that has not made a step yet then stays without state.
        self._tells_kernel = device.type != "cpu"
        self._actor_loss: Callable = loss.actor_loss
        self._critic_loss: Callable = loss.critic_loss
        self._compiles = compile is not False
        if self._compiles:
            options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
            options.update(compile if isinstance(compile, dict) else {})
            self._actor_loss = torch.compile(loss.actor_loss, **options)
            self._critic_loss = torch.compile(loss.critic_loss, **options)
        self._step: Callable = self._eager_step
        self._captured_rates: list[float] | None = None
        if cudagraphs:
            self._step = CudaGraphModule(
                self._eager_step, in_keys=list(loss.minibatch_keys), out_keys=[]
            )
            self._captured_rates = self._learning_rates()

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Step once.

        Args:
            batch (TensorDictBase): transitions ``[B]`` with ``loss.minibatch_keys``.

        Returns:
            TensorDict: detached losses and diagnostics, with ``grad_norm`` and
            ``grad_norm_critic`` before clipping, and ``skipped`` and ``skipped_critic``, 1 where the
            actor's or the critic's step was not made because its loss or gradient is not finite, else 0.
        """
        first = self._compiles and self.warmup_seconds is None
        start = time.perf_counter()
        if self._captured_rates is not None and self._captured_rates != self._learning_rates():
            raise RuntimeError(
                "A learning rate has changed, but the CUDA graph holds the one it was captured "
                "with. Build the optimisers with tensors as learning rates, or a new TruDiUpdate."
            )
        keys = self._keys(batch.keys(True, True))
        # What is missing is named by the losses, with advice.
        metrics = self._step(batch.select(*keys, strict=False))
        if first:
            self.warmup_seconds = time.perf_counter() - start
            _log.info("The first compiled update took %.0f s.", self.warmup_seconds)
        return metrics

    def _keys(self, present: Container[NestedKey]) -> list[NestedKey]:
        """What is read of a batch: the mask is optional, the rest is not."""
        keys = list(self.loss.minibatch_keys)
        mask = getattr(self.loss.tensor_keys, "mask", None)
        if mask is not None and unravel_key(mask) in present:
            keys.append(unravel_key(mask))
        return keys

    def _learning_rates(self) -> list[float]:
        """Those that a CUDA graph would hold."""
        groups = [*self.optim_actor.param_groups, *self.optim_critic.param_groups]
        return [group["lr"] for group in groups if not isinstance(group["lr"], torch.Tensor)]

    def _eager_step(self, batch: TensorDictBase) -> TensorDict:
        critic = self._critic_step(batch)
        with self._autocast():
            actor = self._evaluate("_actor_loss", batch)
        losses = [value for key, value in actor.items() if key.startswith("loss_")]
        total = torch.stack(losses).sum()
        params = [p for group in self.optim_actor.param_groups for p in group["params"]]
        norm, skipped = self._descend(self.optim_actor, total, params)
        return actor.update(critic).set("grad_norm", norm).set("skipped", skipped).detach()

    def step_critic(self, batch: TensorDictBase) -> TensorDict:
        """Step the critic alone, for instance in the epochs after the policy has moved far enough.

        Args:
            batch (TensorDictBase): see :meth:`__call__`.

        Returns:
            TensorDict: the critic's detached losses and diagnostics, with ``grad_norm_critic`` and
            ``skipped_critic``.
        """
        keys = self._keys(batch.keys(True, True))
        return self._critic_step(batch.select(*keys, strict=False)).detach()

    def _critic_step(self, batch: TensorDictBase) -> TensorDict:
        with self._autocast():
            critic = self._evaluate("_critic_loss", batch)
        norm, skipped = self._descend(
            self.optim_critic, critic["loss_critic"], self.loss.critic_parameters()
        )
        return critic.set("grad_norm_critic", norm).set("skipped_critic", skipped)

    def _autocast(self) -> AbstractContextManager:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.autocast_dtype)

    def _evaluate(self, name: str, batch: TensorDictBase) -> TensorDict:
        """A loss, compiled or, where that fails, not."""
        if not self._compiles or self.warmup_seconds is not None:
            return getattr(self, name)(batch)
        # Nothing has been changed yet when compilation fails: the random state apart, which both
        # ways draw from, the losses only read.
        try:
            return getattr(self, name)(batch)
        except Exception as error:
            eager = getattr(self.loss, name.removeprefix("_"))
            setattr(self, name, eager)
            out = eager(batch)  # raises again what is no matter of compilation
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            _log.warning(
                "%s could not be compiled (%s: %s); it is evaluated eagerly.",
                name.removeprefix("_"),
                type(error).__name__,
                reason,
            )
            return out

    def _descend(
        self, optim: torch.optim.Optimizer, total: torch.Tensor, params
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step down the gradient; returns the gradient's norm, and 1 if the step was skipped, else 0."""
        params = list(params)
        optim.zero_grad()
        total.backward()
        finite = total.detach().isfinite()
        if self._reduce_gradients is not None:
            # All processes must skip alike: where the loss is not finite, the gradient is not either.
            first = params[0]
            if first.grad is None:
                first.grad = torch.zeros_like(first)
            first.grad.add_(torch.where(finite, 0.0, torch.nan).to(first))
            # Before the clipping, so that all processes clip, and step, alike.
            self._reduce_gradients(params)
            finite = torch.ones_like(finite)
        # Of a gradient that is not finite this makes one of NaN, which the next call throws away.
        norm = nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        skipped = ~(finite & norm.isfinite())
        if self._tells_kernel and all(group.get("fused") for group in optim.param_groups):
            # Read by the kernel, which then neither writes nor counts.
            optim.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
            try:
                optim.step()
            finally:
                del optim.found_inf  # type: ignore[attr-defined]
        elif not skipped:
            optim.step()
        return norm, skipped.to(norm.dtype)
