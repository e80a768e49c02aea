"""Returns and batches next to a step that an environment has marked."""

from __future__ import annotations

import pytest
import torch
from objectives._parts import end, literal_return, make_actor, make_critic, make_rollout
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives.value import GAE

from torchrl_trudi.objectives import (
    SoftTDLambdaEstimator,
    cut_at_quarantined,
    replace_quarantined,
)

pytestmark = pytest.mark.faults
GAMMA, LMBDA, ALPHA = 0.9, 0.8, 0.3
ROW, TIME = 1, 4  # the marked step


def faulty_and_sound():
    """A rollout [3, 8] with a marked step, and the same with that step's predecessor truncated."""
    actor = make_actor()
    data = make_rollout(actor, 3, 8)
    data["next", "quarantined"] = torch.zeros(3, 8, 1, dtype=torch.bool)
    end(data, (0, 2), "terminated")
    end(data, (1, 6), "truncated")
    sound = data.clone()
    end(sound, (ROW, TIME - 1), "truncated")
    end(data, (ROW, TIME), "terminated")
    data["next", "reward"][ROW, TIME] = 0.0
    data["next", "quarantined"][ROW, TIME] = True
    others = torch.ones(3, 8, dtype=torch.bool)
    others[ROW, TIME] = False
    return actor, data, sound.exclude(("next", "quarantined")), others


def estimator(actor, **kwargs):
    critic = make_critic()
    return SoftTDLambdaEstimator(
        gamma=GAMMA,
        lmbda=LMBDA,
        value_network=critic,
        actor_network=actor,
        temperature=ALPHA,
        **kwargs,
    )


@pytest.mark.parametrize("cut_before", [False, True])
def test_soft_returns_do_not_look_at_it(cut_before):
    actor, data, sound, others = faulty_and_sound()
    estimate = estimator(actor)
    torch.manual_seed(0)
    estimate(sound)
    torch.manual_seed(0)
    targets = estimate(cut_at_quarantined(data) if cut_before else data)["value_target"]
    assert torch.equal(targets[others], sound["value_target"][others])
    # And both are the formula, with the step before cut.
    log_volume = actor.module.log_volume()
    for row in range(3):
        following = sound[row]["next"]
        literal = literal_return(
            GAMMA,
            LMBDA,
            ALPHA,
            following["state_action_value"].flatten().tolist(),
            (following["denoising", "log_prob"] + log_volume).flatten().tolist(),
            following["reward"].flatten().tolist(),
            following["terminated"].flatten().tolist(),
            following["truncated"].flatten().tolist(),
        )
        expected = torch.tensor(literal, dtype=torch.float64)
        keep = others[row]
        torch.testing.assert_close(targets[row].flatten()[keep], expected[keep])
    # The flags of the episodes are as they were.
    assert not data["next", "done"][ROW, TIME - 1] and not data["next", "truncated"].all()


def test_reused_actions_stay_the_recorded_ones():
    """The action at the state before the faulty step was drawn in a sound state."""
    actor, data, _, _ = faulty_and_sound()
    estimate = estimator(actor, reuse_actions=True)
    after = estimate(data)["next", "action"]
    assert torch.equal(after[ROW, TIME - 1], data["action"][ROW, TIME])


def test_gae_does_not_look_at_it():
    _, data, sound, others = faulty_and_sound()
    network = ValueOperator(MLP(3, 1, num_cells=[8]), in_keys=["observation"]).double()
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=network)
    gae(sound)
    cut = gae(cut_at_quarantined(data))
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(cut[key][others], sound[key][others], rtol=1e-12, atol=0)
    # Without the cut it does.
    plain = gae(data.clone())
    assert not torch.allclose(plain["advantage"][others], sound["advantage"][others])


def test_the_first_and_the_last_step():
    marks = torch.zeros(2, 3, 1, dtype=torch.bool)
    marks[0, 0] = marks[1, 2] = True
    data = TensorDict({"next": {"done": marks.clone(), "quarantined": marks}}, [2, 3])
    cut = cut_at_quarantined(data)
    assert cut["next", "done"].squeeze(-1).tolist() == [[True, False, False], [False, True, True]]
    assert cut["next", "truncated"].squeeze(-1).tolist() == [[False] * 3, [False, True, False]]
    assert torch.equal(data["next", "done"], marks) and ("next", "truncated") not in data.keys(True)


def test_an_end_before_it_keeps_its_kind():
    flags = torch.tensor([[True], [True]]).unsqueeze(0)
    marks = torch.tensor([[False], [True]]).unsqueeze(0)
    data = TensorDict(
        {"next": {"done": flags, "terminated": flags, "truncated": ~flags, "quarantined": marks}},
        [1, 2],
    )
    cut = cut_at_quarantined(data)["next"]
    assert not cut["truncated"].any() and cut["terminated"].all()


def test_without_marks_everything_is_as_it_was():
    data = TensorDict({"x": torch.arange(3), "next": {"done": torch.zeros(3, 1).bool()}}, [3])
    assert cut_at_quarantined(data) is data and replace_quarantined(data) is data
    data["next", "quarantined"] = torch.zeros(3, 1, dtype=torch.bool)
    state = torch.get_rng_state()
    assert torch.equal(replace_quarantined(data)["x"], data["x"])
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_keep_their_size_and_lose_the_rows():
    size = 24
    marks = torch.zeros(size, 1, dtype=torch.bool)
    marks[[3, 7, 23]] = True
    data = TensorDict({"x": torch.arange(size), "next": {"quarantined": marks}}, [size])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    buffer.extend(replace_quarantined(data))
    for _ in range(2):
        seen = [batch["x"] for batch in buffer]
        assert [len(batch) for batch in seen] == [8, 8, 8]
        counts = torch.cat(seen).bincount(minlength=size)
        assert (counts[marks.flatten()] == 0).all() and (counts[~marks.flatten()] > 0).all()
    assert ("next", "quarantined") not in buffer[:].keys(True)


def test_errors():
    marks = torch.ones(2, 1, dtype=torch.bool)
    data = TensorDict({"next": {"quarantined": marks}}, [2])
    with pytest.raises(ValueError, match="All 2 transitions"):
        replace_quarantined(data)
    with pytest.raises(ValueError, match="one batch dimension"):
        replace_quarantined(TensorDict({"next": {"quarantined": marks.unsqueeze(0)}}, [1, 2]))
