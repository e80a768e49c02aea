"""Peak memory of a process that steps a :class:`MujocoBatchEnv`, for `bench_envs.py`.

    python benchmarks/_env_memory.py TASK NUM_ENVS THREADS STEPS

Prints bytes. A process of its own, because a peak never goes down again.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

from torchrl_trudi.envs.mujoco import MujocoBatchEnv


def peak_memory() -> int:
    """The largest resident set that this process had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss, which on Linux survives exec(): it would be that of the parent process, if
        # that was the larger one when it started this.
        match = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)
        if match:
            return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    task, *numbers = sys.argv[1:]
    num_envs, threads, steps = map(int, numbers)
    torch.set_num_threads(1)
    env = MujocoBatchEnv(task, num_envs, num_threads=threads)
    data = env.reset()
    for _ in range(steps):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
    print(peak_memory())
    env.close()


if __name__ == "__main__":
    main()
