"""Which entries of an environment are observations of its task."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torchrl.envs import EnvBase

from torchrl_trudi.envs._validation import RESERVED_KEYS

__all__ = ["PRIVILEGED_KEY", "SUCCESS_KEY", "get_observation_keys"]

PRIVILEGED_KEY = "privileged_observation"
"""Where the environments of a suite put what only a critic may see."""

SUCCESS_KEY = "success"
"""Where the environments of a suite put whether a row has reached its goal, ``[*B, 1]``."""


def get_observation_keys(env: EnvBase) -> list[NestedKey]:
    """The entries of an observation that come from the task itself.

    Counters and sums of :func:`make_env`'s transforms, flags and what domain randomisation drew are
    not among them, though they are in ``env.observation_spec``.

    Args:
        env (EnvBase): an environment made by :func:`make_env`.

    Returns:
        list of NestedKey: ``["observation"]``, or the entries of a dictionary observation, nested
        ones as tuples, in the order of the spec.

    Examples:
        >>> from torchrl_trudi.envs import get_observation_keys, make_env
        >>> env = make_env("InvertedPendulum-v5")
        >>> sorted(env.observation_spec.keys())
        ['episode_reward', 'observation', 'quarantined', 'step_count', 'unstable']
        >>> get_observation_keys(env)
        ['observation']
    """
    spec = env.observation_spec
    taken = set(RESERVED_KEYS)
    # An observation of that name would be one of numbers.
    if SUCCESS_KEY in set(spec.keys()) and spec[SUCCESS_KEY].dtype == torch.bool:
        taken.add(SUCCESS_KEY)
    return [
        key
        for key in spec.keys(True, True)
        if (key if isinstance(key, str) else key[0]) not in taken
    ]
