"""Faults in a whole run of the example."""

from __future__ import annotations

import json
import math

import pytest
import torch
from faults._tasks import NAME, Faulty, registered

from torchrl_trudi.record import read_scalars
from torchrl_trudi.trainers import validate

pytestmark = pytest.mark.faults


@pytest.fixture
def example(script):
    """The example script as a module."""
    return script


@pytest.fixture(autouse=True)
def _task():
    with registered():
        yield


def tiny(tmp_path, *, env=None, optim=None, objective=None):
    return validate(
        {
            "env": {"name": NAME, "num_envs": 4, "backend": "gymnasium", **(env or {})},
            "collector": {"frames_per_batch": 64, "total_frames": 128},
            "policy": {"hidden_size": 8, "num_steps": 2},
            "critic": {"hidden_size": 8, "num_bins": 21, "vmin": -5.0, "vmax": 15.0},
            "objective": objective or {},
            "optim": {"num_minibatches": 2, "num_epochs": 2, **(optim or {})},
            "logger": {"eval_episodes": 0, "progress": False, "dir": str(tmp_path / "run")},
            "device": "cpu",
            "num_threads": 1,
        }
    )


@pytest.mark.parametrize("kind", ["pathwise", "surrogate"])
def test_a_row_with_nan_is_left_out(example, kind, tmp_path):
    # Counted by the row that is built third, after the one for the spaces.
    config = tiny(
        tmp_path, env={"kwargs": {"row": 2, "at": 3, "episodes": 2}}, objective={"kind": kind}
    )
    scalars = {key: values for key, (_, values) in read_scalars(example.train(config)).items()}
    assert scalars["train/quarantined"].tolist() == [2, 0]
    assert scalars["train/skipped"].tolist() == [0, 0]
    # A whole episode has 5 steps; those that a fault ended are not among them.
    assert set(scalars["train/length"]) == {5} and set(scalars["train/return"]) == {15}
    for name, values in scalars.items():
        if name.startswith("train/"):
            assert all(map(math.isfinite, values)), name


def test_gae_does_not_look_at_it(example, tmp_path, monkeypatch):
    from torchrl.objectives.value import GAE

    forward, seen = GAE.forward, []

    def spy(self, tensordict, *args, **kwargs):
        seen.append(tensordict["next"].select("done", "quarantined").clone())
        return forward(self, tensordict, *args, **kwargs)

    monkeypatch.setattr(GAE, "forward", spy)
    example.train(tiny(tmp_path, env={"kwargs": {"row": 2}}, objective={"kind": "surrogate"}))
    before = seen[0]["quarantined"][:, 1:]
    assert before.any() and seen[0]["done"][:, :-1][before].all()


def test_raise(example, tmp_path):
    config = tiny(tmp_path, env={"kwargs": {"row": 2}, "on_nonfinite": "raise"})
    with pytest.raises(FloatingPointError, match="non-finite 'observation'"):
        example.train(config)


def poisoned(monkeypatch, bad):
    """Value targets that are not finite in the minibatches (by number, from 0) that ``bad`` chooses."""
    from torchrl_trudi.trainers.update import TruDiUpdate

    step, seen = TruDiUpdate.__call__, []

    def call(self, batch):
        if bad(len(seen)):
            batch = batch.clone()
            batch["value_target"][0] = torch.nan
        seen.append(step(self, batch))
        return seen[-1]

    monkeypatch.setattr(TruDiUpdate, "__call__", call)
    return seen


def test_the_means_are_those_of_the_steps_that_were_made(example, tmp_path, monkeypatch):
    seen = poisoned(monkeypatch, lambda n: n in (1, 3))
    run = example.train(tiny(tmp_path, env={"kwargs": {"row": -5}}))
    scalars = {key: values for key, (_, values) in read_scalars(run).items()}
    assert scalars["train/skipped_critic"].tolist() == [2, 0]
    assert scalars["train/skipped"].tolist() == [0, 0]
    for key in ("loss_critic", "kl", "grad_norm_critic"):
        made = torch.stack([seen[0][key], seen[2][key]])
        assert scalars[f"train/{key}"][0] == pytest.approx(made.mean().item())
    assert scalars["train/kl_last_epoch"][0] == pytest.approx(seen[2]["kl"].item())


def test_too_many_in_a_row_end_the_run(example, tmp_path, monkeypatch):
    """Over iterations: three at the end of the first, two at the beginning of the second."""
    poisoned(monkeypatch, lambda n: n in (1, 2, 3, 4, 5))
    config = tiny(tmp_path, env={"kwargs": {"row": -5}}, optim={"max_consecutive_skips": 5})
    with pytest.raises(FloatingPointError, match=r"5 minibatches in a row .* at 128 frames: see"):
        example.train(config)
    run = tmp_path / "run"
    report = json.loads((run / "skipped_batch.json").read_text("utf-8"))
    assert report["frames"] == 128 and report["metrics"]["loss_critic"] == "nan"
    assert report["metrics"]["skipped_critic"] == 1 and "grad_norm" in report["metrics"]
    assert report["batch"]["observation"]["shape"] == [32, 2]
    assert any(path.is_file() for path in (run / "checkpoints").rglob("*"))
    # What was logged before is there, the last iteration included.
    assert read_scalars(run)["train/skipped_critic"][1].tolist() == [3, 2]


def test_one_less_does_not(example, tmp_path, monkeypatch):
    poisoned(monkeypatch, lambda n: n in (1, 2, 3, 5, 6))
    config = tiny(tmp_path, env={"kwargs": {"row": -5}}, optim={"max_consecutive_skips": 4})
    assert not (example.train(config) / "skipped_batch.json").exists()
    assert Faulty.made > 4
