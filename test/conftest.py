"""Fixtures and rules for all tests."""

from __future__ import annotations

import os

# Before torch is imported: the tensors here are too small for more threads to help.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test's random numbers depend neither on the order of the tests nor on the day."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def script():
    """The training script as a module."""
    import trudi_humanoid

    return trudi_humanoid
