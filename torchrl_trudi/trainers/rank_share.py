"""A rank's share of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from torchrl_trudi.trainers.config import TrainConfig
from torchrl_trudi.trainers.distributed import Ranks
from torchrl_trudi.trainers.options import ConfigError

__all__ = ["rank_seed", "share_of"]


def share_of(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The configuration of what one rank collects, and of the minibatches that it steps on.

    The options of a run mean the same whatever the number of ranks: each takes an equal part of
    ``env.num_envs`` and of ``collector.frames_per_batch``, and with it of every minibatch, and has random
    numbers of its own.

    Args:
        config (TrainConfig): the checked configuration of the run.
        ranks (Ranks): its processes.

    Returns:
        TrainConfig: ``config`` itself for a single one.

    Raises:
        ConfigError: what cannot be divided by their number, or be done by several.

    Examples:
        >>> from torchrl_trudi.trainers import TrainConfig
        >>> from torchrl_trudi.trainers.distributed import Ranks
        >>> from torchrl_trudi.trainers.rank_share import share_of
        >>> ranks = Ranks("cpu")
        >>> ranks.rank, ranks.world_size = 1, 2
        >>> share = share_of(TrainConfig(), ranks)
        >>> share.env.num_envs, share.collector.frames_per_batch
        (32, 1024)
    """
    size = ranks.world_size
    if size == 1:
        return config
    num_envs, frames = config.env.num_envs, config.collector.frames_per_batch
    minibatches = config.optim.num_minibatches
    problems = []
    if num_envs % size:
        problems.append(
            f"env.num_envs: got {num_envs}, accepted with {size} processes: a multiple of {size}, for "
            f"instance {-(-num_envs // size) * size}"
        )
    if frames % (size * minibatches):
        unit = int(np.lcm(size * minibatches, -(-num_envs // size) * size))
        problems.append(
            f"collector.frames_per_batch: got {frames}, accepted with {size} processes: a multiple of "
            f"{size} times optim.num_minibatches={minibatches}, for instance {-(-frames // unit) * unit}"
        )
    if config.optim.cudagraphs:
        problems.append(
            f"optim.cudagraphs: got True, accepted with {size} processes: False, because they average "
            "their gradients in the midst of a step"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return dataclasses.replace(
        config,
        seed=rank_seed(config.seed, ranks.rank),
        env=dataclasses.replace(config.env, num_envs=num_envs // size),
        collector=dataclasses.replace(config.collector, frames_per_batch=frames // size),
    )


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank: that of the run on rank 0, unrelated ones on the others.

    Args:
        seed (int): the seed of the run.
        rank (int): the rank.

    Returns:
        int: not negative, below ``2**62`` for ranks other than 0.
    """
    if rank == 0:
        return seed
    (state,) = np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1, np.uint64)
    return int(state) >> 2
