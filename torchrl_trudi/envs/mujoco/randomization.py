"""Domain randomisation: model fields that differ between environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import mujoco
import numpy as np

from torchrl_trudi.envs._validation import check_choice
from torchrl_trudi.envs.mujoco._generators import RowGenerators

# The kinds of objects that model fields belong to, by prefix.
_OBJECTS = {
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "jnt": mujoco.mjtObj.mjOBJ_JOINT,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "actuator": mujoco.mjtObj.mjOBJ_ACTUATOR,
    "tendon": mujoco.mjtObj.mjOBJ_TENDON,
    "eq": mujoco.mjtObj.mjOBJ_EQUALITY,
}

_COUNTS = {
    "body": "nbody",
    "jnt": "njnt",
    "geom": "ngeom",
    "site": "nsite",
    "actuator": "nu",
    "tendon": "ntendon",
    "eq": "neq",
}


@dataclasses.dataclass(frozen=True)
class ModelRandomization:
    """Draws a field of the model anew for each environment at each of its resets.

    Uniform in ``[low, high)``, from the environment's own random stream after its initial state.
    Constants that MuJoCo derives from a field follow (``mj_setConst``), other fields do not: scaling
    ``body_mass`` leaves ``body_inertia`` as it is.

    Args:
        field (str): a field of ``MjModel`` (``"body_mass"``, ``"geom_friction"``,
            ``"dof_damping"``, ``"actuator_gainprm"``, ...) or ``"opt.<name>"``
            (``"opt.gravity"``).
        low (float): lower bound.
        high (float): upper bound.
        operation (str, optional): what the draw does to the value of the model: ``"scale"``
            multiplies it, ``"add"`` is added to it, ``"set"`` replaces it. Defaults to
            ``"scale"``.
        names (Sequence[str or int], optional): the bodies, geoms, actuators, ... whose values
            change, by name or number; joints, for fields that begin with ``"dof_"``. Defaults to
            ``None``, all.
        columns (Sequence[int], optional): which numbers of each object's values change, for fields
            with several (sliding friction is column 0 of ``geom_friction``). Defaults to
            ``None``, all.
        shared (bool, optional): whether one draw is used for all objects and columns, or each gets
            its own. Defaults to ``False``.

    Raises:
        ValueError: if a bound is not finite, if they are in the wrong order, or if the operation
            is not known.

    Examples:
        >>> from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv
        >>> friction = ModelRandomization("geom_friction", 0.7, 1.3, columns=[0], shared=True)
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=3, seed=0, randomization=[friction])
        >>> env.reset()["randomization", "geom_friction"].shape
        torch.Size([3, 1])
    """

    field: str
    low: float
    high: float
    operation: Literal["scale", "add", "set"] = "scale"
    names: Sequence[str | int] | None = None
    columns: Sequence[int] | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.field, str):
            raise TypeError(f"field must be the name of a field of MjModel, got {self.field!r}.")
        for name in ("low", "high"):
            if isinstance(getattr(self, name), (str, bool)) or not np.isscalar(getattr(self, name)):
                raise TypeError(
                    f"{self.field}: {name} must be a number, got {getattr(self, name)!r}."
                )
        for name in ("names", "columns"):
            given = getattr(self, name)
            if given is not None:
                if isinstance(given, str):
                    raise TypeError(f"{self.field}: {name} must be a sequence, got {given!r}.")
                # A tuple of Python's own types, so that the dataclass can be hashed.
                given = tuple(x.item() if isinstance(x, np.generic) else x for x in given)
                if len(set(given)) < len(given):
                    raise ValueError(f"{self.field}: {name}={list(given)} repeats an entry.")
                object.__setattr__(self, name, given)
        check_choice("operation", self.operation, ["scale", "add", "set"])
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low <= self.high):
            raise ValueError(
                f"{self.field}: low and high must be finite numbers with low <= high, got "
                f"{self.low!r} and {self.high!r}."
            )


class RandomizedField:
    """A :class:`ModelRandomization` applied to a model.

    Args:
        randomization (ModelRandomization): what to draw.
        model (mujoco.MjModel): the model.
        values (numpy.ndarray): the values of the simulations, ``[n, ...]``, to be written to.

    Attributes:
        num_draws (int): numbers drawn for each simulation.

    Raises:
        ValueError: if a name or a column does not exist.
    """

    def __init__(
        self, randomization: ModelRandomization, model: mujoco.MjModel, values: np.ndarray
    ) -> None:
        self.randomization, self._values = randomization, values
        if values.dtype.kind != "f":
            raise ValueError(f"{randomization.field} holds integers; it cannot be randomised.")
        self._nominal = values[0].copy()
        shape = self._nominal.shape
        # Along each dimension of the field, which indices change. The vectors among the options
        # have columns and no objects.
        axes = [np.arange(size) for size in shape]
        if randomization.names is not None:
            axes[0] = np.array(_rows(randomization.field, randomization.names, model), int)
        if randomization.columns is not None:
            columns = np.array(randomization.columns, int)
            has_columns = len(shape) > 1 or (shape and randomization.field.startswith("opt."))
            if not has_columns or not np.isin(columns, axes[-1]).all():
                raise ValueError(
                    f"{randomization.field} has no columns {list(randomization.columns)}: its "
                    f"shape is {shape}."
                )
            axes[-1] = columns
        if not all(map(len, axes)):
            raise ValueError(
                f"there is nothing to randomise of {randomization.field}, of shape {shape}, with "
                f"names={_listed(randomization.names)} and "
                f"columns={_listed(randomization.columns)}."
            )
        self._index: tuple[Any, ...] = (slice(None), *np.ix_(*axes))
        self._shape = self._nominal[self._index[1:]].shape
        self.num_draws = 1 if randomization.shared else int(np.prod(self._shape))

    def sample(self, ids: np.ndarray, rng: RowGenerators) -> np.ndarray:
        """Draws new values.

        Args:
            ids (numpy.ndarray): the simulations.
            rng (RowGenerators): their generators.

        Returns:
            numpy.ndarray: what was drawn, ``[len(ids), num_draws]``: factors, summands or values,
            according to the operation.
        """
        options = self.randomization
        draws = rng.uniform(options.low, options.high, self.num_draws)
        shape = (-1, *(1 for _ in self._shape)) if options.shared else (-1, *self._shape)
        new = np.broadcast_to(draws.reshape(shape), (len(ids), *self._shape))
        nominal = self._nominal[self._index[1:]]
        if options.operation == "scale":
            new = nominal * new
        elif options.operation == "add":
            new = nominal + new
        rows = ids.reshape(-1, *(1 for _ in self._shape))
        self._values[(rows, *self._index[1:])] = new
        return draws


# Model fields that cannot be randomised.
_FIXED_FIELDS = {
    "qpos0": "is what an episode's initial state starts from, and cannot be randomised: draw the "
    "initial positions in the task's initial_state",
    "opt.timestep": "is the same in all environments, as is the time between actions",
    "actuator_ctrlrange": "is the range of the action, which is the same in all environments: scale "
    "actuator_gear or actuator_gainprm",
}


def check_randomization(given: Sequence[ModelRandomization]) -> tuple[ModelRandomization, ...]:
    """Checks what is to be randomised, as far as it can be told without the model.

    Args:
        given (Sequence[ModelRandomization]): the fields.

    Returns:
        tuple of ModelRandomization: the same.

    Raises:
        TypeError: if it is something else.
        ValueError: if a field cannot be randomised, or is named twice.
    """
    if not isinstance(given, Sequence):
        raise TypeError(
            f"randomization must be a sequence of ModelRandomization, such as a list, got {given!r}."
        )
    for entry in given:
        if not isinstance(entry, ModelRandomization):
            raise TypeError(f"randomization must hold ModelRandomization, got {entry!r}.")
    fields = [entry.field for entry in given]
    for field, reason in _FIXED_FIELDS.items():
        if field in fields:
            raise ValueError(f"{field} {reason}.")
    if len(set(fields)) != len(fields):
        raise ValueError(
            f"a field can be randomised once; {fields} names one twice, and the second draw would "
            "overwrite the first."
        )
    return tuple(given)


def _listed(given: Sequence | None) -> list | None:
    return None if given is None else list(given)


def _rows(field: str, names: Sequence[str | int], model: mujoco.MjModel) -> list[int]:
    """The rows of a field that belong to objects."""
    prefix = field.split("_")[0]
    kind = "jnt" if prefix == "dof" else prefix
    if kind not in _OBJECTS or field.startswith("opt."):
        raise ValueError(f"the values of {field} do not belong to objects; leave names=None.")
    known = [
        mujoco.mj_id2name(model, _OBJECTS[kind], i) for i in range(getattr(model, _COUNTS[kind]))
    ]
    rows: list[int] = []
    for name in names:
        if name in known:
            index = known.index(name)
        elif isinstance(name, int) and 0 <= name < len(known):
            index = name
        else:
            raise ValueError(
                f"the model has no {kind} {name!r} for {field}; it has {known} (None: without a "
                "name, to be given by number)."
            )
        rows += np.flatnonzero(model.dof_jntid == index).tolist() if prefix == "dof" else [index]
    return rows
