"""Runs of the training script in tests: what to ask of it, and what it leaves."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "examples" / "trudi_humanoid.py"


def words(settings: Mapping[str, Any], **more: object) -> list[str]:
    """The sections of a configuration, and more, as words of the command line."""
    flat = {
        f"{section}.{name}": value
        for section, values in settings.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    return [f"{key}={value}" for key, value in {**flat, "device": "cpu", **more}.items()]


def final_state(run: Path) -> dict[str, bytes]:
    """Everything that the newest checkpoint holds, but for names, dates and the clock."""
    newest = max((run / "checkpoints").glob("*.torchrl"))
    with zipfile.ZipFile(newest) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            if name != "manifest.json" and "-progress/" not in name
        }
