from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict

from torchrl_trudi.record.scalars import SCALARS_FILE, ScalarWriter, read_scalars


def tensorboard_scalars(run, name):
    accumulator = EventAccumulator(str(run))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_both_files_hold_the_scalars(tmp_path):
    with ScalarWriter(tmp_path / "run") as writer:
        writer.write(10, {"train/return": 1.5, "train/kl": torch.tensor(0.25)})
        writer.write(20, {"train/return": np.float32(2.5)})
    scalars = read_scalars(tmp_path / "run")
    assert list(scalars) == ["train/return", "train/kl"]
    np.testing.assert_array_equal(scalars["train/return"], ([10, 20], [1.5, 2.5]))
    np.testing.assert_array_equal(scalars["train/kl"], ([10], [0.25]))
    assert scalars["train/return"][0].dtype == np.int64
    assert tensorboard_scalars(tmp_path / "run", "train/return") == [(10, 1.5), (20, 2.5)]
    text = (tmp_path / "run" / SCALARS_FILE).read_text()
    assert text.splitlines()[:2] == ["frames,name,value", "10,train/return,1.5"]


def test_every_write_is_on_disk_at_once(tmp_path):
    writer = ScalarWriter(tmp_path)
    for frames in (1, 2):
        writer.write(frames, {"a": frames})
        assert list(read_scalars(tmp_path)["a"][0]) == list(range(1, frames + 1))
        assert len(tensorboard_scalars(tmp_path, "a")) == frames
    writer.close()


def test_values_survive_exactly(tmp_path):
    values = [1 / 3, 1e-300, 123456789.123456789, -0.0]
    with ScalarWriter(tmp_path) as writer:
        for index, value in enumerate(values):
            writer.write(index, {"a": value})
    assert list(read_scalars(tmp_path)["a"][1]) == values


def test_kinds_of_values(tmp_path):
    with ScalarWriter(tmp_path) as writer:
        writer.write(
            0,
            {
                "steps": torch.tensor([1.0, 2.0]),
                "one": torch.ones(1, 1, requires_grad=True),
                "half": torch.tensor(0.5, dtype=torch.bfloat16),
                "flag": True,
                "nan": math.nan,
                "inf": -math.inf,
                'with "quotes", and comma': 1,
            },
        )
        writer.write(1, TensorDict({"loss": torch.tensor(3.0)}))
    values = {name: ys[0] for name, (_, ys) in read_scalars(tmp_path).items()}
    assert math.isnan(values.pop("nan"))
    assert values == {
        "steps/0": 1.0,
        "steps/1": 2.0,
        "one": 1.0,
        "half": 0.5,
        "flag": 1.0,
        "inf": -math.inf,
        'with "quotes", and comma': 1.0,
        "loss": 3.0,
    }


@pytest.mark.parametrize(
    ("scalars", "error", "message"),
    [
        ({"a": "text"}, TypeError, "'a': got str, accepted: a number"),
        ({"a": None}, TypeError, "'a': got NoneType"),
        ({"a": torch.ones(2, 2)}, TypeError, r"'a': got shape \(2, 2\)"),
        ({"": 1}, ValueError, "got ''"),
        ({"a\nb": 1}, ValueError, "one line"),
        ({3: 1}, ValueError, "got 3"),
    ],
)
def test_bad_scalars_write_nothing(tmp_path, scalars, error, message):
    with ScalarWriter(tmp_path) as writer, pytest.raises(error, match=message):
        writer.write(0, {"good": 1.0, **scalars})
    assert read_scalars(tmp_path) == {}


def test_a_new_run_does_not_touch_old_scalars(tmp_path):
    with ScalarWriter(tmp_path) as writer:
        writer.write(1, {"a": 1})
    with pytest.raises(FileExistsError, match="resume_from"):
        ScalarWriter(tmp_path)
    assert len(read_scalars(tmp_path)["a"][0]) == 1


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    with ScalarWriter(tmp_path) as writer:
        for frames in (10, 20, 30):
            writer.write(frames, {"a": frames})
    with ScalarWriter(tmp_path, resume_from=20) as writer:
        writer.write(30, {"a": -30})
        writer.write(40, {"a": -40})
    expected = [(10, 10), (20, 20), (30, -30), (40, -40)]
    assert list(zip(*read_scalars(tmp_path)["a"], strict=True)) == expected
    assert tensorboard_scalars(tmp_path, "a") == expected


def test_resume_without_earlier_scalars(tmp_path):
    with ScalarWriter(tmp_path, resume_from=20) as writer:
        writer.write(30, {"a": 1})
    assert list(read_scalars(tmp_path)["a"][0]) == [30]


def test_a_torn_last_line_is_ignored_and_repaired(tmp_path):
    (tmp_path / SCALARS_FILE).write_text("frames,name,value\n10,a,1.0\n20,a,1234")
    assert list(read_scalars(tmp_path)["a"][0]) == [10]
    with ScalarWriter(tmp_path, resume_from=100) as writer:
        writer.write(110, {"a": 2})
    assert list(zip(*read_scalars(tmp_path)["a"], strict=True)) == [(10, 1.0), (110, 2.0)]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no scalars\.csv in .*not a run"):
        read_scalars(tmp_path)
    (tmp_path / SCALARS_FILE).write_text("frames,value\n")
    with pytest.raises(ValueError, match="line 1"):
        read_scalars(tmp_path)
    (tmp_path / SCALARS_FILE).write_text("frames,name,value\n10,a,1\n20,a\n")
    with pytest.raises(ValueError, match="line 3"):
        read_scalars(tmp_path)


def test_closing(tmp_path):
    writer = ScalarWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(0, {"a": 1})
