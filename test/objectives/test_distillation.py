"""Distillation: closed forms, tasks, what it refuses, and a student of two teachers."""

from __future__ import annotations

import pytest
import torch
from objectives._parts import (
    ACTION,
    DTYPE,
    STEPS,
    assert_all_close,
    gradients,
    kernel,
    make_actor,
    make_batch,
    make_gaussian,
    mean_step,
    nudge,
)
from tensordict import TensorDict
from torch import nn

from torchrl_trudi.modules import DiffusionActor, ScoreNetwork, StepSizes
from torchrl_trudi.objectives import DenoisingDistillationLoss

pytestmark = pytest.mark.family


def parts(count: int = 2, **kwargs):
    """A student, teachers with frictions of their own, and a batch with a task for each state."""
    torch.manual_seed(0)
    student, teachers = make_actor(), [make_actor() for _ in range(count)]
    for actor in (student, *teachers):
        nudge(actor)
    data = make_batch(student, 2, 6)
    data["task"] = torch.randint(count, (2, 6))
    return DenoisingDistillationLoss(student, teachers, **kwargs), student, teachers, data


def literal(mode, student, teacher, observation, latents) -> torch.Tensor:
    """The sum over steps, written out, for one teacher at all states."""
    total = 0.0
    for n in range(STEPS):
        x = latents[..., n, :]
        mean, (_, std) = mean_step(student.module, observation, x, n), kernel(student.module, n)
        goal, (_, width) = mean_step(teacher.module, observation, x, n), kernel(teacher.module, n)
        if mode == "mean":
            total = total + ((mean - goal) ** 2 / (2 * width**2 + 1e-8)).sum(-1)
        else:
            p, q = (torch.distributions.Normal(*each) for each in ((mean, std), (goal, width)))
            total = total + torch.distributions.kl_divergence(p, q).sum(-1)
    return total


def noise_free(actor, observation) -> torch.Tensor:
    x = torch.zeros(*observation.shape[:-1], ACTION, dtype=DTYPE)
    latents = [x]
    for n in range(actor.num_steps):
        latents.append(mean_step(actor.module, observation, latents[-1], n))
    return torch.stack(latents, -2)


@pytest.mark.parametrize("mode", ["kl", "mean", "action"])
def test_closed_form(mode):
    loss, student, teachers, data = parts(mode=mode, reduction="none", task_weights=[0.5, 2.0])
    observation = data["observation"]
    if mode == "action":
        action = noise_free(student, observation)[..., -1, :].tanh()
        goals = [noise_free(each, observation)[..., -1, :].tanh().detach() for each in teachers]
        each = torch.stack([(action - goal).square().sum(-1) for goal in goals])
    else:
        latents = data["denoising", "chain"]
        if mode == "mean":
            latents = noise_free(student, observation).detach()
        each = torch.stack([literal(mode, student, t, observation, latents) for t in teachers])
    error = torch.where(data["task"] == 0, each[0], each[1])
    expected = torch.where(data["task"] == 0, 0.5, 2.0) * error
    out = loss(data)
    assert_all_close([out["loss_distillation"]], [expected])
    assert_all_close(
        gradients(out["loss_distillation"].sum(), loss.parameters()),
        gradients(expected.sum(), student.parameters()),
    )
    for k in range(2):
        torch.testing.assert_close(out["error_per_task"][k], error[data["task"] == k].mean())
    torch.testing.assert_close(out["task_fraction"].sum(), torch.tensor(1.0, dtype=DTYPE))


@pytest.mark.parametrize("form", ["ids", "column", "int32", "one_hot", "bool", "integer_one_hot"])
def test_forms_of_the_task(form):
    loss, _, _, data = parts(3)
    expected, task = loss(data), data["task"]
    data["task"] = {
        "ids": task,
        "column": task.unsqueeze(-1),
        "int32": task.int(),
        "one_hot": nn.functional.one_hot(task, 3).to(DTYPE),
        "bool": nn.functional.one_hot(task, 3).bool(),
        "integer_one_hot": nn.functional.one_hot(task, 3),
    }[form]
    assert_all_close(loss(data).values(), expected.values())


def test_a_teacher_of_another_task_may_not_be_finite():
    loss, _, _, data = parts()
    data["task"] = torch.zeros(2, 6, dtype=torch.long)
    expected = gradients(loss(data)["loss_distillation"], loss.parameters())
    with torch.no_grad():
        loss.teachers[1].module.friction_raw.fill_(torch.nan)
    out = loss(data)
    assert_all_close(gradients(out["loss_distillation"], loss.parameters()), expected)


def test_one_teacher_needs_no_task():
    loss, _, _, data = parts(1)
    assert "task" not in loss.in_keys
    assert loss(data.exclude("task"))["loss_distillation"].isfinite()


def test_teachers_are_copies_without_parameters():
    loss, _, teachers, data = parts()
    assert all(param.requires_grad for each in teachers for param in each.parameters())
    assert not list(loss.teachers.parameters())
    expected = loss(data)
    for each in teachers:
        nudge(each)
    assert_all_close(loss(data).values(), expected.values())
    before = {key: value.clone() for key, value in loss.teachers.state_dict().items()}
    optim = torch.optim.AdamW(loss.parameters(), lr=0.1, weight_decay=0.1)
    loss(data)["loss_distillation"].backward()
    optim.step()
    loss.reset_parameters_recursive()
    for key, value in loss.teachers.state_dict().items():
        assert torch.equal(value, before[key])


def test_observations_of_their_own():
    """Each policy reads its own entries, and the loss all of them."""
    torch.manual_seed(0)

    def make(keys, size):
        network = ScoreNetwork(ACTION, size, hidden_size=8, output_gain=1.0, dtype=DTYPE)
        return DiffusionActor(
            ACTION, score_network=network, in_keys=keys, return_chain=True, dtype=DTYPE
        )

    student = make(["proprio", "task"], 4)
    loss = DenoisingDistillationLoss(student, [make(["proprio"], 2), make(["goal"], 3)])
    task = nn.functional.one_hot(torch.arange(4) % 2, 2).to(DTYPE)
    data = TensorDict(
        {"proprio": torch.randn(4, 2).to(DTYPE), "goal": torch.randn(4, 3).to(DTYPE), "task": task},
        [4],
    )
    data = student(data).detach()
    assert set(loss.in_keys) == {"proprio", "goal", "task", ("denoising", "chain")}
    assert loss(data.select(*loss.in_keys))["loss_distillation"] > 0


class Pull(nn.Module):
    """The analytic teacher: a control towards a point."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.register_buffer("goal", torch.full((ACTION,), goal, dtype=DTYPE))

    def forward(self, latent, observation, step):
        return 0.5 * (self.goal - latent)


@pytest.mark.parametrize("mode", ["kl", "mean", "action"])
def test_a_student_of_two_teachers(mode):
    torch.manual_seed(0)
    teachers = [
        DiffusionActor(
            ACTION, score_network=Pull(goal), num_steps=STEPS, in_keys=["task"], dtype=DTYPE
        )
        for goal in (-1.0, 1.0)
    ]
    student = DiffusionActor(
        ACTION,
        score_network=ScoreNetwork(ACTION, 2, hidden_size=32, dtype=DTYPE),
        num_steps=1 if mode == "action" else STEPS,
        in_keys=["task"],
        return_chain=True,
        learn_friction=False,
        dtype=DTYPE,
    )
    loss = DenoisingDistillationLoss(student, teachers, mode=mode)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)
    data = TensorDict({"task": torch.eye(2, dtype=DTYPE).repeat(64, 1)}, [128])
    errors = []
    for step in range(300):
        for group in optim.param_groups:
            group["lr"] = 1e-2 * (1 - step / 300)
        if mode == "kl":  # on the chains of the student as it is
            with torch.no_grad():
                data = student(data)
        out = loss(data)
        optim.zero_grad()
        out["loss_distillation"].backward()
        optim.step()
        errors.append((out["error_per_task"] / STEPS).max().item())
    assert errors[0] > 1e-2 and sum(errors[-10:]) / 10 < 1e-3


# -- errors ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["kl", "mean"])
def test_schedules_have_to_agree(mode):
    def sizes(**kwargs):
        return StepSizes(STEPS, dtype=DTYPE, **kwargs)

    student = make_actor()
    with pytest.raises(ValueError, match=f"Teacher 1 has 8 .*the student {STEPS}.*'action'"):
        DenoisingDistillationLoss(student, [make_actor(), make_actor(num_steps=8)], mode=mode)
    linear = make_actor(step_sizes=sizes(schedule="linear"))
    with pytest.raises(ValueError, match=r"teacher 0 .* step sizes .*'action'"):
        DenoisingDistillationLoss(student, [linear], mode=mode)
    with pytest.raises(ValueError, match="prior std"):
        DenoisingDistillationLoss(student, [make_actor(init_std=1.0)], mode=mode)
    with pytest.raises(ValueError, match="GaussianModel"):
        DenoisingDistillationLoss(make_actor(num_steps=1), [make_gaussian()], mode=mode)
    # A student that learns them can get there.
    learner = make_actor(step_sizes=sizes(learn="per_step"))
    DenoisingDistillationLoss(learner, [linear], mode=mode)
    for each in (make_actor(num_steps=1), make_gaussian(), linear):
        DenoisingDistillationLoss(each, [student], mode="action")


def test_errors():
    student = make_actor()
    for match, kwargs in (
        ("mode", {"mode": "ode"}),
        ("reduction", {"reduction": "average"}),
        ("task_weights", {"task_weights": [1.0, 2.0]}),
        ("task_weights", {"task_weights": [-1.0]}),
    ):
        with pytest.raises(ValueError, match=match):
            DenoisingDistillationLoss(student, [make_actor()], **kwargs)
    with pytest.raises(ValueError, match="teacher"):
        DenoisingDistillationLoss(student, [])
    with pytest.raises(ValueError, match="action dimensions"):
        DenoisingDistillationLoss(student, [make_actor(action=3)])
    narrow = make_actor()
    narrow.module.high.fill_(0.5)
    with pytest.raises(ValueError, match="action box"):
        DenoisingDistillationLoss(student, [narrow])


def test_errors_of_a_batch():
    loss, _, _, data = parts(3)
    for match, task in (
        ("one-hot", torch.zeros(2, 6, 3)),
        ("one-hot", torch.full((2, 6, 3), 1 / 3)),
        (r"in \[0, 2\]", torch.full((2, 6), 3)),
        ("float", torch.zeros(2, 6)),
        ("shape", torch.zeros(2, 6, 4)),
    ):
        with pytest.raises(ValueError, match=match):
            loss(data.set("task", task))
    with pytest.raises(KeyError, match="task"):
        loss(data.exclude("task"))
    with pytest.raises(KeyError, match="return_chain"):
        loss(data.exclude(("denoising", "chain")))
    with pytest.raises(ValueError, match="empty"):
        loss(data[:0])
