"""The two drivers against plain MuJoCo, one MjData per simulation, and against each other."""

from __future__ import annotations

import copy

import mujoco
import numpy as np
import pytest
from envs.mujoco._tasks import SCENE, Slider, play

from torchrl_trudi.envs.mujoco import MujocoBatchEnv, _drivers
from torchrl_trudi.envs.mujoco._drivers import (
    DRIVERS,
    make_driver,
)
from torchrl_trudi.envs.mujoco._physics_driver import POST_CONSTRAINT_FIELDS

NAMES = sorted(DRIVERS)
STATE = mujoco.mjtState.mjSTATE_INTEGRATION
STATE_FIELDS = [
    *("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied"),
    *("mocap_pos", "mocap_quat", "userdata"),
]
OUTPUTS = [
    *("xpos", "xipos", "xmat", "cvel", "cinert", "sensordata", "qfrc_constraint", "qfrc_actuator"),
    *("site_xpos", "subtree_com", "ten_length", "actuator_force", "ncon", "qacc"),
]
NUM_SIMS = 5


@pytest.fixture(scope="module")
def scene() -> mujoco.MjModel:
    return mujoco.MjSpec.from_string(SCENE).compile()


@pytest.fixture(scope="module")
def without_equality() -> mujoco.MjModel:
    """Body forces then come from contacts and from the user alone."""
    begin, end = SCENE.index("<equality>"), SCENE.index("<tendon>")
    model = mujoco.MjSpec.from_string(SCENE[:begin] + SCENE[end:]).compile()
    assert model.neq == 0
    return model


class Plain:
    """What the drivers must be equal to: a loop, and nothing clever."""

    def __init__(self, model, num_sims) -> None:
        self.models = [copy.copy(model) for _ in range(num_sims)]
        self.datas = [mujoco.MjData(model) for _ in range(num_sims)]

    def step(self, nstep):
        for model, data in zip(self.models, self.datas, strict=True):
            mujoco.mj_step(model, data, nstep)
            mujoco.mj_rnePostConstraint(model, data)

    def reset(self, ids):
        for i in ids:
            mujoco.mj_resetData(self.models[i], self.datas[i])

    def forward(self, ids):
        for i in ids:
            mujoco.mj_forward(self.models[i], self.datas[i])

    def set_const(self, ids):
        for i in ids:
            mujoco.mj_setConst(self.models[i], mujoco.MjData(self.models[i]))

    def get(self, name):
        return np.stack([np.asarray(getattr(data, name)) for data in self.datas])

    def set(self, name, values):
        for data, value in zip(self.datas, values, strict=True):
            if name == "time":
                data.time = value
            else:
                getattr(data, name)[:] = value


def assert_equal(driver, plain, fields, rows=slice(None)):
    for name in fields:
        ours, theirs = driver.bind(name)[rows], plain.get(name)[rows]
        assert ours.shape == theirs.shape, name
        assert np.array_equal(ours, theirs), name


def start(name, model, post_constraint=POST_CONSTRAINT_FIELDS, num_threads=2):
    """A driver and its reference, each row pushed another way, the fields bound beforehand."""
    driver = make_driver(name, model, NUM_SIMS, num_threads, post_constraint)
    plain = Plain(model, NUM_SIMS)
    for field in [*STATE_FIELDS, *OUTPUTS, *post_constraint]:
        driver.bind(field)
    everything = np.arange(NUM_SIMS)
    driver.reset(everything)
    driver.forward(everything)
    plain.forward(everything)
    return driver, plain


def push(driver, plain, rng):
    for field in ("qvel", "ctrl", "qfrc_applied", "mocap_pos", "userdata"):
        values = rng.normal(size=driver.bind(field).shape)
        driver.bind(field)[:] = values
        plain.set(field, values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_equal_to_plain_mujoco(name, num_threads, scene):
    """Fields of the state, derived ones and those of mj_rnePostConstraint, over resets of rows."""
    driver, plain = start(name, scene, num_threads=num_threads)
    rng = np.random.default_rng(0)
    fields = [*STATE_FIELDS, *OUTPUTS, *POST_CONSTRAINT_FIELDS]
    assert_equal(driver, plain, [*STATE_FIELDS, *OUTPUTS])
    contacts = 0
    for t in range(40):
        if t % 10 == 0:
            push(driver, plain, rng)
        forces = rng.normal(size=driver.bind("xfrc_applied").shape)
        forces[rng.random(NUM_SIMS) < 0.5] = 0.0
        driver.bind("xfrc_applied")[:] = forces
        plain.set("xfrc_applied", forces)
        assert len(driver.step(3)) == 0
        plain.step(3)
        assert_equal(driver, plain, fields)
        contacts += driver.bind("ncon").sum()
        if t % 13 == 7:
            ids = np.array([(t + 2) % NUM_SIMS, t % NUM_SIMS])  # in no particular order
            driver.reset(ids)
            plain.reset(ids)
            assert_equal(driver, plain, STATE_FIELDS)
            qpos = rng.normal(size=(2, scene.nq))
            driver.bind("qpos")[ids] = qpos
            for i, row in zip(ids, qpos, strict=True):
                plain.datas[i].qpos[:] = row
            driver.forward(ids)
            plain.forward(ids)
            assert_equal(driver, plain, [*STATE_FIELDS, *OUTPUTS])
            assert (driver.bind("cfrc_ext")[ids] == 0).all()
    assert contacts > 0
    driver.close()


@pytest.mark.parametrize("name", NAMES)
def test_external_forces_of_contacts_and_of_the_user(name, without_equality):
    """Rows whose body forces are zero are left out, and must be zero again afterwards."""
    driver, plain = start(name, without_equality, ["cfrc_ext"])
    zero = set()
    for t in range(60):
        forces = np.zeros(driver.bind("xfrc_applied").shape)
        forces[t % NUM_SIMS] = t % 3
        driver.bind("xfrc_applied")[:] = forces
        plain.set("xfrc_applied", forces)
        driver.step(4)
        plain.step(4)
        assert_equal(driver, plain, ["cfrc_ext", "ncon"])
        zero |= {(i, bool(force.any())) for i, force in enumerate(driver.bind("cfrc_ext"))}
    assert len(zero) == 2 * NUM_SIMS  # each row was zero at a time, and not at another
    driver.close()


@pytest.mark.parametrize("name", NAMES)
def test_external_forces_of_an_equality_constraint(name, scene):
    """Without any contact."""
    driver, plain = start(name, scene, ["cfrc_ext"])
    for each in (driver, plain):
        each.step(3)
    assert_equal(driver, plain, ["cfrc_ext", "ncon"])
    assert (driver.bind("ncon") == 0).all()
    assert driver.bind("cfrc_ext").any()


@pytest.mark.parametrize("name", NAMES)
def test_state_is_all_there_is(name, scene):
    """A row written to another driver goes on there as it would have here."""
    driver, plain = start(name, scene)
    rng = np.random.default_rng(1)
    push(driver, plain, rng)
    for _ in range(20):
        driver.step(2)
    other, _ = start(name, scene)
    push(other, plain, rng)
    other.step(7)
    other.state[:] = driver.state
    for each in (driver, other):
        for _ in range(20):
            each.step(2)
    assert np.array_equal(driver.state, other.state)
    for field in [*OUTPUTS, *POST_CONSTRAINT_FIELDS]:
        assert np.array_equal(driver.bind(field), other.bind(field)), field
    assert driver.state.shape == (NUM_SIMS, mujoco.mj_stateSize(scene, STATE))


@pytest.mark.parametrize("name", NAMES)
def test_get_data_and_get_model(name, scene):
    driver, plain = start(name, scene)
    driver.expand("body_mass")[3] *= 2.0
    driver.set_const(np.array([3]))
    push(driver, plain, np.random.default_rng(2))
    driver.step(5)
    model, data = copy.copy(scene), mujoco.MjData(scene)
    driver.get_data(3, data)
    for field in ("qpos", "qvel", "act", "mocap_pos", "ctrl"):
        assert np.array_equal(getattr(data, field), driver.bind(field)[3]), field
    driver.get_model(3, model)
    assert np.array_equal(model.body_mass, 2 * scene.body_mass)
    driver.get_model(2, model)
    assert np.array_equal(model.body_mass, scene.body_mass)


@pytest.mark.parametrize("name", NAMES)
def test_expanded_fields(name, scene):
    """Each row is a simulation of a model of its own, with the constants that follow from it."""
    driver, plain = start(name, scene)
    rng = np.random.default_rng(3)
    everything = np.arange(NUM_SIMS)
    for field in ("body_mass", "geom_friction", "dof_damping", "opt.gravity", "actuator_gainprm"):
        values = driver.expand(field)
        assert driver.expand(field) is values
        holder = scene.opt if field.startswith("opt.") else scene
        nominal = getattr(holder, field.removeprefix("opt."))
        assert np.array_equal(values, np.repeat(nominal[None], NUM_SIMS, 0))
        values *= rng.uniform(0.5, 2.0, values.shape)
        for model, row in zip(plain.models, values, strict=True):
            holder = model.opt if field.startswith("opt.") else model
            getattr(holder, field.removeprefix("opt."))[:] = row
    driver.set_const(everything)
    plain.set_const(everything)
    push(driver, plain, rng)
    for _ in range(30):
        driver.step(3)
        plain.step(3)
    assert_equal(driver, plain, [*STATE_FIELDS, *OUTPUTS, *POST_CONSTRAINT_FIELDS])
    # Some rows anew, in no particular order.
    ids = np.array([4, 0])
    driver.expand("body_mass")[ids] *= 3.0
    for i in ids:
        plain.models[i].body_mass[:] *= 3.0
    driver.set_const(ids)
    plain.set_const(ids)
    driver.step(3)
    plain.step(3)
    assert_equal(driver, plain, [*STATE_FIELDS, *OUTPUTS, *POST_CONSTRAINT_FIELDS])
    # The model itself is nobody's.
    assert np.array_equal(scene.body_mass, mujoco.MjSpec.from_string(SCENE).compile().body_mass)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["qpos0", "body_pos"])  # a mocap body starts where it is placed
def test_reset_to_expanded_defaults(name, field, scene):
    driver, plain = start(name, scene)
    values = driver.expand(field)
    values += np.random.default_rng(4).normal(size=values.shape)
    for model, row in zip(plain.models, values, strict=True):
        getattr(model, field)[:] = row
    everything = np.arange(NUM_SIMS)
    for each in (driver, plain):
        each.set_const(everything)
        each.step(2)
        each.reset(np.array([3, 1]))
    assert_equal(driver, plain, STATE_FIELDS, [1, 3])


@pytest.mark.parametrize("name", NAMES)
def test_model_field(name, scene):
    driver, _ = start(name, scene)
    assert driver.model_field("body_mass").shape == (1, scene.nbody)
    masses = driver.expand("body_mass")
    masses[1] *= 2
    assert np.array_equal(driver.model_field("body_mass"), masses)
    assert driver.model_field("geom_size").shape == (1, scene.ngeom, 3)


@pytest.mark.parametrize("name", NAMES)
def test_derived_constants_in_model_field(name, scene):
    driver, plain = start(name, scene)
    driver.expand("body_mass")[2] *= 2
    plain.models[2].body_mass[:] *= 2
    everything = np.arange(NUM_SIMS)
    driver.set_const(everything)
    plain.set_const(everything)
    expected = np.stack([model.body_subtreemass for model in plain.models])
    assert np.array_equal(driver.model_field("body_subtreemass"), expected)


@pytest.mark.parametrize("name", NAMES)
def test_warnings_are_those_of_the_last_step(name):
    model = mujoco.MjSpec.from_string(SCENE).compile()
    driver, _ = start(name, model)
    driver.bind("qvel")[3, 0] = np.nan
    driver.step(1)
    kind = mujoco.mjtWarning.mjWARN_BADQVEL.value
    assert np.flatnonzero(driver.warnings.any(1)).tolist() == [3]
    assert driver.warnings[3, kind] > 0
    driver.step(1)
    assert not driver.warnings.any()


@pytest.mark.parametrize("name", NAMES)
def test_bound_arrays_are_live_and_of_the_dtype_of_mujoco(name, scene):
    driver, _ = start(name, scene)
    data = mujoco.MjData(scene)
    for field in [*STATE_FIELDS, *OUTPUTS]:
        array = driver.bind(field)
        expected = np.asarray(getattr(data, field))
        assert array.shape == (NUM_SIMS, *expected.shape), field
        assert array.dtype.kind == expected.dtype.kind, field
        before = array.copy()
        assert driver.bind(field) is array
        if field in ("time", "qpos", "xpos", "sensordata", "cvel"):
            driver.step(1)
            assert not np.array_equal(array, before), field


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("qposs", "'qposs' is not a field of MjData.*Did you mean 'qpos'"),
        ("efc_force", "'efc_force' is not a field of MjData with a fixed size"),
        ("contact", "'contact' is not a field of MjData with a fixed size"),
        ("cacc", "'cacc' is not computed by this driver"),
    ],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_fields_that_cannot_be_bound(name, field, message, scene):
    driver = make_driver(name, scene, 2, 1)
    with pytest.raises(AttributeError, match=message):
        driver.bind(field)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["body_mas", "nbody", "opt.gravty", "opt", "qpos", "names"])
def test_fields_that_cannot_be_expanded(name, field, scene):
    driver = make_driver(name, scene, 2, 1)
    with pytest.raises(ValueError, match=field):
        driver.expand(field)
    driver.step(1)


@pytest.mark.parametrize("field", ["opt.timestep", "opt.density", "opt.impratio", "body_pos"])
def test_both_drivers_expand_the_same_fields(field, scene):
    shapes = {make_driver(name, scene, 2, 1).expand(field).shape for name in NAMES}
    assert len(shapes) == 1


def test_threads():
    model = mujoco.MjSpec.from_string(SCENE).compile()
    for name in NAMES:
        assert make_driver(name, model, 2, 64).num_threads == 2


def test_without_the_batch_of_mujoco(monkeypatch):
    reference, _ = play(MujocoBatchEnv(Slider(), 3, seed=0), 5)
    monkeypatch.setattr(_drivers, "mujoco_batch", None)
    with pytest.raises(RuntimeError, match=r"needs mujoco.batch, of MuJoCo 3.17; .*'threads'"):
        MujocoBatchEnv(Slider(), driver="batch")
    env = MujocoBatchEnv(Slider(), 3, seed=0)
    assert isinstance(env._driver, _drivers.ThreadDriver)
    assert (play(env, 5)[0] == reference).all()
