"""One random stream per sub-environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class RowGenerators:
    """A generator for each of ``n`` rows, drawn from together.

    Row ``i`` is ``numpy.random.default_rng(seeds[i])``, the generator of a Gymnasium environment
    seeded with ``seeds[i]``: equal seeds give equal initial states, however many environments there
    are and whichever is reset first. :meth:`uniform` and :meth:`standard_normal` are those of
    :class:`numpy.random.Generator` with a leading dimension for the rows, and ``size`` an integer;
    :meth:`each` reaches all others.

    Args:
        generators (Sequence[numpy.random.Generator]): the generators.

    Examples:
        >>> import numpy as np
        >>> from torchrl_trudi.envs.mujoco import RowGenerators
        >>> rows = RowGenerators.from_seeds([3, 4])
        >>> draws = rows.uniform(-1.0, 1.0, 5)
        >>> draws.shape
        (2, 5)
        >>> bool((draws[1] == np.random.default_rng(4).uniform(-1.0, 1.0, 5)).all())
        True
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = list(generators)

    @classmethod
    def from_seeds(cls, seeds: Sequence[int]) -> RowGenerators:
        """Fresh generators.

        Args:
            seeds (Sequence[int]): the seed of each row.

        Returns:
            RowGenerators: the generators.
        """
        return cls([np.random.default_rng(int(s)) for s in seeds])

    def __len__(self) -> int:
        return len(self._generators)

    def __getitem__(self, rows: np.ndarray) -> RowGenerators:
        """The generators of some rows, shared."""
        return RowGenerators([self._generators[i] for i in rows.tolist()])

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: int = 1) -> np.ndarray:
        """Uniform numbers.

        Args:
            low: lower bound, a number or ``[size]``.
            high: upper bound, excluded.
            size: how many for each row.

        Returns:
            numpy.ndarray: ``[n, size]``.
        """
        out = np.empty((len(self), size))
        for generator, row in zip(self._generators, out, strict=True):
            generator.random(out=row)
        # As Generator.uniform computes it, to the last bit.
        return low + (high - low) * out

    def standard_normal(self, size: int = 1) -> np.ndarray:
        """Standard normal numbers.

        Args:
            size: how many for each row.

        Returns:
            numpy.ndarray: ``[n, size]``.
        """
        out = np.empty((len(self), size))
        for generator, row in zip(self._generators, out, strict=True):
            generator.standard_normal(out=row)
        return out

    def each(self, draw: Callable[[np.random.Generator], Any]) -> np.ndarray:
        """Anything else: ``draw`` is called with the generator of each row.

        Args:
            draw: the function; all its results have one shape.

        Returns:
            numpy.ndarray: the results, stacked, ``[n, ...]``.
        """
        return np.stack([np.asarray(draw(generator)) for generator in self._generators])

    def get_state(self) -> torch.Tensor:
        """The state of the rows.

        Returns:
            torch.Tensor: ``[n, 6]`` int64: the 128-bit state and increment of PCG64 and its
            buffered 32-bit number, bit for bit.
        """
        states = np.empty((len(self), 6), np.uint64)
        mask = 2**64 - 1
        for row, generator in zip(states, self._generators, strict=True):
            full: Any = generator.bit_generator.state
            state, inc = full["state"]["state"], full["state"]["inc"]
            row[:] = (
                state & mask,
                state >> 64,
                inc & mask,
                inc >> 64,
                full["has_uint32"],
                full["uinteger"],
            )
        return torch.from_numpy(states.view(np.int64))

    def set_state(self, states: torch.Tensor) -> None:
        """Restores what :meth:`get_state` returned.

        Args:
            states (torch.Tensor): ``[n, 6]`` int64.
        """
        for row, generator in zip(
            states.cpu().numpy().view(np.uint64).tolist(), self._generators, strict=True
        ):
            generator.bit_generator.state = {
                "bit_generator": "PCG64",
                "state": {"state": row[0] | row[1] << 64, "inc": row[2] | row[3] << 64},
                "has_uint32": row[4],
                "uinteger": row[5],
            }
