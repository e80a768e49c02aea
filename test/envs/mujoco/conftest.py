from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch) -> None:
    """MuJoCo appends what it warns about to MUJOCO_LOG.TXT in the working directory."""
    monkeypatch.chdir(tmp_path)
