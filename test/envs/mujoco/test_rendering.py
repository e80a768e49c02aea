"""Pictures. OpenGL is chosen when mujoco is imported, so that they are taken in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import mujoco
import numpy as np
import pytest
from envs.mujoco._tasks import Slider, in_fork, play

from torchrl_trudi.envs.mujoco import MujocoBatchEnv

HEADER = """
import json, sys
import mujoco
try:
    mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).render()
except Exception:
    sys.exit(77)
import numpy as np
from envs.mujoco._tasks import Slider, assert_same
from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv

CAMERAS = '''<mujoco><worldbody>
  <light pos="0 0 5"/><geom type="plane" size="5 5 .1" rgba=".2 .8 .2 1"/>
  <camera name="above" pos="0 0 4"/>
  <camera name="aside" pos="0 -4 1" xyaxes="1 0 0 0 0 1"/>
  <camera pos="0 0 9"/>
  <body pos="0 0 1"><joint name="slide" type="slide" axis="1 0 0"/><geom name="ball" size=".3" rgba="1 0 0 1"/></body>
</worldbody><actuator><motor joint="slide" ctrlrange="-1 1"/></actuator></mujoco>'''

def error_of(function):
    try:
        return repr(function())
    except Exception as err:
        return f"{type(err).__name__}: {err}"

def ball(picture):
    '''Where the red ball is: column and row, of its pixels' centre, and how many they are.'''
    red = (picture[..., 0] > 2 * picture[..., 1].astype(int)) & (picture[..., 0] > 60)
    rows, columns = np.nonzero(red)
    return [float(columns.mean()), float(rows.mean()), int(red.sum())] if red.any() else None

answers = {}
"""

PICTURES = """
def make(**kwargs):
    return MujocoBatchEnv(Slider(model=mujoco.MjSpec.from_string(CAMERAS), **kwargs), 3, seed=0)

env = make(camera={"distance": 6.0, "azimuth": 90.0, "elevation": -30.0, "lookat": (0, 0, 1)})
env.reset_to([[-1.0], [0.0], [1.0]], [0.0])
state = env.get_state()
picture = env.render()
answers["shape"], answers["dtype"] = picture.shape, str(picture.dtype)
answers["sizes"] = [env.render(0, width=w, height=h).shape for w, h in ((64, 48), (1, 1), (700, 500))]
size = {"width": 64, "height": 64}
picture = env.render(**size)
answers["rows"] = [ball(env.render(i, **size)) for i in range(3)]
answers["same"] = bool((env.render(0, **size) == picture).all())
answers["free"] = [bool((env.render(1, camera=c, **size) == env.render(1, **size)).all()) for c in (-1, 0)]
answers["by_number"] = bool(
    (env.render(1, camera=1, **size) == env.render(1, camera="aside", **size)).all()
)
answers["cameras"] = [ball(env.render(2, camera=c, **size)) for c in ("above", "aside", 2)]
answers["errors"] = [
    error_of(lambda: env.render(**kwargs))
    for kwargs in (
        {"index": 3}, {"index": -1}, {"index": 0.5}, {"camera": "abov"}, {"camera": 3},
        {"camera": -2}, {"camera": 1.5}, {"width": 0}, {"height": 2.5},
    )
]
try:
    assert_same(env.get_state(), state)
    answers["state"] = "same"
except AssertionError as err:
    answers["state"] = str(err)
kept = picture.copy()
env.render(1, **size)
answers["own"] = bool((picture == kept).all())
# The camera called "track" comes first.
track = MujocoBatchEnv(
    Slider(model=mujoco.MjSpec.from_string(CAMERAS.replace("above", "track"))), 1, seed=0
)
track.reset()
answers["track"] = bool((track.render(**size) == track.render(camera="track", **size)).all())
# Each row is shown with its own model.
size_of = ModelRandomization("geom_size", 0.3, 3.0, names=["ball"], columns=[0])
for driver in ("batch", "threads"):
    env = MujocoBatchEnv(
        Slider(model=mujoco.MjSpec.from_string(CAMERAS)), 3, seed=0, randomization=[size_of], driver=driver
    )
    drawn = env.reset()["randomization", "geom_size"][:, 0]
    env.reset_to([0.0], [0.0])
    pixels = [ball(env.render(i, camera="above", **size))[2] for i in (0, 1, 2, 0)]
    answers["model_" + driver] = [drawn.tolist(), pixels]
env.close()
"""

RECORDER = """
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.record import PixelRenderTransform, VideoRecorder
from torchrl.record.loggers import Logger

class Keep(Logger):
    videos = []
    def __init__(self):
        super().__init__("keep", ".")
    def _create_experiment(self):
        return None
    def log_scalar(self, name, value, step=None): ...
    def log_hparams(self, cfg): ...
    def log_histogram(self, name, data, **kwargs): ...
    def __repr__(self):
        return "Keep()"
    def log_video(self, name, video, step=None, **kwargs):
        self.videos.append((name, video))

base = MujocoBatchEnv("InvertedPendulum-v5", 2, seed=0)
env = TransformedEnv(base, PixelRenderTransform(width=64, height=48))
env.append_transform(VideoRecorder(Keep(), tag="video", skip=1))
data = env.rollout(5, break_when_any_done=False)
answers["recorded"] = list(data[0, 0]["pixels"].shape)
env.transform[-1].dump()
[(name, video)] = Keep.videos
answers["video"] = [name, list(video.shape), str(video.dtype), float(video.float().std())]
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, Any]:
    """Everything that is drawn, in one process."""
    directory = tmp_path_factory.mktemp("egl")
    answers = directory / "answers.json"
    footer = f"\nopen({str(answers)!r}, 'w').write(json.dumps(answers))\n"
    paths = [path for path in sys.path if path]
    process = subprocess.run(
        [sys.executable, "-c", HEADER + PICTURES + RECORDER + footer],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MUJOCO_GL": "egl"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if process.returncode == 77:
        pytest.skip("MuJoCo cannot render with EGL here")
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(answers.read_text())


def test_pictures(pictures):
    answers = pictures
    assert answers["shape"] == [480, 480, 3]
    assert answers["dtype"] == "uint8"
    assert answers["same"]
    assert answers["own"]
    assert answers["sizes"] == [[48, 64, 3], [1, 1, 3], [500, 700, 3]]
    # The free camera that the task describes looks along the y axis: x runs to the right.
    columns = [column for column, _, _ in answers["rows"]]
    assert columns[0] < 27 < columns[1] < 37 < columns[2]
    assert columns[1] == pytest.approx(31.5, abs=1)
    assert answers["free"] == [True, False]
    assert answers["by_number"]
    above, aside, far = answers["cameras"]
    assert above[1] == pytest.approx(32, abs=2)  # on the axis
    assert above[0] > 40
    assert aside[2] < above[2]  # it is further away
    assert 0 < far[2] < above[2] / 4
    messages = [
        "ValueError: index=3, but there are 3 environments.",
        "ValueError: index must be an integer of at least 0",
        "TypeError: index must",
        "ValueError: the model has no camera 'abov'; it has ['above', 'aside', '']. Did you mean",
        "ValueError: camera=3, but the model has the cameras ['above', 'aside', '']",
        "ValueError: camera must be an integer of at least -1",
        "TypeError: camera must",
        "ValueError: width must be",
        "TypeError: height must be",
    ]
    for answer, message in zip(answers["errors"], messages, strict=True):
        assert answer.startswith(message)
    assert answers["state"] == "same"
    assert answers["track"]
    for driver in ("batch", "threads"):
        sizes, pixels = answers[f"model_{driver}"]
        assert np.argsort(pixels[:3]).tolist() == np.argsort(sizes).tolist()
        assert len(set(pixels)) == 3
        assert pixels[3] == pixels[0]


def test_recorder_of_torchrl(pictures):
    assert pictures["recorded"] == [48, 64, 3]
    name, shape, dtype, spread = pictures["video"]
    assert name == "video"
    # Those of the steps, and those of resets.
    assert shape[-3:] == [3, 48, 64]
    assert shape[-4] >= 5
    assert dtype == "torch.uint8"
    assert spread > 5


@pytest.mark.skipif(
    any(name in os.environ for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")),
    reason="there may be an OpenGL context here",
)
def test_without_opengl(capfd):
    """In another process, because MuJoCo aborts it where a context is asked for a second time."""

    def render():
        env, answers = MujocoBatchEnv(Slider(), 2, seed=0), []
        env.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GLFW's
            for _ in range(3):
                with pytest.raises(RuntimeError) as caught:
                    env.render()
                answers.append(str(caught.value))
        assert play(env, 2)[0].shape == (2, 2)
        env.close()
        return answers

    answer = in_fork(render)
    assert answer.count("MuJoCo cannot make an OpenGL context") == 3, answer
    assert answer.count("MUJOCO_GL to 'egl' or 'osmesa'") == 3
    assert capfd.readouterr() == ("", "")


def test_any_failure_of_opengl_is_explained(monkeypatch):
    def fail(*args, **kwargs):
        raise AttributeError("no glGetError")

    monkeypatch.setattr(mujoco, "Renderer", fail)
    env = MujocoBatchEnv(Slider(), 2, seed=0)
    env.reset()
    message = "set the environment variable MUJOCO_GL to 'egl'.*AttributeError: no glGetError"
    with pytest.raises(RuntimeError, match=message):
        env.render()
    env.close()
