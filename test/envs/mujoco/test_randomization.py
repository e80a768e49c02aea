"""Domain randomisation: what is drawn, when, from which stream, and what it does."""

from __future__ import annotations

import copy
import pickle

import mujoco
import numpy as np
import pytest
import torch
from envs.mujoco._tasks import SCENE, Slider, act, assert_same, play

from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv, MujocoTask, RowGenerators
from torchrl_trudi.envs.mujoco.randomization import RandomizedField

DRIVERS = ["batch", "threads"]


class Scene(MujocoTask):
    """Everything moves; there is no need to know more."""

    def __init__(self, **kwargs) -> None:
        super().__init__(mujoco.MjSpec.from_string(SCENE), frame_skip=3, **kwargs)

    def initial_state(self, sims, rng):
        return sims.qpos + 0.01 * rng.standard_normal(sims.model.nq), sims.qvel

    def observation(self, sims):
        return sims.qpos, sims.qvel, sims.sensordata

    def reward(self, sims, action, before, after):
        return sims.qpos[:, 0]


@pytest.fixture(scope="module")
def scene() -> mujoco.MjModel:
    return mujoco.MjSpec.from_string(SCENE).compile()


def draw(model, *args, rows=4, seed=0, **kwargs):
    """Values ``[rows, ...]`` and draws of one randomisation of every row."""
    randomization = ModelRandomization(*args, **kwargs)
    field = randomization.field
    nominal = getattr(model.opt, field[4:]) if field.startswith("opt.") else getattr(model, field)
    values = np.repeat(nominal[None], rows, 0)
    randomized = RandomizedField(randomization, model, values)
    rng = RowGenerators.from_seeds(range(seed, seed + rows))
    draws = randomized.sample(np.arange(rows), rng)
    assert draws.shape == (rows, randomized.num_draws)
    return values, draws, nominal


# What is drawn


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("scale", lambda nominal, draws: nominal * draws),
        ("add", lambda nominal, draws: nominal + draws),
        ("set", lambda nominal, draws: draws),
    ],
)
def test_operations(operation, expected, scene):
    values, draws, nominal = draw(scene, "body_mass", 0.5, 2.0, operation, rows=50)
    assert np.array_equal(values, expected(nominal, draws))
    assert 0.5 <= draws.min() < 0.6 < 1.9 < draws.max() < 2.0
    assert len(np.unique(draws)) == draws.size
    plain = np.random.default_rng(3).uniform(0.5, 2.0, scene.nbody)
    assert np.array_equal(draws[3], plain)


def test_scaling_is_the_default_and_bounds_may_be_equal(scene):
    values, draws, nominal = draw(scene, "body_mass", 3.0, 3.0)
    assert np.array_equal(values, np.repeat(3 * nominal[None], 4, 0))
    assert (draws == 3.0).all()


def test_names(scene):
    values, draws, nominal = draw(scene, "body_mass", 2, 3, names=["lower", "ball"])
    lower, ball = scene.body("lower").id, scene.body("ball").id
    assert np.array_equal(values[:, [lower, ball]], draws * nominal[[lower, ball]])
    others = np.setdiff1d(np.arange(scene.nbody), [lower, ball])
    assert (values[:, others] == nominal[others]).all()


def test_numbers_instead_of_names(scene):
    by_name, _, _ = draw(scene, "body_mass", 2, 3, names=["lower", "ball"])
    ids = [scene.body("lower").id, scene.body("ball").id]
    by_number, _, _ = draw(scene, "body_mass", 2, 3, names=ids)
    assert np.array_equal(by_number, by_name)


@pytest.mark.parametrize(
    ("field", "names", "rows"),
    [
        ("dof_damping", ["elbow"], [7]),  # the ball's free joint comes first
        ("dof_armature", ["elbow", "shoulder"], [7, 6]),
        ("dof_frictionloss", [0], [0, 1, 2, 3, 4, 5]),
        ("jnt_stiffness", ["elbow"], [2]),
        ("geom_friction", ["floor"], [0]),
        ("site_pos", ["tip"], [0]),
        ("actuator_gainprm", ["elbow"], [1]),
        ("tendon_stiffness", ["sum"], [0]),
        ("eq_data", [0], [0]),
    ],
)
def test_objects_of_all_kinds(field, names, rows, scene):
    values, _, nominal = draw(scene, field, 1.0, 2.0, "add", names=names)
    changed = (values != nominal).reshape(4, len(nominal), -1).all(-1)
    untouched = (values == nominal).reshape(4, len(nominal), -1).all(-1)
    for row in range(len(nominal)):
        assert (changed if row in rows else untouched)[:, row].all(), row


def test_columns(scene):
    for names in (None, ["floor", "lower"]):
        values, draws, nominal = draw(
            scene, "geom_friction", 2, 3, names=names, columns=[2, 0], operation="set"
        )
        ids = [scene.geom(name).id for name in names] if names else list(range(scene.ngeom))
        assert np.array_equal(values[:, ids][:, :, [2, 0]].reshape(4, -1), draws)
        assert (values[..., 1] == nominal[:, 1]).all()
        others = np.setdiff1d(np.arange(scene.ngeom), ids)
        assert (values[:, others] == nominal[others]).all()


@pytest.mark.parametrize("names", [None, ["floor", "lower"]])
def test_all_columns(names, scene):
    values, draws, nominal = draw(scene, "geom_friction", 2, 3, names=names)
    ids = [scene.geom(name).id for name in names] if names else list(range(scene.ngeom))
    assert draws.shape == (4, 3 * len(ids))
    assert np.array_equal(values[:, ids], draws.reshape(4, -1, 3) * nominal[ids])


def test_one_draw_for_all(scene):
    values, draws, nominal = draw(scene, "body_mass", 0.5, 2.0, shared=True)
    assert draws.shape == (4, 1)
    assert np.array_equal(values, draws * nominal)
    values, draws, nominal = draw(
        scene, "geom_friction", 0.5, 2.0, names=["floor", "ball"], columns=[0, 1], shared=True
    )
    assert draws.shape == (4, 1)
    ids = [scene.geom(name).id for name in ("floor", "ball")]
    assert np.array_equal(values[:, ids, :2], draws[..., None] * nominal[ids, :2])


def test_options_of_the_physics(scene):
    values, draws, nominal = draw(scene, "opt.gravity", 0.9, 1.1, shared=True)
    assert np.array_equal(values, draws * nominal)
    assert draws.shape == (4, 1)
    values, draws, _ = draw(scene, "opt.wind", -1, 1, "set")
    assert np.array_equal(values, draws)


def test_numbers_of_a_vector(scene):
    """Gravity that differs in strength, or in direction."""
    values, draws, nominal = draw(scene, "opt.gravity", -12.0, -7.0, "set", columns=[2])
    assert draws.shape == (4, 1)
    assert np.array_equal(values[:, 2:], draws)
    assert (values[:, :2] == nominal[:2]).all()


def test_only_the_rows_that_are_asked_for(scene):
    values = np.repeat(scene.body_mass[None], 5, 0)
    randomized = RandomizedField(ModelRandomization("body_mass", 2.0, 3.0), scene, values)
    ids = np.array([3, 1])
    draws = randomized.sample(ids, RowGenerators.from_seeds([7, 8]))
    assert np.array_equal(values[ids], draws * scene.body_mass)
    assert (values[[0, 2, 4]] == scene.body_mass).all()
    # Again: from the values of the model, not from those of last time.
    randomized.sample(ids, RowGenerators.from_seeds([7, 8]))
    assert np.array_equal(values[ids], draws * scene.body_mass)


# What is refused


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"low": 2.0, "high": 1.0}, ValueError, "body_mass: .* low <= high, got 2.0 and 1.0"),
        ({"low": np.nan}, ValueError, "must be finite"),
        ({"high": np.inf}, ValueError, "must be finite"),
        ({"low": "a"}, TypeError, None),
        ({"operation": "multiply"}, ValueError, r"'multiply' is not one of \['scale', 'add', 'set"),
        ({"operation": "sett"}, ValueError, "Did you mean 'set'"),
    ],
)
def test_bad_randomizations(kwargs, error, message):
    with pytest.raises(error, match=message):
        ModelRandomization(**{"field": "body_mass", "low": 1.0, "high": 2.0, **kwargs})


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"field": "body_mas"}, "body_mas"),
        ({"field": "opt.gravty"}, "opt.gravty"),
        ({"field": "qpos"}, "qpos"),
        ({"field": "nbody"}, "nbody"),
        ({"field": "geom_contype"}, "geom_contype holds integers; it cannot be randomised"),
        ({"field": "opt.iterations"}, "opt.iterations"),
        ({"names": ["uper"]}, r"no body 'uper' for body_mass; it has \['world', 'target', 'ball'"),
        ({"names": [6]}, "no body 6 for body_mass"),
        ({"names": [-1]}, "no body -1 for body_mass"),
        ({"names": []}, r"names=\[\]"),
        ({"field": "dof_damping", "names": ["upper"]}, r"no jnt 'upper' .*'shoulder', 'elbow'"),
        ({"field": "opt.gravity", "names": ["upper"]}, "opt.gravity do not belong to objects"),
        ({"field": "qpos0"}, "qpos0 is what an episode's initial state starts from"),
        ({"field": "opt.timestep"}, "opt.timestep is the same in all environments"),
        ({"field": "actuator_ctrlrange"}, "actuator_ctrlrange is the range of the action"),
        ({"columns": [0]}, r"body_mass has no columns \[0\]: its shape is \(6,\)"),
        ({"field": "geom_friction", "columns": [3]}, r"no columns \[3\]: its shape is \(5, 3\)"),
        ({"field": "geom_friction", "columns": [-1]}, r"no columns \[-1\]"),
        ({"field": "geom_friction", "columns": []}, r"columns=\[\]"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_the_model(driver, kwargs, message):
    randomization = ModelRandomization(**{"field": "body_mass", "low": 1.0, "high": 2.0, **kwargs})
    with pytest.raises(ValueError, match=message):
        MujocoBatchEnv(Scene(), 2, driver=driver, num_threads=1, randomization=[randomization])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"names": "upper"}, TypeError, "names must be a sequence, got 'upper'"),
        ({"columns": 0}, TypeError, "not iterable"),
        ({"names": ["upper", "upper"]}, ValueError, "repeats an entry"),
        ({"field": 3}, TypeError, "field must be the name"),
        ({"low": "1"}, TypeError, "low must be a number"),
        ({"high": [2.0]}, TypeError, "high must be a number"),
    ],
    ids=str,
)
def test_what_is_no_randomization(kwargs, error, message):
    with pytest.raises(error, match=message):
        ModelRandomization(**{"field": "body_mass", "low": 1.0, "high": 2.0, **kwargs})


def test_numpy_numbers_name_objects():
    given = ModelRandomization("body_mass", 1.0, 2.0, names=np.arange(2, 4))
    assert given == ModelRandomization("body_mass", 1.0, 2.0, names=[2, 3])
    assert hash(given) == hash(ModelRandomization("body_mass", 1.0, 2.0, names=(2, 3)))


@pytest.mark.parametrize("driver", DRIVERS)
def test_values_that_make_no_sense_are_an_error(driver):
    """Not a simulation that goes on with them, nor one of other values."""
    negative = [ModelRandomization("body_mass", -2.0, -1.0, names=["ball"])]
    env = MujocoBatchEnv(Scene(), 2, seed=0, driver=driver, randomization=negative)
    try:
        data, _ = play(env, 5)
    except (RuntimeError, ValueError):
        return
    assert data.isfinite().all()
    assert data["next", "unstable"].any()


# In the environment

RANDOMIZATION = (
    ModelRandomization("body_mass", 0.5, 2.0, names=["ball", "upper"]),
    ModelRandomization("geom_friction", 0.5, 1.5, columns=[0], shared=True),
    ModelRandomization("dof_damping", 0.0, 0.5, "add", names=["elbow"]),
    ModelRandomization("actuator_gainprm", 1.0, 3.0, "set", columns=[0]),
    ModelRandomization("opt.gravity", 0.8, 1.2, shared=True),
)


def make(driver="batch", seed=0, num_envs=3, **kwargs):
    task = Scene(max_episode_steps=kwargs.pop("max_episode_steps", 4))
    options = {"randomization": RANDOMIZATION, "num_threads": 2, **kwargs}
    return MujocoBatchEnv(task, num_envs, seed=seed, driver=driver, **options)


def plain_model(env, draws) -> mujoco.MjModel:
    """The model of a row, from what is reported."""
    model = copy.copy(env.model)
    draws = {key: value.numpy() for key, value in draws.items()}
    model.body_mass[[model.body("ball").id, model.body("upper").id]] *= draws["body_mass"]
    model.geom_friction[:, 0] *= draws["geom_friction"]
    model.dof_damping[7] += draws["dof_damping"][0]
    model.actuator_gainprm[:, 0] = draws["actuator_gainprm"]
    model.opt.gravity[:] *= draws["opt.gravity"]
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_physics_is_that_of_the_values_reported(driver):
    """Bit for bit that of plain MuJoCo, over several episodes."""
    env = make(driver, dtype=torch.float64)
    data, _ = play(env, 11)
    reported = data["randomization"]
    for row in range(3):
        model = None
        for t in range(11):
            if t % 4 == 0:
                model = plain_model(env, reported[row, t])
                plain = mujoco.MjData(model)
                plain.qpos[:] = data["observation"][row, t, : model.nq].numpy()
                mujoco.mj_forward(model, plain)
            step = data[row, t]
            assert np.array_equal(step["observation"][: model.nq], plain.qpos)
            plain.ctrl[:] = step["action"].numpy()
            mujoco.mj_step(model, plain, 3)
            expected = np.concatenate([plain.qpos, plain.qvel, plain.sensordata])
            assert np.array_equal(step["next", "observation"], expected)
            # The episode's values are reported until its end.
            assert_same(step["next", "randomization"], reported[row, t - t % 4])
    # Other values give another physics.
    other = make(driver, dtype=torch.float64, randomization=())
    assert not torch.equal(
        play(other, 4)[0]["next", "observation"], data["next", "observation"][:, :4]
    )


@pytest.mark.parametrize("driver", DRIVERS)
def test_constants_that_follow_from_the_values(driver):
    env = make(driver)
    model = plain_model(env, env.reset()["randomization"][1].double())
    ours = copy.copy(env.model)
    env._driver.get_model(1, ours)
    for field in ("body_mass", "body_subtreemass", "dof_invweight0", "body_invweight0"):
        np.testing.assert_allclose(getattr(ours, field), getattr(model, field), rtol=1e-6)
        assert not np.allclose(getattr(ours, field), getattr(env.model, field), rtol=1e-3), field


def test_drivers_and_threads_change_nothing():
    reference, _ = play(make(num_threads=1), 11)
    assert_same(play(make(num_threads=3), 11)[0], reference)
    assert_same(play(make("threads"), 11)[0], reference)


def test_draws_come_from_the_rows_stream_after_its_initial_state():
    env = make(dtype=torch.float64)
    data, _ = play(env, 9)
    for row in range(3):
        rng = np.random.default_rng(env.seeds[row])
        for episode in range(3):
            rng.standard_normal(env.model.nq)
            drawn = data["randomization"][row, 4 * episode]
            for entry, size in zip(RANDOMIZATION, (2, 1, 1, 2, 1), strict=True):
                expected = rng.uniform(entry.low, entry.high, size)
                assert np.array_equal(drawn[entry.field], expected), entry.field


def test_seeds():
    first, again, other = (make(seed=seed).reset()["randomization"] for seed in (0, 0, 1))
    assert_same(first, again)
    for key in sorted(first.keys()):
        assert len(torch.cat([first[key], other[key]])[:, 0].unique()) == 6, key


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_reset_draws_anew_for_its_rows_alone(driver):
    env = make(driver, max_episode_steps=100)
    tensordict = act(env, env.reset(), 0.3)["next"]
    before = env.get_state()["randomization"]
    tensordict["_reset"] = torch.tensor([[False], [True], [False]])
    env.reset(tensordict)
    after = env.get_state()["randomization"]
    for key, value in before.items(True, True):
        assert torch.equal(value[[0, 2]], after[key][[0, 2]]), key
        assert not torch.equal(value[1], after[key][1]), key
        if key[1] == "values":
            assert torch.equal(after[key], torch.from_numpy(env._driver.expand(key[0]).copy())), key


def test_a_state_that_is_given_keeps_the_values():
    env = make()
    env.reset()
    before = env.get_state()
    env.reset_to(np.r_[0, 0, 1, 1, 0, 0, 0, 0, 0, 0.8, 1, 0.7, 1, 0, 0, 0], np.zeros(env.model.nv))
    after = env.get_state()
    assert_same(after["randomization"], before["randomization"])
    assert torch.equal(after["rng"], before["rng"])


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("transfer", ["state", "state_dict", "pickle"])
def test_checkpoints_hold_the_values(driver, transfer):
    env = make(driver)
    _, tensordict = play(env, 6)  # in the midst of an episode
    other = make(driver, seed=5)
    other.reset()
    if transfer == "state":
        other.set_state(env.get_state())
    elif transfer == "state_dict":
        other.load_state_dict(env.state_dict())
    else:
        other = pickle.loads(pickle.dumps(env))
    assert_same(other.get_state(), env.get_state())
    expected, _ = play(env, 10, tensordict)
    assert_same(play(other, 10, tensordict)[0], expected)
    # A single row too, in the place of another.
    env.set_state(env.get_state([0]), [2])
    action = torch.full((3, 2), 0.3)
    for _ in range(6):
        following = act(env, tensordict, action)["next"]
        assert torch.equal(following["observation"][0], following["observation"][2])


def test_reported_draws_are_float32_and_the_callers_own():
    env = make()
    tensordict = env.reset()
    reported = tensordict["randomization"]
    assert {value.dtype for value in reported.values()} == {torch.float32}
    kept = reported.clone()
    for value in reported.values():
        value.zero_()
    assert_same(act(env, tensordict, 0.0)["next", "randomization"], kept)
    assert set(env.observation_spec["randomization"].keys()) == set(kept.keys())


def test_all_values_of_a_field_with_several_per_object():
    friction = ModelRandomization("geom_friction", 0.5, 2.0)
    env = MujocoBatchEnv(Slider(), 3, seed=0, randomization=[friction])
    assert env.reset()["randomization", "geom_friction"].shape == (3, 3)
