"""Runs a function in several processes that are the ranks of one job, on this machine."""

from __future__ import annotations

import os
import pickle
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(function: Callable, *args: Any, size: int = 2, seconds: float = 240.0) -> list[Any]:
    """What ``function(*args)`` returns on each rank, in an environment as torchrun makes it."""
    # Forked processes need not import torch again; with CUDA a process cannot be forked.
    context = mp.get_context("spawn" if torch.cuda.is_available() else "fork")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_rank, args=(function, args, rank, size, port, folder))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
            process.join()
        results = []
        for rank in range(size):
            path = Path(folder) / str(rank)
            assert path.exists(), f"rank {rank} left no result"
            error, result = pickle.loads(path.read_bytes())
            assert error is None, f"rank {rank}:\n{error}"
            results.append(result)
        assert not stuck
        return results


def _rank(function, args, rank, size, port, folder) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    random.seed(0)  # which a fork makes anew; it is part of a checkpoint
    try:
        outcome = None, function(*args)
    except BaseException:
        outcome = traceback.format_exc(), None
    path = Path(folder) / f".{rank}"
    path.write_bytes(pickle.dumps(outcome))
    path.rename(Path(folder) / str(rank))
