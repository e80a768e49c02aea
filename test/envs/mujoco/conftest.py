from __future__ import annotations

import os
from collections.abc import Iterator

import mujoco
import pytest


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch) -> None:
    """MuJoCo appends what it warns about to MUJOCO_LOG.TXT in the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quiet(tmp_path, monkeypatch, capfd) -> Iterator[None]:
    """Nothing is printed, no file is written, and warnings are errors."""
    monkeypatch.chdir(tmp_path)
    before = mujoco.get_mju_user_warning()
    yield
    assert mujoco.get_mju_user_warning() is before
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr() == ("", "")
