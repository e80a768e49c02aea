"""Files that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from torchrl_trudi.trainers import ConfigError, TrainConfig
from torchrl_trudi.trainers.checkpoints import FORMAT_VERSION, RunCheckpoints

pytestmark = pytest.mark.resume


class Parts:
    """A network whose weights are the step, and a counter."""

    def __init__(self, directory: Path, keep_last: int = 3) -> None:
        self.net = nn.Linear(8, 8)
        self.progress = {"frames": 0}
        self.checkpoints = RunCheckpoints(
            directory, {"net": self.net, "progress": self.progress}, keep_last=keep_last
        )

    def save(self, step: int, **kwargs) -> Path:
        with torch.no_grad():
            self.net.weight.fill_(step)
        self.progress["frames"] = step
        return self.checkpoints.save(step, TrainConfig(), **kwargs)

    def load(self) -> int:
        self.checkpoints.load()
        assert (self.net.weight == self.progress["frames"]).all()
        return self.progress["frames"]


def names(directory: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in directory.iterdir())


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    parts = Parts(tmp_path, keep_last=2)
    for step, value in ((1, 0.5), (2, 3.0), (3, None), (4, 2.0), (5, None)):
        path = parts.save(step, value=value)
        assert parts.checkpoints.latest() == path
    assert names(tmp_path) == [2, 4, 5]
    assert parts.checkpoints.best().name == "checkpoint-000000000002.torchrl"
    assert Parts(tmp_path).load() == 5


def test_nothing_to_load(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="has no checkpoint to continue from"):
            Parts(directory).load()


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\x40\x40")] ^= 1  # in a weight of step 3: the number 3
    path.write_bytes(content)


def damage_empty(path):
    path.write_bytes(b"")


def damage_other(path):
    path.write_bytes(b"not a checkpoint" * 100)


def damage_part(path):
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            if "net" not in name:
                archive.writestr(name, value)


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_bit, damage_empty, damage_other, damage_part]
)
def test_damage_is_named_and_passed_over(tmp_path, caplog, damage):
    parts = Parts(tmp_path)
    for step in (1, 2, 3):
        path = parts.save(step)
    damage(path)
    assert Parts(tmp_path).load() == 2
    assert path.name in caplog.text and "passed over" in caplog.text
    for other in tmp_path.glob("*.torchrl"):
        damage_empty(other)
    with pytest.raises(ConfigError, match="none of the checkpoints") as error:
        Parts(tmp_path).load()
    assert len(str(error.value).splitlines()) == 4


def test_later_format_is_refused(tmp_path, monkeypatch):
    from torchrl_trudi.trainers import checkpoints

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT_VERSION", FORMAT_VERSION + 1)
        Parts(tmp_path).save(1)
    with pytest.raises(ConfigError, match=f"has format {FORMAT_VERSION + 1}"):
        Parts(tmp_path).load()


def test_runs_no_code(tmp_path):
    """A pickle in the place of a tensor is refused, not run."""
    parts = Parts(tmp_path / "c")
    path = parts.save(1)
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (marker,))

    import pickle

    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            tampered = pickle.dumps(Evil()) if "tensor_" in name or "state" in name else value
            archive.writestr(name, tampered)
    with pytest.raises(ConfigError, match="none of the checkpoints"):
        Parts(tmp_path / "c").load()
    assert not marker.exists()


def test_a_write_that_fails_leaves_the_others(tmp_path, monkeypatch):
    parts = Parts(tmp_path)
    parts.save(1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                parts.save(2)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def _save_forever(directory: Path, start: int) -> None:
    parts = Parts(directory, keep_last=2)
    for step in range(start, start + 100_000):
        parts.save(step)


def _kill_while_saving(directory: Path, times: int) -> None:
    generator = random.Random(0)
    context = multiprocessing.get_context("fork")
    newest = 0
    for _ in range(times):
        process = context.Process(target=_save_forever, args=(directory, newest + 1), daemon=True)
        process.start()
        end = time.monotonic() + 30
        while not directory.exists() or not any(directory.glob("*.torchrl")):
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.1 * generator.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = Parts(directory).load()
        assert found >= newest  # nothing older is all that is left
        newest = found
    assert newest > 0
    Parts(directory, keep_last=2).save(newest + 1)
    assert not list(directory.glob(".*"))


def test_kill_while_saving(tmp_path):
    _kill_while_saving(tmp_path / "checkpoints", 5)


@pytest.mark.slow
def test_kill_while_saving_50_times(tmp_path):
    _kill_while_saving(tmp_path / "checkpoints", 50)
