"""Distillation of several policies into one, on the student's own chains."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import dispatch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import _reduce

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.chain_model import ChainModel
from torchrl_trudi.modules.denoising import DenoisingModel
from torchrl_trudi.modules.distributions import gaussian_kl
from torchrl_trudi.modules.tensordict_module import ChainActor
from torchrl_trudi.objectives.trajectory_kl import REDUCTIONS, Reduction, check_not_empty

__all__ = ["DenoisingDistillationLoss"]

DistillationMode = Literal["kl", "mean", "action"]
_MODES = ("kl", "mean", "action")


class DenoisingDistillationLoss(LossModule):
    r"""One student that acts as the teacher of each state's task would, learned on the student's own chains.

    With the kernels :math:`F^S_n` of the student and :math:`F^T_n` of the teacher whose task a state has:

    - ``"kl"``: :math:`\sum_n \mathrm{KL}\big(F^S_n(\cdot | x_n) \,\|\, F^T_n(\cdot | x_n)\big)` at the states of a
      chain that the student recorded, in closed form. Its mean over chains of the student as it is, is
      the KL divergence of the path measures, which bounds that of the actions; the dependence of
      the recorded chain on the student carries no gradient. For students that act stochastically.
    - ``"mean"``: :math:`\sum_n \sum_i (\mu^S_{n,i} - \mu^T_{n,i})^2 / (2 (\sigma^T_{n,i})^2)` at the states of the
      student's noise-free chain, which is made anew. For students that act deterministically; the
      scales are not learned.
    - ``"action"``: :math:`\sum_i (a^S_i - a^T_i)^2`, the squared difference of the noise-free actions
      :math:`\tanh(x_N)`, in units of half the action box. The gradient goes through the student's whole
      chain, and nothing asks for the same steps: teachers with 8 steps, a student with 1, 2 or 4,
      or a Gaussian one. It transfers the deterministic policy alone: the student's noise, and what
      a teacher does by chance, are not learned. Where both actions lie at the bound of the box
      it has hardly any gradient.

    Since the chains are the student's, it learns what to do where its own errors take it, which
    states and latents of the teachers would not show (on-policy distillation). ``"kl"`` and ``"mean"`` compare
    kernels at the same :math:`n`, which needs the same number of steps, step sizes and prior.

    All teachers are evaluated at all states, and one is selected: so it works in compiled code and in
    ``torch.vmap``, and costs a forward pass of every teacher.

    Args:
        student (ChainActor): the policy that learns.
        teachers (sequence of ChainActor): the policies that it learns from, by task id. They are copied, and are
            never trained: the copies have buffers in place of parameters.

    Keyword Args:
        mode (str, optional): ``"kl"``, ``"mean"`` or ``"action"``. Defaults to ``"kl"``.
        task_weights (sequence of float, optional): weight of the states of each task. The
            reduction does not divide by it. Defaults to ``None``, 1 for each.
        reduction (str, optional): ``"mean"`` or ``"sum"`` over the states, or ``"none"``: the loss per
            state, ``[*B]``. The diagnostics are means always. Defaults to ``"mean"``.

    Raises:
        NotImplementedError: a recurrent policy.
        ValueError: no teacher; another action size or action box; an unknown choice; negative weights or not
            one for each teacher; except with ``"action"``, another number of steps, step sizes or prior
            of a teacher (step sizes and a prior that the student learns may differ); an empty
            batch; tasks that are neither ids nor one-hot (values are checked on CPU only).
        KeyError: missing entries in the batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import DiffusionActor, ScoreNetwork
        >>> from torchrl_trudi.objectives import DenoisingDistillationLoss
        >>> def make(keys, size):
        ...     network = ScoreNetwork(2, size, hidden_size=16)
        ...     return DiffusionActor(2, score_network=network, in_keys=keys, return_chain=True)
        >>> student = make(["observation", "task"], 5)
        >>> loss = DenoisingDistillationLoss(student, [make(["observation"], 3) for _ in range(2)])
        >>> task = torch.eye(2)[torch.tensor([0, 1, 1, 0])]
        >>> data = TensorDict({"observation": torch.randn(4, 3), "task": task}, [4])
        >>> with torch.no_grad():
        ...     data = student(data)
        >>> loss(data)["loss_distillation"].backward()
    """

    @dataclass
    class _AcceptedKeys:
        """Tensordict keys that can be set with ``set_keys``.

        Attributes:
            chain (NestedKey): chain that the student recorded, read with ``mode="kl"``. Defaults to the
                student's.
            task (NestedKey): the task of each state, which is read if there are several teachers: integer ids
                ``[*B]`` or ``[*B, 1]``, or one-hot of any type ``[*B, T]``. Defaults to ``"task"``.
        """

        chain: NestedKey = ("denoising", "chain")
        task: NestedKey = "task"

    default_keys = _AcceptedKeys
    student_network: ChainActor
    student_network_params: TensorDictParams
    target_student_network_params: TensorDictParams
    task_weights: torch.Tensor
    # Any: a ModuleList's entries are modules of no particular kind to a type checker.
    teachers: Any

    def __init__(
        self,
        student: ChainActor,
        teachers: Sequence[ChainActor],
        *,
        mode: DistillationMode = "kl",
        task_weights: Sequence[float] | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {_MODES}, got {mode!r}.")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        if not len(teachers):
            raise ValueError("At least one teacher is needed.")
        check_feed_forward(student, "student")
        for k, teacher in enumerate(teachers):
            check_feed_forward(teacher, f"teacher {k}")
            _check_box(student.module, teacher.module, k)
            if mode != "action":
                _check_schedule(student.module, teacher.module, k)
        weights = [1.0] * len(teachers) if task_weights is None else list(task_weights)
        if len(weights) != len(teachers) or not all(weight >= 0 for weight in weights):
            raise ValueError(
                f"task_weights must be {len(teachers)} numbers that are not negative, one for each "
                f"teacher, got {weights}."
            )
        super().__init__()
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[NestedKey] | None = None
        self.convert_to_functional(student, "student_network")
        self.teachers = nn.ModuleList(_frozen(teacher) for teacher in teachers)
        self.mode, self.reduction = mode, reduction
        # A setting, not state: a checkpoint must not bring back the one it was made with.
        reference = student.module.low
        self.register_buffer("task_weights", reference.new_tensor(weights), persistent=False)
        self.set_keys(chain=student.tensor_keys.chain)

    # -- keys ------------------------------------------------------------------------

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        # No value estimator here.
        self._in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads."""
        if self._in_keys is not None:
            return self._in_keys
        keys = list(self.student_network.observation_keys)
        for teacher in self.teachers:
            keys += teacher.observation_keys
        if self.mode == "kl":
            keys.append(self.tensor_keys.chain)
        if len(self.teachers) > 1:
            keys.append(self.tensor_keys.task)
        return list(dict.fromkeys(keys))

    @in_keys.setter
    def in_keys(self, values) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output of ``forward``."""
        if self._out_keys is None:
            self._out_keys = ["loss_distillation", "error_per_task", "task_fraction"]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values) -> None:
        self._out_keys = values

    # -- the loss --------------------------------------------------------------------

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch.

        Args:
            tensordict (TensorDictBase): states ``[*B]`` with the observations of student and teachers, the
                task, and with ``mode="kl"`` the chain that the student recorded.

        Returns:
            TensorDict: ``loss_distillation``, and the detached diagnostics ``error_per_task``, the
            unweighted mean over the states of each task (0 where there is none), and
            ``task_fraction``, both ``[T]``.
        """
        check_not_empty(tensordict)
        error, tasks = self._error(tensordict)
        # Indexing: an id for which there is no teacher is an error on every device.
        loss = self.task_weights[tasks] * error
        with torch.no_grad():
            member = torch.stack([tasks == k for k in range(len(self.teachers))]).to(error.dtype)
            rows = tuple(range(1, member.ndim))
            count, sums = member, member * error
            if rows:
                count, sums = member.sum(rows), sums.sum(rows)
        return TensorDict(
            {
                "loss_distillation": _reduce(loss, self.reduction),
                "error_per_task": sums / count.clamp_min(1),
                "task_fraction": count / error.numel(),
            }
        )

    def _error(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """The unweighted loss and the task id of each state, each ``[*B]``."""
        student = self.student_network
        with self.student_network_params.to_module(student, preserve_module_state=False):
            observation, model = student.observation(tensordict), student.module
            if self.mode == "action":
                action = model.deterministic_chain(observation).latents[..., -1, :].tanh()
            else:
                latents = self._latents(tensordict, model, observation)
                loc, scale = model.score(observation, latents)
        tasks = self._tasks(tensordict, observation.shape[:-1])
        if self.mode == "action":
            (goal,) = self._of_teachers(tensordict, tasks, None)
            return (action - goal).square().sum(-1), tasks
        loc_goal, scale_goal = self._of_teachers(tensordict, tasks, latents)
        if self.mode == "mean":
            return gaussian_kl(loc_goal, scale_goal, loc, scale, "simplified").sum(-1), tasks
        return gaussian_kl(loc, scale, loc_goal, scale_goal, "full").sum(-1), tasks

    def _latents(
        self, tensordict: TensorDictBase, model: ChainModel, observation: torch.Tensor
    ) -> torch.Tensor:
        """The student's chain, without gradient, ``[*B, N + 1, A]``."""
        if self.mode == "mean":
            with torch.no_grad():
                return model.deterministic_chain(observation).latents
        key = self.tensor_keys.chain
        latents = tensordict.get(key, None)
        if latents is None:
            raise KeyError(
                f"The student's chain is not in the batch (key {key}): collect with a student built with "
                "return_chain=True, or use mode='mean'."
            )
        return latents.detach()

    @torch.no_grad()
    def _of_teachers(
        self, tensordict: TensorDictBase, tasks: torch.Tensor, latents: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Means and scales at the latents, or the actions, of the teacher of each state."""
        selected: tuple[torch.Tensor, ...] = ()
        for k, teacher in enumerate(self.teachers):
            observation, model = teacher.observation(tensordict), teacher.module
            if latents is None:
                entries: tuple[torch.Tensor, ...] = (
                    model.deterministic_chain(observation).latents[..., -1, :].tanh(),
                )
            else:
                loc, scale = model.score(observation, latents)
                entries = (loc, scale.expand_as(loc))
            if not selected:
                selected = entries
                continue
            # Selected, not multiplied by zero: what a teacher does elsewhere may not be finite.
            own = tasks == k
            selected = tuple(
                torch.where(own.reshape(*own.shape, *[1] * (new.ndim - own.ndim)), new, old)
                for new, old in zip(entries, selected, strict=True)
            )
        return selected

    def _tasks(self, tensordict: TensorDictBase, shape: torch.Size) -> torch.Tensor:
        """The task id of each state, ``[*B]``."""
        count, key = len(self.teachers), self.tensor_keys.task
        if count == 1:
            return torch.zeros(shape, dtype=torch.long, device=self.task_weights.device)
        tasks = tensordict.get(key, None)
        if tasks is None:
            raise KeyError(f"The task is not in the batch (key {key!r}).")
        checked = not (
            tasks.is_cuda or torch.compiler.is_compiling() or is_functorch_wrapped_tensor(tasks)
        )
        if tasks.shape == (*shape, count):
            zero_or_one = (tasks == 0) | (tasks == 1)
            if checked and not (zero_or_one.all() and (tasks.sum(-1) == 1).all()):
                raise ValueError(f"The task {key!r} is not one-hot.")
            return tasks.to(torch.uint8).argmax(-1)
        if tasks.shape == (*shape, 1):
            tasks = tasks.squeeze(-1)
        if tasks.shape != shape or tasks.is_floating_point() or tasks.dtype == torch.bool:
            raise ValueError(
                f"The task {key!r} must be integer ids {tuple(shape)} or {(*shape, 1)}, or one-hot "
                f"{(*shape, count)}, got {tasks.dtype} of shape {tuple(tasks.shape)}."
            )
        if checked and not ((tasks >= 0) & (tasks < count)).all():
            raise ValueError(
                f"The task {key!r} must be in [0, {count - 1}], of which there are teachers, got "
                f"{sorted(set(tasks.reshape(-1).tolist()))}."
            )
        return tasks.long()


def _frozen(teacher: ChainActor) -> ChainActor:
    """A copy that has buffers in place of parameters: nothing can train them."""
    teacher = copy.deepcopy(teacher)
    for module in teacher.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                del module._parameters[name]
                module.register_buffer(name, param.detach())
    return teacher


def _check_box(student: ChainModel, teacher: ChainModel, k: int) -> None:
    if student.action_dim != teacher.action_dim:
        raise ValueError(
            f"Teacher {k} has {teacher.action_dim} action dimensions, the student {student.action_dim}."
        )
    for name in ("low", "high"):
        own, other = getattr(student, name), getattr(teacher, name)
        if not torch.equal(own.cpu().double(), other.cpu().double()):
            raise ValueError(
                f"Teacher {k} has another action box than the student: its {name} is {other.tolist()}, "
                f"the student's {own.tolist()}."
            )


def _check_schedule(student: ChainModel, teacher: ChainModel, k: int) -> None:
    """Whether step n of both is the same step, so that their kernels can be compared."""
    advice = "mode='action' compares the actions alone."
    if student.num_steps != teacher.num_steps:
        raise ValueError(
            f"Teacher {k} has {teacher.num_steps} denoising steps, the student {student.num_steps}: their "
            f"schedules do not agree, and there is no kernel of one for a step of the other; {advice}"
        )
    if isinstance(student, DenoisingModel) != isinstance(teacher, DenoisingModel):
        raise ValueError(
            f"Teacher {k} is a {type(teacher).__name__}, the student a {type(student).__name__}: their "
            f"steps are not the same; {advice}"
        )
    if not (isinstance(student, DenoisingModel) and isinstance(teacher, DenoisingModel)):
        return
    with torch.enable_grad():
        pairs = {
            "step sizes": (student.step_sizes(), teacher.step_sizes()),
            "prior mean": (student.prior()[0], teacher.prior()[0]),
            "prior std": (student.prior()[1], teacher.prior()[1]),
        }
    for name, (own, other) in pairs.items():
        # What the student learns may start elsewhere.
        if own.requires_grad:
            continue
        close = torch.allclose(own.cpu().double(), other.detach().cpu().double(), 1e-4, 1e-6)
        if not close:
            raise ValueError(
                f"The schedules of teacher {k} and the student do not agree: its {name} are "
                f"{other.tolist()}, the student's {own.tolist()}; {advice}"
            )
