"""Actions that are refused, simulations that diverge, and what MuJoCo has to say."""

from __future__ import annotations

import copy
import threading

import mujoco
import numpy as np
import pytest
import torch
from envs.mujoco._tasks import Slider, act, assert_same, boxes, in_fork, play, with_memory
from tensordict import TensorDict

from torchrl_trudi.envs.mujoco import MujocoBatchEnv
from torchrl_trudi.envs.mujoco._drivers import DRIVERS

DRIVER_NAMES = sorted(DRIVERS)

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]


# Actions


@pytest.mark.parametrize("driver", DRIVER_NAMES)
@pytest.mark.parametrize("values", [[np.nan], [np.inf], [np.inf, -np.inf], [-np.inf, np.nan]])
def test_actions_that_are_not_finite(driver, values):
    env = MujocoBatchEnv("Hopper-v5", 4, seed=0, driver=driver, num_threads=2)
    _, tensordict = play(env, 3)
    before = env.get_state()
    action = torch.zeros(4, 3)
    rows = [1, 3][: len(values)]
    action[rows, 1] = torch.tensor(values)
    with pytest.raises(
        ValueError, match=f"not finite in {len(rows)} of 4 rows: {str(rows)[1:-1]}\\. N"
    ):
        act(env, tensordict, action)
    assert_same(env.get_state(), before)
    assert env.num_unstable.sum() == 0
    assert act(env, tensordict, 0.0)["next"].isfinite().all()


def test_the_largest_actions_are_finite():
    """Though their sum overflows; MuJoCo clamps them."""
    env = MujocoBatchEnv(Slider(), 3, seed=0)
    clamped = act(env, env.reset_to([0.0], [0.0]), 1.0)["next"]
    assert_same(act(env, env.reset_to([0.0], [0.0]), 3.4e38)["next"], clamped)
    assert not clamped["unstable"].any()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(4, 2), r"shape \(4, 2\) and dtype torch.float32; needed are \(4, 3\)"),
        (torch.zeros(4, 3, 1), r"shape \(4, 3, 1\)"),
        (torch.zeros(4), r"shape \(4,\)"),
        (torch.zeros(4, 3, dtype=torch.float64), "dtype torch.float64; needed .* torch.float32"),
        (torch.zeros(4, 3, dtype=torch.int64), "dtype torch.int64"),
    ],
)
def test_actions_that_do_not_fit(action, message):
    env = MujocoBatchEnv("Hopper-v5", 4, seed=0)
    tensordict = env.reset()
    before = env.get_state()
    with pytest.raises(ValueError, match=message):
        env.step(tensordict.set("action", action))
    assert_same(env.get_state(), before)


def test_a_step_without_an_action():
    env = MujocoBatchEnv("Hopper-v5", 2, seed=0)
    tensordict = env.reset()
    with pytest.raises((KeyError, ValueError), match="action"):
        env.step(tensordict)


# Divergence

STIFF = {"timestep": 0.2, "stiffness": 1e3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("driver", DRIVER_NAMES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_spring_that_is_too_stiff_for_the_step(driver, num_threads, dtype):
    """The further from the origin, the sooner; two rows stay at the origin."""

    def run(starts):
        env = MujocoBatchEnv(
            Slider(**STIFF), 4, seed=0, driver=driver, num_threads=num_threads, dtype=dtype
        )
        tensordict, data = env.reset_to(starts, [0.0]), []
        for _ in range(10):
            stepped, tensordict = env.step_and_maybe_reset(
                tensordict.set("action", torch.zeros(4, 1))
            )
            data.append(stepped.clone())
        return env, torch.stack(data, 1)["next"]

    env, data = run([[1.0], [1e-12], [1e-3], [-1e-12]])
    unstable = data["unstable"][..., 0]
    assert data.isfinite().all()
    first = unstable.int().argmax(1)
    assert 0 < first[0] < first[2] < 9
    assert unstable.any(1).tolist() == [True, False, True, False]
    # It ends the episode, which nothing else does here, and is counted.
    assert torch.equal(data["terminated"], data["unstable"])
    assert torch.equal(data["done"], data["unstable"])
    assert not data["truncated"].any()
    assert env.num_unstable.tolist() == unstable.sum(1).tolist()
    assert (data["reward"][unstable] == 0).all()
    for row in (0, 2):
        last = data["observation"][row, first[row] - 1]
        assert torch.equal(data["observation"][row, first[row]], last)
        assert last.abs().max() > 1e3
        # Then a new episode begins.
        following = data["observation"][row, first[row] + 1]
        assert following[0].abs() < 50
    # The others do not notice.
    other_env, other = run([[0.0], [1e-12], [0.0], [-1e-12]])
    assert not other["unstable"].any()
    assert other_env.num_unstable.tolist() == [0] * 4
    assert_same(data[[1, 3]], other[[1, 3]])
    assert other["observation"][1].abs().max() > 0


@pytest.mark.parametrize("driver", DRIVER_NAMES)
def test_rows_that_wait_do_not_diverge(driver):
    """Though a step would be too much for them."""
    env = MujocoBatchEnv(Slider(**STIFF), 3, seed=0, driver=driver)
    tensordict = env.reset_to([[0.0], [1e8], [1e8]], [0.0])
    tensordict["_step"] = torch.tensor([[True], [True], [False]])
    tensordict["action"] = torch.zeros(3, 1)
    following = env.step(tensordict)["next"]
    assert following["unstable"].flatten().tolist() == [False, True, False]
    assert following["done"].flatten().tolist() == [False, True, False]
    assert following["observation"][2].tolist() == [1e8, 0.0]
    assert env.num_unstable.tolist() == [0, 1, 0]


@pytest.mark.parametrize("driver", DRIVER_NAMES)
@pytest.mark.parametrize("name", ["Hopper-v5", "Ant-v5"])
@pytest.mark.parametrize(("field", "value"), [("qvel", np.nan), ("qpos", np.inf), ("qvel", 1e12)])
def test_a_poisoned_row(name, driver, field, value):
    """NaNs and infinities do not reach other rows, nor the next episode of their own."""
    env = MujocoBatchEnv(name, 4, seed=0, driver=driver, num_threads=2)
    _, tensordict = play(env, 3)
    twin = copy.deepcopy(env)
    env._driver.bind(field)[2, 0] = value
    poisoned, after = play(env, 8, tensordict, seed=1)
    sound, _ = play(twin, 8, tensordict, seed=1)
    first = poisoned["next"][:, 0]
    assert first["unstable"].flatten().tolist() == [False, False, True, False]
    assert first["terminated"][2]
    assert first["done"][2]
    assert first["reward"][2] == 0
    assert torch.equal(first["observation"][2], tensordict["observation"][2])
    assert env.num_unstable.tolist() == [0, 0, 1, 0]
    assert poisoned.isfinite().all()
    assert after.isfinite().all()
    assert not poisoned["next", "unstable"][:, 1:].any()
    others = [0, 1, 3]
    assert_same(poisoned[others], sound[others])
    # What a checkpoint would hold is sound as well.
    for key, entry in env.get_state().items(True, True):
        assert entry.isfinite().all(), key


@pytest.mark.parametrize("driver", DRIVER_NAMES)
def test_going_on_without_a_reset(driver):
    """The episode is over; whoever steps on regardless starts from the default state."""
    env = MujocoBatchEnv(Slider(), 2, seed=0, driver=driver)
    env.reset()
    env._driver.bind("qvel")[1] = np.nan
    following = act(env, TensorDict({}, [2]), 0.0)["next"]
    assert following["unstable"].flatten().tolist() == [False, True]
    assert env.get_state([1])["physics"].isfinite().all()
    following = act(env, following, 0.0)["next"]
    assert following["unstable"].flatten().tolist() == [False, False]
    assert following["observation"][1].tolist() == [0.0, 0.0]
    assert following["reward"][1] == 0.0


class Unsound(Slider):
    """Returns ``value`` where the position is above 0.5."""

    def __init__(self, where, value, **kwargs) -> None:
        super().__init__(**kwargs)
        self.where, self.value = where, value

    def _spoil(self, where, sims, array):
        bad = sims.qpos[:, 0] > 0.5
        spoilt = bad & (where == self.where) & (sims.time > 0.015)
        return np.where(spoilt.reshape(-1, *[1] * (array.ndim - 1)), self.value, array)

    def observation(self, sims):
        return sims.qpos, self._spoil("observation", sims, sims.qvel)

    def snapshot(self, sims):
        return self._spoil("snapshot", sims, sims.qpos)

    def reward(self, sims, action, before, after):
        return self._spoil("reward", sims, (after - before)[:, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39, -1e300])
@pytest.mark.parametrize("where", ["observation", "reward", "snapshot"])
def test_what_is_not_finite_though_mujoco_is_content(where, value):
    """Also what is too large for float32."""

    def make(where, dtype=torch.float32):
        env = MujocoBatchEnv(Unsound(where, value), 4, seed=0, dtype=dtype)
        return env, env.reset_to([[0.1], [0.7], [-0.2], [0.9]], [0.0])

    env, tensordict = make(where)
    first = act(env, tensordict, 0.5)["next"]
    assert not first["unstable"].any()
    second = act(env, first, 0.5)["next"]
    assert second["unstable"].flatten().tolist() == [False, True, False, True]
    assert second.isfinite().all()
    assert torch.equal(second["observation"][[1, 3]], first["observation"][[1, 3]])
    assert second["reward"][[1, 3]].tolist() == [[0.0], [0.0]]
    assert env.num_unstable.tolist() == [0, 1, 0, 1]
    for entry in env.get_state().values(True, True):
        assert entry.isfinite().all()
    reset = env.reset(second.select("done").rename_key_("done", "_reset"))
    assert reset.isfinite().all()
    sound, tensordict = make("nowhere")
    expected = act(sound, act(sound, tensordict, 0.5)["next"], 0.5)["next"]
    assert_same(second[[0, 2]], expected[[0, 2]])
    if abs(value) in (1e39, 1e300):  # in float64 that is a number
        double, tensordict = make(where, torch.float64)
        following = act(double, act(double, tensordict, 0.5)["next"], 0.5)["next"]
        assert not following["unstable"].any()


def test_large_finite_observations_are_not_unstable():
    """Though their sum overflows."""
    task = Slider()
    task.observation = lambda sims: np.full((len(sims), 5), 3e38)
    env = MujocoBatchEnv(task, 3)
    assert not act(env, env.reset(), 0.0)["next", "unstable"].any()


def test_division_by_zero_in_a_task():
    task = Slider()
    task.reward = lambda sims, *args: 1.0 / np.where(sims.qpos[:, 0] > 0.5, 0.0, 1.0)
    env = MujocoBatchEnv(task, 2)
    following = act(env, env.reset_to([[0.1], [0.7]], [0.0]), 0.0)["next"]
    assert following["unstable"].flatten().tolist() == [False, True]


@pytest.fixture(scope="module")
def cramped():
    """Where the boxes fall on the floor, MuJoCo runs out of memory: an error."""

    def fall(model, data):
        mujoco.mj_step(model, data)
        data.qpos[::2] = -0.951
        mujoco.mj_step(model, data)

    model = with_memory(boxes(1.0), fall).get("error")
    if model is None:
        pytest.skip("this MuJoCo never runs out of memory")
    return model


@pytest.mark.parametrize("driver", DRIVER_NAMES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_errors_of_mujoco_end_the_episode(cramped, driver, num_threads):
    task = Slider(model=cramped, limit=1e9)
    task.initial_state = lambda sims, rng: (sims.qpos, sims.qvel)
    env = MujocoBatchEnv(task, 4, seed=0, driver=driver, num_threads=num_threads)
    tensordict = env.reset()
    for _ in range(60):  # nothing is left behind that would fill the memory up
        env._driver.bind("qpos")[2, ::2] = -0.951
        following = act(env, tensordict, 0.0)["next"]
        assert following["unstable"].flatten().tolist() == [False, False, True, False]
        env.reset(following.select("done").rename_key_("done", "_reset"))
        assert not act(env, tensordict, 0.0)["next", "unstable"].any()
        env.reset()
    assert env.num_unstable.tolist() == [0, 0, 60, 0]


# What MuJoCo has to say


def test_the_users_own_handler_stays_and_is_called():
    messages: list[str] = []
    handler = messages.append
    mujoco.set_mju_user_warning(handler)
    try:
        env = MujocoBatchEnv(Slider(**STIFF), 2, seed=0, num_threads=2)
        play(env, 10)
        assert env.num_unstable.sum() > 0
        assert mujoco.get_mju_user_warning() is handler
        assert any("unstable" in message for message in messages)
        env.close()
        assert mujoco.get_mju_user_warning() is handler
    finally:
        mujoco.set_mju_user_warning(None)


def test_without_a_handler_there_is_none_afterwards():
    assert mujoco.get_mju_user_warning() is None
    env = MujocoBatchEnv(Slider(**STIFF), 2, seed=0)
    play(env, 10)
    assert mujoco.get_mju_user_warning() is None


def test_two_python_threads_are_silent_too():
    """One environment must not take the handler away while another one is stepping.

    In another process, because MuJoCo aborts it where the handler goes while it is called.
    """

    def step_both():
        wild = MujocoBatchEnv(Slider(frame_skip=50, **STIFF), 64, seed=0, num_threads=1)
        tame = MujocoBatchEnv(Slider(), 1, seed=0, num_threads=1)
        stop = threading.Event()

        def step_until_told():
            tensordict = tame.reset()
            while not stop.is_set():
                act(tame, tensordict, 0.0)

        thread = threading.Thread(target=step_until_told)
        thread.start()
        try:
            play(wild, 60)
        finally:
            stop.set()
            thread.join(60)
        return wild.num_unstable.sum() > 0, mujoco.get_mju_user_warning()

    assert in_fork(step_both, seconds=60) == "(tensor(True), None)"
