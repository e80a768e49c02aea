"""Seeds of the sub-environments of a batch."""

from __future__ import annotations

import numpy as np


def first_seed(seed: int) -> int:
    """The seed of the first sub-environment; sub-environment ``i`` gets that plus ``i``.

    Gymnasium gives sub-environment ``i`` the seed ``seed + i``: runs with the seeds 0 and 1 would
    share all but one of their sub-environments. Hashing the seed first takes runs apart, and keeps
    the seeds of one run distinct.

    Args:
        seed (int): the seed of the whole batch.

    Returns:
        int: a number below ``2**30``, so that sums stay valid 32-bit seeds.
    """
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) % 2**30
