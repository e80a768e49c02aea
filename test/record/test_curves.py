from __future__ import annotations

import runpy
import sys
import warnings

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from torchrl_trudi.record import curves
from torchrl_trudi.record.curves import main, mean_curve, plot_learning_curve
from torchrl_trudi.record.scalars import ScalarWriter

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(directory, offset=0.0, points=5, **extra):
    with ScalarWriter(directory) as writer:
        for index in range(points):
            scalars = {
                "train/return": offset + index,
                "train/kl": 0.05 * index,
                "train/kl_bound": 0.1,
                **extra,
            }
            if index % 2 == 0:
                scalars["eval/return_deterministic"] = offset + 2 * index
                scalars["eval/return_stochastic"] = offset + index / 2
            writer.write(100 * index, scalars)
    return directory


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figures = []
    init = Figure.__init__

    def record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        figures.append(self)

    monkeypatch.setattr(Figure, "__init__", record)
    return figures


def lines(axes):
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_one_run(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    out = plot_learning_curve(run, tmp_path / "plots" / "out.png")
    assert out.read_bytes().startswith(PNG)
    top, bottom = drawn[0].axes
    assert top.get_title() == "run"
    curves = lines(top)
    np.testing.assert_array_equal(curves["training"][:, 1], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(curves["evaluation, noise-free"], [[0, 0], [200, 4], [400, 8]])
    np.testing.assert_array_equal(curves["evaluation, sampled"][:, 1], [0, 1, 2])
    curves = lines(bottom)
    np.testing.assert_allclose(curves["path KL"][:, 1], [0, 0.05, 0.1, 0.15, 0.2])
    np.testing.assert_array_equal(curves["bound"][:, 1], [0.1, 0.1])
    assert bottom.get_xlabel() == "environment frames"


def test_several_runs_have_a_mean(tmp_path, drawn):
    runs = [make_run(tmp_path / name, offset) for name, offset in (("a", 0.0), ("b", 10.0))]
    plot_learning_curve(runs, tmp_path / "out.png", title="seeds", kl_bound=0.3)
    top, bottom = drawn[0].axes
    assert top.get_title() == "seeds"
    np.testing.assert_array_equal(lines(top)["training (mean)"][:, 1], [5, 6, 7, 8, 9])
    assert sum(line.get_xdata().size == 5 for line in top.get_lines()) == 3
    # An explicit bound takes the place of the logged one, and both runs share one line.
    assert [line.get_ydata()[0] for line in bottom.get_lines() if line.get_linestyle() == "--"] == [
        0.3
    ]


def test_smoothing_averages_to_the_left(tmp_path, drawn):
    plot_learning_curve(make_run(tmp_path / "run"), tmp_path / "out.png", smooth=3)
    curves = lines(drawn[0].axes[0])
    np.testing.assert_allclose(curves["training"][:, 1], [0, 0.5, 1, 2, 3])
    # Evaluations are averages already.
    np.testing.assert_array_equal(curves["evaluation, noise-free"][:, 1], [0, 4, 8])


def test_missing_and_broken_values(tmp_path, drawn):
    with ScalarWriter(tmp_path / "run") as writer:
        for frames, value in ((1, 1.0), (2, float("nan")), (3, 3.0)):
            writer.write(frames, {"train/return": value})
    plot_learning_curve(tmp_path / "run", tmp_path / "out.png")
    top, bottom = drawn[0].axes
    np.testing.assert_array_equal(lines(top)["training"], [[1, 1], [3, 3]])
    assert bottom.get_lines() == []


def test_other_names(tmp_path, drawn):
    with ScalarWriter(tmp_path / "run") as writer:
        writer.write(1, {"reward": 2.0})
    plot_learning_curve(tmp_path / "run", tmp_path / "out.png", train_return="reward")
    np.testing.assert_array_equal(lines(drawn[0].axes[0])["training"], [[1, 2]])


def test_mean_curve_interpolates_where_all_exist():
    first = (np.array([0, 10, 20]), np.array([0.0, 10.0, 20.0]))
    second = (np.array([5, 15]), np.array([1.0, 3.0]))
    frames, values = mean_curve([first, second])
    np.testing.assert_array_equal(frames, [5, 10, 15])
    np.testing.assert_array_equal(values, [3, 6, 9])


def test_mean_curve_without_overlap_is_empty():
    frames, values = mean_curve(
        [(np.array([0, 1]), np.array([1.0, 1.0])), (np.array([5]), np.array([2.0]))]
    )
    assert frames.size == 0 and values.size == 0


def test_errors(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="at least one run"):
        plot_learning_curve([], tmp_path / "out.png")
    with pytest.raises(ValueError, match=r"'.*out\.pdf', accepted: .*\.png"):
        plot_learning_curve(run, tmp_path / "out.pdf")
    with pytest.raises(ValueError, match="smooth: got 0"):
        plot_learning_curve(run, tmp_path / "out.png", smooth=0)
    with pytest.raises(FileNotFoundError, match="none"):
        plot_learning_curve([run, tmp_path / "none"], tmp_path / "out.png")
    with ScalarWriter(tmp_path / "empty") as writer:
        writer.write(0, {"loss": 1})
    with pytest.raises(ValueError, match=r"got scalars \['loss'\]"):
        plot_learning_curve(tmp_path / "empty", tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_global_state_of_matplotlib_is_left_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    pyplot = sys.modules.get("matplotlib.pyplot")
    plot_learning_curve(make_run(tmp_path / "run"), tmp_path / "out.png")
    assert dict(matplotlib.rcParams) == before
    assert sys.modules.get("matplotlib.pyplot") is pyplot


def test_command_line(tmp_path, monkeypatch):
    runs = [str(make_run(tmp_path / name)) for name in "ab"]
    out = tmp_path / "out.png"
    monkeypatch.setattr(sys, "argv", ["curves", *runs, "-o", str(out)])
    monkeypatch.delitem(sys.modules, curves.__name__)
    with warnings.catch_warnings():
        # runpy warns if the package had imported the module already.
        warnings.simplefilter("error", RuntimeWarning)
        runpy.run_module("torchrl_trudi.record.curves", run_name="__main__")
    assert out.read_bytes().startswith(PNG)


def test_command_line_errors(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "none"), "-o", str(tmp_path / "out.png")])
    assert error.value.code == 2
    assert "no scalars.csv" in capsys.readouterr().err
