"""The processes of one training run, which take every step together."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from torchrl_trudi.trainers.checks import resolve_device
from torchrl_trudi.trainers.options import ConfigError

__all__ = ["RankError", "Ranks"]

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed; its own message says why."""


class Ranks:
    """Context of the processes that ``torchrun`` started, as one group.

    Without ``torchrun``, or with one process, there is no group: every method returns what it is given,
    and costs nothing. With several, each rank calls the same methods in the same order: a method
    returns on no rank before all have called it. Results are the same, bit for bit, on all of them.

    Tensors on the CPU go through gloo, those on a CUDA device through NCCL. A rank that is gone, or
    that does not come within ``timeout_s``, ends the others with an error.

    Args:
        device (str, optional): ``"auto"``, ``"cpu"`` or ``"cuda"``; with one process also
            ``"cuda:INDEX"``. Of several on a machine with GPUs, each takes that of its ``LOCAL_RANK``.
            Defaults to ``"auto"``.

    Keyword Args:
        timeout_s (float, optional): seconds that a rank waits for the others: longer than an evaluation,
            a checkpoint or a compilation. Defaults to ``600.0``.

    Attributes:
        rank (int): number of this process, from 0.
        world_size (int): number of processes.
        device (torch.device): device of this process.

    Raises:
        ConfigError: a device that this machine lacks, or one for several ranks; an incomplete
            environment.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.trainers.distributed import Ranks
        >>> with Ranks("cpu") as ranks:
        ...     print(ranks.world_size, ranks.is_main, ranks.any(False))
        ...     print(ranks.sum(torch.tensor(3.0)))
        1 True False
        tensor(3.)
    """

    def __init__(self, device: str = "auto", *, timeout_s: float = 600.0) -> None:
        self.world_size = _variable("WORLD_SIZE", 1)
        self.rank, local_rank = 0, 0
        if self.world_size > 1:
            self.rank, local_rank = _variable("RANK"), _variable("LOCAL_RANK")
        self.device = self._device(device, local_rank)
        self._timeout = datetime.timedelta(seconds=timeout_s)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that logs, evaluates and saves."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.world_size > 1

    def __enter__(self) -> Ranks:
        if self.several:
            cuda = self.device.type == "cuda"
            if cuda:
                torch.cuda.set_device(self.device)
            # The statistics of the environments, decisions and objects are on the CPU in any case.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=self._timeout)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.several:
            return
        if error is None:
            # A rank that left would end those that still wait for it with an error.
            self.barrier()
        elif self.device.type == "cuda":
            # Would wait for operations that others may never join; the end of the process does not.
            return
        dist.destroy_process_group()

    def _device(self, name: str, local_rank: int) -> torch.device:
        if not self.several:
            return resolve_device(name)
        if name.startswith("cuda:"):
            raise ConfigError(
                f"device: got {name!r}, accepted with {self.world_size} processes: auto, cpu, cuda; each "
                "takes the GPU of its LOCAL_RANK"
            )
        device = resolve_device(name)
        return device if device.type == "cpu" else resolve_device(f"cuda:{local_rank}")

    # -- numbers -----------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks.

        Args:
            tensor (torch.Tensor): of one shape and type on all ranks; left as it is.

        Returns:
            torch.Tensor: the sum, detached.
        """
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of a floating point tensor over the ranks, see :meth:`sum`."""
        return self._reduce(tensor, dist.ReduceOp.SUM) / self.world_size if self.several else tensor

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if not self.several:
            return tensor
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, op=operation)
        return tensor

    def average_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their means over the ranks, in one reduction of all of them.

        The mean over ranks of the gradient of a mean over equal shares is the gradient of the mean over
        everything. A parameter without a gradient on some ranks has one of zeros there; one without
        on all ranks stays without.

        Args:
            params (Iterable of nn.Parameter): the parameters, in one order on all ranks.
        """
        if not self.several:
            return
        params = list(params)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        has_grad = [p.grad is not None for p in params]
        flags = torch.tensor(has_grad, dtype=grads[0].dtype).to(grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), flags])
        dist.all_reduce(flat)
        *means, flags = flat.split([*(p.numel() for p in params), len(params)])
        # Read only where it matters: the others know that there is one.
        anywhere = has_grad if all(has_grad) else (flags > 0).tolist()
        for param, mean, present in zip(params, means, anywhere, strict=True):
            if present:
                mean = (mean / self.world_size).view_as(param)
                param.grad = mean if param.grad is None else param.grad.copy_(mean)

    def reduce_metrics(self, metrics: TensorDict) -> TensorDict:
        """Means over the ranks, and of entries named ``*_max`` or ``max_*`` the largest.

        Args:
            metrics (TensorDict): floating point entries, the same on all ranks.

        Returns:
            TensorDict: of the same batch size.
        """
        if not self.several:
            return metrics
        out = metrics.detach().clone()
        for largest in (False, True):
            keys = [key for key in sorted(out.keys()) if _is_maximum(key) == largest]
            if not keys:
                continue
            values = [out.get(key) for key in keys]
            flat = torch.cat([value.reshape(-1) for value in values])
            flat = self._reduce(flat, dist.ReduceOp.MAX) if largest else self.mean(flat)
            parts = flat.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view_as(value))
        return out

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all ranks the tensors of rank 0, in place.

        Args:
            tensors (Iterable of torch.Tensor): in one order, and of the same shapes, on all ranks.
        """
        if not self.several:
            return
        for tensor in tensors:
            # gloo has no booleans.
            wire = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
            dist.broadcast(wire, src=0)
            tensor.copy_(wire)

    # -- decisions ---------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank, for a decision that all of them take alike."""
        return bool(self._reduce(torch.tensor(int(flag)), dist.ReduceOp.MAX))

    def all(self, flag: bool) -> bool:
        """Whether a flag is set on all ranks."""
        return bool(self._reduce(torch.tensor(int(flag)), dist.ReduceOp.MIN))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    # -- objects -----------------------------------------------------------------------

    def on_main(self, function: Callable[[], T]) -> T:
        """What a function returns, called on rank 0 alone.

        Args:
            function (Callable): without arguments; its result can be pickled.

        Returns:
            The result, on all ranks.

        Raises:
            RankError: on the other ranks, if it raised on rank 0, where the exception itself is raised.
        """
        if not self.several:
            return function()
        if not self.is_main:
            outcome: list[Any] = [None, None]
            dist.broadcast_object_list(outcome, src=0)
            result, problem = outcome
            if problem is not None:
                raise RankError(f"rank 0 failed: {problem}")
            return result
        try:
            result = function()
        except BaseException as error:
            dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"], src=0)
            raise
        dist.broadcast_object_list([result, None], src=0)
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on rank 0; elsewhere an empty list.

        Args:
            value: an object that can be pickled.
        """
        if not self.several:
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered or []


def _variable(name: str, default: int | None = None) -> int:
    """A number that ``torchrun`` left in the environment."""
    text = os.environ.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name}: got {text!r} in the environment, accepted: a number, as torchrun sets it for each "
            "of its processes"
        ) from None


def _is_maximum(name: Any) -> bool:
    return str(name).endswith("_max") or str(name).startswith("max_")
