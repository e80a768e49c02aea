"""Every option is read where a run is made: one that nothing reads would do nothing, silently."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from torchrl_trudi.trainers import TrainConfig, validate
from torchrl_trudi.trainers import builders as builders_module
from torchrl_trudi.trainers.options import options, sections

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "trudi_humanoid.py"
READERS = {str(SCRIPT), str(Path(builders_module.__file__))}

SMALL = {
    "env": {"name": "InvertedPendulum-v5", "num_envs": 2},
    "collector": {"total_frames": 64, "frames_per_batch": 32},
    "optim": {"num_minibatches": 2, "num_epochs": 1},
    "logger": {"eval_interval": 32, "eval_episodes": 1, "progress": False},
    "device": "cpu",
}
ARMS = {
    "pathwise": {},
    "gaussian": {"policy": {"kind": "gaussian"}},
    "surrogate": {"objective": {"kind": "surrogate"}, "critic": {"kind": "mse"}},
}


def recording(config: TrainConfig, seen: set[str]) -> TrainConfig:
    """The same configuration, which notes what a reader asks of it."""

    def recorder(instance, prefix: str):
        cls = type(instance)
        names = {field.name for field in dataclasses.fields(cls)}

        def read(self, name):
            if name in names and sys._getframe(1).f_code.co_filename in READERS:
                seen.add(f"{prefix}{name}")
            return object.__getattribute__(self, name)

        namespace = {"__getattribute__": read}
        instance.__class__ = type(cls.__name__, (cls,), namespace)

    for name in sections(TrainConfig):
        recorder(getattr(config, name), f"{name}.")
    recorder(config, "")
    return config


def test_every_option_is_read(script, tmp_path):
    seen: set[str] = set()
    for name, arm in ARMS.items():
        config = validate(_merged(SMALL, arm, {"logger": {"dir": str(tmp_path / name)}}))
        script.train(recording(config, seen))
    unread = {leaf.key for leaf in options(TrainConfig)} - seen
    # Read with another choice, of which the tests of the builders know.
    unread -= {"objective.num_adjoint_steps", "optim.max_lr"}
    assert unread == set()


def _merged(*configs):
    out: dict = {}
    for config in configs:
        for key, value in config.items():
            out[key] = {**out.get(key, {}), **value} if isinstance(value, dict) else value
    return out
