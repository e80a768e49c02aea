"""A recorded chain in half the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.envs.transforms import Transform

__all__ = ["ChainCast"]


class ChainCast(Transform):
    r"""Stores the chain of a :class:`~torchrl_trudi.modules.DiffusionActor` in a short float type.

    For denoising chains in replay buffers: entries are cast when they are written and restored when they are sampled.
    Means are stored as increments :math:`\mu_n(x_n) - x_n`. That is what makes a short type
    harmless: the path KL compares :math:`\mu_n` with the new policy's mean at the *stored*
    :math:`x_n`, so that rounding :math:`x_n` moves both, and an increment is rounded by much less
    than the mean itself, whose rounding error would count in full against the narrow kernels of the
    last steps. (Of a :class:`~torchrl_trudi.modules.GaussianActor` the increment is the mean: its
    record is better left as it is.)

    Args:
        dtype (torch.dtype): ``torch.bfloat16`` or ``torch.float16``.
        chain (NestedKey, optional): chain ``[*B, N + 1, A]``. Defaults to ``("denoising", "chain")``.
        loc (NestedKey, optional): means ``[*B, N, A]``. Defaults to ``("denoising", "loc")``.
        others (sequence of NestedKey, optional): entries that are cast as they are.
            Defaults to ``[("denoising", "scale")]``.
        restored_dtype (torch.dtype, optional): type of the chains, to which they are restored.
            Defaults to ``torch.float32``.

    Raises:
        ValueError: another dtype; chains of another type than ``restored_dtype``; a buffer that was
            not written through this transform.
        KeyError: an entry is missing when a batch is written.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl_trudi.envs import ChainCast
        >>> from torchrl_trudi.modules import DiffusionActor
        >>> actor = DiffusionActor(2, 3, return_chain=True, return_dist_params=True)
        >>> data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4])).detach()
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4), transform=ChainCast(torch.bfloat16), batch_size=4
        ... )
        >>> _ = buffer.extend(data)
        >>> buffer.storage[:]["denoising", "chain"].dtype
        torch.bfloat16
        >>> buffer.sample()["denoising", "chain"].dtype
        torch.float32
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        chain: NestedKey = ("denoising", "chain"),
        loc: NestedKey = ("denoising", "loc"),
        others: Sequence[NestedKey] = (("denoising", "scale"),),
        restored_dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}.")
        super().__init__()
        self.dtype = dtype
        self.chain, self.loc = unravel_key(chain), unravel_key(loc)
        self.others = [unravel_key(key) for key in others]
        self.restored_dtype = restored_dtype

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Cast what is written."""
        for key in (self.chain, self.loc, *self.others):
            value = tensordict.get(key, None)
            if value is None:
                raise KeyError(
                    f"There is no {key!r} to cast: collect with a DiffusionActor built with "
                    "return_chain=True and return_dist_params=True."
                )
            if value.dtype != self.restored_dtype:
                raise ValueError(
                    f"{key!r} is of {value.dtype} and would be restored as {self.restored_dtype}: "
                    "set restored_dtype."
                )
        chain = tensordict.get(self.chain)
        increment = tensordict.get(self.loc) - chain[..., :-1, :]
        tensordict.set(self.loc, increment.to(self.dtype))
        for key in (self.chain, *self.others):
            tensordict.set(key, tensordict.get(key).to(self.dtype))
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Restore what is sampled."""
        # A copy: buffer[:] passes what lies in the storage.
        tensordict = tensordict.copy()
        for key in (self.chain, self.loc, *self.others):
            stored = tensordict.get(key)
            if stored.dtype != self.dtype:
                raise ValueError(
                    f"{key!r} lies in the buffer as {stored.dtype}, not as {self.dtype}: it was not "
                    "written through this transform."
                )
            tensordict.set(key, stored.to(self.restored_dtype))
        chain, increment = tensordict.get(self.chain), tensordict.get(self.loc)
        return tensordict.set(self.loc, chain[..., :-1, :] + increment)
