"""Policies of checkpoints and of torch.export act as they did in their run, and refuse what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_trudi.envs import get_observation_norm
from torchrl_trudi.export import (
    ExportedPolicy,
    ExportError,
    PolicyFileError,
    PolicyMetadata,
    export_policy,
    load_policy,
)
from torchrl_trudi.trainers import ConfigError

pytestmark = pytest.mark.export

VARIANTS = ["diffusion", "gaussian", "projection", "own_box", "raw"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_acts_as_in_the_environment(runs, variant, scale):
    """The environment's own transforms, on the way in and on the way out, are the yardstick."""
    folder, env, actor = runs(variant)
    policy = load_policy(folder)
    raw = scale * torch.randn(16, 4, 4)  # the environment is a batch of 4
    tensordict = TensorDict({"observation": raw.clone()}, [16, 4])
    if variant != "raw":
        tensordict = get_observation_norm(env).share(frozen=True)(tensordict)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        tensordict = actor(tensordict)
    expected = tensordict["action"]
    if variant != "own_box":
        expected = env.transform[0].inv(tensordict)["action"]
    actions = policy(raw.reshape(64, 4))
    torch.testing.assert_close(actions, expected.reshape(64, 1), atol=1e-5, rtol=1e-5)
    assert policy.metadata.low == (-3.0,)
    if scale == 1.0:
        assert actions.std() > 0.1


def test_a_checkpoint_without_the_task(tmp_path, runs, make_run):
    make_run(tmp_path, "diffusion", task=False)
    old, new = load_policy(tmp_path), load_policy(runs("diffusion")[0])
    observation = np.random.default_rng(0).normal(size=(8, 4))
    np.testing.assert_array_equal(old(observation), new(observation))
    assert old.metadata == new.metadata


def test_metadata(runs):
    metadata = load_policy(runs("diffusion")[0]).metadata
    assert metadata.observation == (("observation", 4),)
    assert metadata.action_names == ("slide",)
    assert (metadata.num_steps, metadata.dt, metadata.frames) == (3, 0.04, 80)
    assert metadata.normalizer_count >= 84
    assert len(metadata.config_hash) == 64
    assert load_policy(runs("raw")[0]).metadata.normalizer_count == 0


def test_kinds_and_shapes(runs):
    policy = load_policy(runs("diffusion")[0])
    batch = np.linspace(-1, 1, 12).reshape(3, 4)
    actions = policy(batch)
    assert isinstance(actions, np.ndarray) and actions.dtype == np.float32
    assert actions.shape == (3, 1) and policy(batch[0]).shape == (1,)
    assert isinstance(policy(torch.from_numpy(batch)), torch.Tensor)
    np.testing.assert_array_equal(policy({"observation": batch, "other": 0}), actions)
    for wrong in (np.zeros(5), np.zeros((2, 3)), np.zeros((1, 1, 4)), np.zeros(())):
        with pytest.raises(ValueError, match=r"must have the shape \[4\] or \[B, 4\]"):
            policy(wrong)
    with pytest.raises(ValueError, match="not finite"):
        policy(np.full(4, np.nan))
    with pytest.raises(KeyError, match="no entry 'observation'"):
        policy({"obs": batch})
    with pytest.raises(TypeError, match="numbers"):
        policy(np.array(["a"] * 4))
    with pytest.raises(ValueError, match="takes no noise"):
        policy(batch, np.zeros((3, 4, 1)))


def test_several_entries_by_name():
    """Their order cannot be wrong."""

    class Echo(ExportedPolicy):
        def _act(self, observation, noise):
            return observation

    values = {"low": (-1.0,), "high": (1.0,), "num_steps": 1, "stochastic": False, "dt": None}
    values |= {"normalizer_count": 0, "frames": 0, "policy": "gaussian"}
    values |= {"config_hash": "", "version": "", "action_names": ("a0",)}
    policy = Echo(PolicyMetadata((("b", 2), ("goal/xy", 1)), **values))
    b, xy = np.ones((3, 2)), np.zeros((3, 1))
    for given in ({"goal/xy": xy, "b": b}, {"b": b, "goal": {"xy": xy}}):
        assert policy(given).tolist() == [[1, 1, 0]] * 3
    with pytest.raises(ValueError, match="pass a dictionary"):
        policy(np.zeros(3))
    with pytest.raises(KeyError, match="goal/xy"):
        policy({"b": b})
    with pytest.raises(ValueError, match="'b' must have the shape"):
        policy({"b": xy, "goal/xy": b})
    with pytest.raises(ValueError, match="different batch sizes"):
        policy({"b": b[0], "goal/xy": xy})
    with pytest.raises(PolicyFileError, match="make no sense"):
        PolicyMetadata((), **values)


def test_stochastic(runs):
    folder, *_ = runs("diffusion")
    observation = np.zeros((5, 4))
    one, other = (load_policy(folder, stochastic=True, seed=s)(observation) for s in (0, 1))
    again = load_policy(folder, stochastic=True, seed=0)(observation)
    assert (one == again).all() and (one != other).any()
    policy = load_policy(folder, stochastic=True)
    with pytest.raises(ValueError, match=r"noise must have the shape \[5, 4, 1\]"):
        policy(observation, np.zeros((5, 3, 1)))


def test_torch_export(runs, tmp_path):
    folder, *_ = runs("diffusion")
    path = tmp_path / "policy.pt2"
    metadata = export_policy(folder, path)
    policy, live = load_policy(path), load_policy(folder)
    assert policy.metadata == metadata == live.metadata
    for batch in (1, 3, 64):
        observation = torch.randn(batch, 4)
        torch.testing.assert_close(policy(observation), live(observation), atol=1e-5, rtol=0)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_policy(folder, path)
    with pytest.raises(ValueError, match="deterministic policy"):
        load_policy(path, stochastic=True)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PolicyFileError, match="not an archive"):
        load_policy(path)


def test_a_file_that_differs_is_not_written(runs, tmp_path):
    path = tmp_path / "policy.pt2"
    with pytest.raises(ExportError, match="differs from the one of the run"):
        export_policy(runs("diffusion")[0], path, tolerance=-1.0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_policy(tmp_path, runs):
    with pytest.raises(ConfigError, match="no checkpoint"):
        load_policy(tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint or run"):
        load_policy(tmp_path / "absent")
    for name in ("absent.onnx", "absent.pt2"):
        with pytest.raises(FileNotFoundError):
            load_policy(tmp_path / name)
    (tmp_path / "text").write_text("no")
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        load_policy(tmp_path / "text")
    with pytest.raises(ValueError, match=r"must end with"):
        export_policy(runs("diffusion")[0], tmp_path / "policy.bin")


def test_metadata_that_was_changed():
    values = PolicyMetadata(
        (("observation", 3),), ("a0",), (-1.0,), (1.0,), 2, False, None, 1, 1, "gaussian", "", "0"
    )
    texts = values.encode()
    assert PolicyMetadata.decode({**texts, "other": "x"}) == values
    with pytest.raises(PolicyFileError, match="no metadata"):
        PolicyMetadata.decode({})
    with pytest.raises(PolicyFileError, match="has format 2"):
        PolicyMetadata.decode({**texts, "torchrl_trudi.format": "2"})
    with pytest.raises(PolicyFileError, match="was changed"):
        PolicyMetadata.decode({**texts, "torchrl_trudi.low": "[-2.0]"})
    with pytest.raises(PolicyFileError, match=r"lacks \['dt'\]"):
        PolicyMetadata.decode({k: v for k, v in texts.items() if k != "torchrl_trudi.dt"})
    with pytest.raises(PolicyFileError, match="damaged"):
        PolicyMetadata.decode({**texts, "torchrl_trudi.low": "["})
