"""A loss or gradient that is not finite changes nothing."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from objectives._parts import make_actor, make_batch, make_critic
from tensordict import TensorDict

from torchrl_trudi.objectives import TruDiLoss
from torchrl_trudi.trainers.skips import SkipMonitor
from torchrl_trudi.trainers.update import TruDiUpdate

pytestmark = pytest.mark.faults
ROWS = 12


def make_update(*, fused=True, tells_kernel=False, **kwargs):
    torch.manual_seed(0)
    loss = TruDiLoss(make_actor(dtype=torch.float32), make_critic(dtype=torch.float32))
    settings = {"fused": fused, "weight_decay": 0.1}
    groups = loss.actor_param_groups(lr=1e-2)
    update = TruDiUpdate(
        loss,
        torch.optim.Adam(groups, **settings),
        torch.optim.Adam(loss.critic_parameters(), lr=1e-2, **settings),
        **kwargs,
    )
    # As on a GPU, where nothing may wait for the device.
    update._tells_kernel = tells_kernel
    return update


def make_batches(update, count):
    torch.manual_seed(1)
    batches = []
    for _ in range(count):
        batch = make_batch(update.loss.actor_network, ROWS)
        batch["value_target"] = torch.randn(ROWS, 1)
        batch["next", "critic", "embedding"] = torch.randn(ROWS, 8)
        batches.append(batch)
    return batches


def state(update, name):
    """Copies of all that a step of the critic or the actor could change."""
    optim = getattr(update, f"optim_{name}")
    params = [p.detach().clone() for group in optim.param_groups for p in group["params"]]
    moments = copy.deepcopy(optim.state_dict()["state"])
    return params, moments


def same(before, after) -> bool:
    (params, moments), (other_params, other_moments) = before, after
    return (
        all(torch.equal(a, b) for a, b in zip(params, other_params, strict=True))
        and moments.keys() == other_moments.keys()
        and all(torch.equal(v, other_moments[i][k]) for i in moments for k, v in moments[i].items())
    )


def poison(batch, where, value):
    batch = batch.clone()
    if where == "critic":
        batch["value_target"][3] = value  # a histogram clips an infinite one
    elif where == "actor":
        batch["denoising", "loc"][3] = value
    else:
        batch["observation"][3] = value
    return batch


WAYS = {
    "branch": {},
    "not fused": {"fused": False},
    "kernel": {"tells_kernel": True},
    "not fused on a GPU": {"fused": False, "tells_kernel": True},
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["critic", "actor", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_changes_nothing(way, where, value):
    if where == "critic" and value == torch.inf:
        pytest.skip("an infinite target is clipped to the histogram's range")
    update = make_update(**WAYS[way])
    first, second, third, fourth = make_batches(update, 4)
    torch.manual_seed(2)
    for batch in (first, second):
        metrics = update(batch)
        assert metrics["skipped"] == 0 and metrics["skipped_critic"] == 0
    before = {name: state(update, name) for name in ("actor", "critic")}
    # Else there would be nothing that could change.
    assert all(len(moments) > 4 for _, moments in before.values())
    update.loss.actor_network.check_observation = False
    metrics = update(poison(third, where, value))
    skipped = {"actor": metrics["skipped"].item(), "critic": metrics["skipped_critic"].item()}
    for name in ("actor", "critic"):
        assert skipped[name] == (where in (name, "both"))
        assert same(before[name], state(update, name)) == bool(skipped[name])
    # Nothing of it is left: the next step is that of a run which never saw the batch.
    reference = make_update(**WAYS[way])
    torch.manual_seed(2)
    for batch in (first, second):
        reference(batch)
    if where == "both":
        torch.manual_seed(3)
        ours = update(fourth)
        torch.manual_seed(3)
        theirs = reference(fourth)
        torch.testing.assert_close(ours.to_dict(), theirs.to_dict(), rtol=0, atol=0, equal_nan=True)
        for name in ("actor", "critic"):
            assert same(state(reference, name), state(update, name))
    else:
        metrics = update(fourth)
        assert metrics["skipped"] == 0 and metrics["skipped_critic"] == 0
    assert all(p.isfinite().all() for p in update.loss.parameters())


@pytest.mark.parametrize("way", ["branch", "kernel"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite(way, value):
    """With a finite loss; the temperature is in the actor's optimiser, and left alone too."""
    update = make_update(**WAYS[way])
    first, second = make_batches(update, 2)
    update(first)
    weight = update.loss.actor_network_params["module", "score_network", "output", "weight"]
    handle = weight.register_hook(lambda grad: torch.full_like(grad, value))
    before = state(update, "actor")
    temperature = update.loss.log_temperature.detach().clone()
    metrics = update(second)
    assert metrics["loss_actor"].isfinite() and not metrics["grad_norm"].isfinite()
    assert metrics["skipped"] == 1 and metrics["skipped_critic"] == 0
    assert same(before, state(update, "actor"))
    assert torch.equal(temperature, update.loss.log_temperature)
    handle.remove()
    assert update(second)["skipped"] == 0
    assert not torch.equal(temperature, update.loss.log_temperature)


def test_the_first_step_can_be_the_faulty_one():
    for way in ("branch", "kernel"):
        update = make_update(**WAYS[way])
        (batch,) = make_batches(update, 1)
        params = state(update, "critic")[0]
        assert update(poison(batch, "critic", torch.nan))["skipped_critic"] == 1
        moments = state(update, "critic")[1]
        # A kernel that is told has its state made before; it is that of an optimiser without steps.
        assert all(not v.any() for each in moments.values() for v in each.values())
        assert (len(moments) == 0) == (way == "branch")
        assert all(
            torch.equal(a, b) for a, b in zip(params, state(update, "critic")[0], strict=True)
        )
        assert not hasattr(update.optim_critic, "found_inf")


def test_a_step_of_the_critic_alone():
    update = make_update()
    first, second = make_batches(update, 2)
    assert update.step_critic(first)["skipped_critic"] == 0
    before = state(update, "critic")
    assert update.step_critic(poison(second, "critic", torch.nan))["skipped_critic"] == 1
    assert same(before, state(update, "critic"))


@pytest.mark.slow
def test_compiled():
    """The answer is taken outside of the compiled losses."""
    update = make_update(compile={"backend": "eager"})
    first, second = make_batches(update, 2)
    update(first)
    before = state(update, "critic")
    assert update(poison(second, "critic", torch.nan))["skipped_critic"] == 1
    assert same(before, state(update, "critic"))


# -- counting and reporting --------------------------------------------------------


def metrics(skipped, critic=0.0):
    return TensorDict({"skipped": torch.tensor(skipped), "skipped_critic": torch.tensor(critic)})


def test_streaks_go_on_over_iterations_and_end():
    skips = SkipMonitor(4)
    batch = TensorDict({"x": torch.zeros(2)}, [2])
    for flags, counts, streak in (
        ([1, 0, 1, 1], 3, 2),
        ([1, 0], 1, 0),
        ([1, 1], 2, 2),
        ([], 0, 2),
        ([1], 1, 3),
    ):
        for flag in flags:
            skips.observe(batch, metrics(float(flag)))
        assert skips.end_iteration() == {"skipped": counts, "skipped_critic": 0}
        assert skips.streak == streak and not skips.exceeded
    # Either of the two counts, also where the critic steps alone; and it stays known afterwards.
    skips.observe(batch, metrics(0.0, 1.0).exclude("skipped"))
    skips.observe(batch, metrics(0.0))
    assert skips.end_iteration() == {"skipped": 0, "skipped_critic": 1}
    assert skips.exceeded and skips.streak == 0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SkipMonitor(0)


def test_report(tmp_path):
    skips = SkipMonitor(1)
    bad = TensorDict(
        {
            "observation": torch.tensor([[1.0, torch.nan], [3.0, -torch.inf]]),
            "next": {"embedding": torch.full((2, 1), torch.nan)},
            "index": torch.tensor([4, 6]),
        },
        [2],
    )
    numbers = metrics(1.0).update(
        {"loss": torch.tensor(torch.nan), "kl": torch.tensor([0.5, torch.inf])}
    )
    skips.observe(bad, numbers)
    skips.observe(bad.clone().zero_(), metrics(0.0))  # the last skipped one is reported
    skips.end_iteration()
    path = tmp_path / "skipped_batch.json"
    skips.write_report(path, frames=128)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert report["frames"] == 128 and report["max_consecutive_skips"] == 1
    assert report["skipped_itself"] is True
    assert report["metrics"]["loss"] == "nan" and report["metrics"]["kl"] == [0.5, "inf"]
    assert report["batch"]["observation"] == {
        "shape": [2, 2],
        "not_finite": 2,
        "min": 1.0,
        "max": 3.0,
        "mean": 2.0,
    }
    assert report["batch"]["next/embedding"]["mean"] is None
    assert report["batch"]["index"] == {
        "shape": [2],
        "not_finite": 0,
        "min": 4.0,
        "max": 6.0,
        "mean": 5.0,
    }
