"""What every loss is tested for, under the names that torchrl's own loss tests have.

A test class of a loss derives from :class:`LossModuleTestBase`, names its ``loss_class``, says how a
loss and a batch are built, and declares its keys. All tests then come from the base class.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from objectives._parts import DTYPE, nudge
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import LossModule
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase
from torchrl.testing import get_default_devices

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


def losses_of(out: TensorDictBase) -> dict[str, torch.Tensor]:
    return {key: value for key, value in out.items() if key.startswith("loss_")}


def total(out: TensorDictBase) -> torch.Tensor:
    return sum(value.sum() for value in losses_of(out).values())


def flat_name(key) -> str:
    """The argument's name in a call without a tensordict."""
    return key if isinstance(key, str) else "_".join(key)


def assert_same(actual, expected, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """The same entries with the same numbers."""
    assert set(actual.keys()) == set(expected.keys()) and len(actual.keys()) > 0
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


class LossModuleTestBase:
    """Tests of a loss module.

    A subclass that is collected (its name starts with ``Test``) must define the ``required`` names.
    """

    loss_class: ClassVar[type[LossModule]]

    #: Keys with the values that they have where nothing is set.
    default_keys: ClassVar[dict[str, Any]]
    #: Those that cannot be changed, because they are another module's.
    fixed_keys: ClassVar[tuple[str, ...]] = ()
    #: What the value estimator is told: the loss's key, the estimator's key.
    estimator_keys: ClassVar[dict[str, str]] = {}
    #: The value estimators that the loss supports, by registered name.
    estimators: ClassVar[tuple[Any, ...]] = ()
    #: Whether ``forward`` draws random numbers.
    draws: ClassVar[bool]
    #: Whether any of the losses has a gradient.
    trains: ClassVar[bool] = True
    #: Whether compilation is quick enough for the quick tests.
    quick_compile: ClassVar[bool] = False
    #: What must be said by each class.
    required: ClassVar[tuple[str, ...]] = (
        "loss_class",
        "default_keys",
        "draws",
        "build_loss",
        "build_data",
        "test_shared_layers",
        # The base class's, which a subclass may not take away.
        "test_reset_parameters_recursive",
        "test_tensordict_keys",
        "test_value_estimator_keys",
        "test_notensordict",
        "test_reduction",
        "test_state_dict",
        "test_batch_layout",
        "test_vmap_over_stacked_parameters",
        "test_compile",
        "test_exploration_type",
    )

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__.startswith("Test"):
            missing = [name for name in cls.required if getattr(cls, name, None) is None]
            missing += [
                name
                for name in ("build_loss", "build_data")
                if getattr(cls, name) is getattr(LossModuleTestBase, name)
            ]
            if missing:
                raise TypeError(f"{cls.__name__} needs {', '.join(missing)}.")
            if not cls.quick_compile and "test_compile" not in vars(cls):
                # A mark belongs to one function: each class gets its own.
                def test_compile(self) -> None:
                    self.compile_test(backend="eager")

                cls.test_compile = pytest.mark.slow(test_compile)

    # -- what a subclass says --------------------------------------------------------

    def build_loss(self, *, dtype: torch.dtype = DTYPE, **kwargs) -> LossModule:
        """A small loss; ``kwargs`` go to its constructor."""
        raise NotImplementedError

    def build_data(self, loss: LossModule, *batch: int) -> TensorDict:
        """A batch for it; the policy has moved a little since it was recorded."""
        raise NotImplementedError

    def evaluate(self, loss: LossModule, data: TensorDictBase) -> TensorDictBase:
        """``forward`` as a function of its arguments alone: random numbers are read from the data."""
        assert not self.draws, "Losses that draw random numbers have to read them from the data."
        return loss(data)

    # -- helpers -----------------------------------------------------------------------

    def seeded(self, loss: LossModule, data: TensorDictBase) -> TensorDictBase:
        """``forward`` with the same random numbers each time."""
        torch.manual_seed(1)
        return loss(data)

    def backward(self, out: TensorDictBase) -> None:
        value = total(out)
        assert value.requires_grad == self.trains
        if self.trains:
            value.backward()

    def networks(self, loss: LossModule) -> Iterator[tuple[str, Any]]:
        """The parameters of the loss's networks, those of target networks included."""
        for module in loss.modules():
            if isinstance(module, LossModule):
                for name, child in module._modules.items():
                    if name.endswith("_params"):
                        yield name, child

    # -- keys ----------------------------------------------------------------------------

    def tensordict_keys_test(self, loss, default_keys) -> None:
        self.tensordict_keys_unknown_key_test(loss)
        self.tensordict_keys_default_values_test(loss, default_keys)
        self.tensordict_set_keys_test(loss, default_keys)

    def tensordict_keys_unknown_key_test(self, loss) -> None:
        with pytest.raises(ValueError, match="no_such_key"):
            copy.deepcopy(loss).set_keys(no_such_key="name")

    def tensordict_keys_default_values_test(self, loss, default_keys) -> None:
        accepted = set(type(loss)._AcceptedKeys.__dataclass_fields__)
        assert accepted == set(default_keys)
        for role, name in default_keys.items():
            assert getattr(loss.tensor_keys, role) == name, role

    def tensordict_set_keys_test(self, loss, default_keys) -> None:
        free = [role for role in default_keys if role not in self.fixed_keys]
        each = copy.deepcopy(loss)
        for role in free:
            each.set_keys(**{role: f"my_{role}"})
            assert getattr(each.tensor_keys, role) == f"my_{role}"
        for role in free:
            # None is the way back to the class's default.
            each.set_keys(**{role: None})
            assert getattr(each.tensor_keys, role) == getattr(each.default_keys(), role)
        together = copy.deepcopy(loss)
        together.set_keys(**{role: f"my_{role}" for role in free})
        for role in default_keys:
            expected = default_keys[role] if role in self.fixed_keys else f"my_{role}"
            assert getattr(together.tensor_keys, role) == expected
        for role in self.fixed_keys:
            with pytest.raises(ValueError, match=role):
                copy.deepcopy(loss).set_keys(**{role: "elsewhere"})

    def test_tensordict_keys(self) -> None:
        self.tensordict_keys_test(self.build_loss(), self.default_keys)

    def test_renamed_entries_are_read(self) -> None:
        """The entries that a key names are those that are read, and no others."""
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        expected = self.seeded(loss, data)
        renamed = copy.deepcopy(loss)
        moved = data.clone()
        found = 0
        for role, name in self.default_keys.items():
            if role in self.fixed_keys or data.get(name, None) is None:
                continue
            if name not in loss.in_keys:
                continue
            new = ("elsewhere", role)
            renamed.set_keys(**{role: new})
            moved.set(new, data.get(name))
            moved.del_(name)
            assert new in renamed.in_keys and name not in renamed.in_keys
            found += 1
        assert found or not any(name in loss.in_keys for name in self.default_keys.values())
        assert_same(self.seeded(renamed, moved), expected)

    def set_advantage_keys_through_loss_test(self, loss, value_type, mapping) -> None:
        """Keys of the estimator follow those of the loss, set before or after it is built."""
        for before in (True, False):
            each = copy.deepcopy(loss)
            names = {role: f"my_{role}" for role in mapping}
            if before:
                each.set_keys(**names)
            each.make_value_estimator(value_type)
            if not before:
                each.set_keys(**names)
            for role, estimator_role in mapping.items():
                actual = getattr(each.value_estimator.tensor_keys, estimator_role)
                assert actual == names[role], (role, before)

    def test_value_estimator_keys(self) -> None:
        loss = self.build_loss()
        for value_type in self.estimators:
            self.set_advantage_keys_through_loss_test(loss, value_type, self.estimator_keys)
        if not self.estimators:
            assert not self.estimator_keys

    @pytest.mark.parametrize("value_type", [*ValueEstimators, "soft_td_lambda"], ids=str)
    def test_every_value_estimator(self, value_type) -> None:
        """It is built, or it is said that the loss does not have it."""
        loss = self.build_loss()
        if value_type in self.estimators:
            loss.make_value_estimator(value_type)
            assert isinstance(loss.value_estimator, ValueEstimatorBase)
        else:
            with pytest.raises(NotImplementedError):
                loss.make_value_estimator(value_type)

    # -- parameters ------------------------------------------------------------------------

    def reset_parameters_recursive_test(self, loss) -> None:
        """Every network's parameters return to where a new network's are."""
        networks = list(self.networks(loss))
        trained = {
            (name, key)
            for name, params in networks
            for key, value in params.items(True, True)
            if isinstance(value, nn.Parameter)
        }
        # Of a target network those that are trained in the network itself.
        entries = {
            (name, key): value.data
            for name, params in networks
            for key, value in params.items(True, True)
            if (name.removeprefix("target_"), key) in trained
        }
        assert entries
        for value in entries.values():
            value += 1000
        loss.reset_parameters_recursive()
        for where, value in entries.items():
            assert (value.abs() < 100).all(), where

    def test_reset_parameters_recursive(self) -> None:
        self.reset_parameters_recursive_test(self.build_loss())

    def test_state_dict(self) -> None:
        loss, other = self.build_loss(), self.build_loss()
        data = self.build_data(loss, 4)
        nudge(loss)
        expected = self.seeded(loss, data)
        state = loss.state_dict()
        assert not other.load_state_dict(state, strict=True).missing_keys
        assert_same(self.seeded(other, data), expected)
        # Nothing more and nothing less; for the networks' own entries see test_losses.
        for key in state:
            if "_params." not in key:
                with pytest.raises(RuntimeError, match="Missing key"):
                    other.load_state_dict({k: v for k, v in state.items() if k != key})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            other.load_state_dict({**state, "no_such_entry": torch.zeros(1)})

    @pytest.mark.parametrize("copied", COPIES)
    def test_copies(self, copied) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        expected = self.seeded(loss, data)
        other = COPIES[copied](loss)
        assert_same(self.seeded(other, data), expected)
        self.backward(self.seeded(other, data))
        nudge(other)
        assert_same(self.seeded(loss, data), expected)
        assert all(param.grad is None for param in loss.parameters())

    def test_to_dtype(self) -> None:
        loss = self.build_loss(dtype=torch.float32).to(DTYPE)
        floating = [value for value in loss.state_dict().values() if value.is_floating_point()]
        assert {value.dtype for value in floating} == {DTYPE}
        out = self.seeded(loss, self.build_data(loss, 4))
        assert {value.dtype for value in out.values()} == {DTYPE}
        self.backward(out)

    def test_functional(self) -> None:
        """The parameters are the loss's own entries; where there is a choice, it is honoured."""
        if "functional" not in inspect.signature(self.loss_class.__init__).parameters:
            assert self.build_loss().functional
            with pytest.raises(TypeError, match="functional"):
                self.build_loss(functional=False)
            return
        loss = self.build_loss(functional=False)
        assert not loss.functional
        self.backward(self.seeded(loss, self.build_data(loss, 4)))
        assert any(param.grad is not None for param in loss.parameters())

    def test_target_parameters_are_not_trained(self) -> None:
        loss = self.build_loss()
        for name, params in self.networks(loss):
            if name.startswith("target_"):
                assert not any(value.requires_grad for value in params.values(True, True))
        self.backward(self.seeded(loss, self.build_data(loss, 4)))
        for name, params in self.networks(loss):
            for value in params.values(True, True):
                assert not (name.startswith("target_") and value.grad is not None)

    # -- calls ---------------------------------------------------------------------------------

    def test_notensordict(self) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        expected = self.seeded(loss, data)
        entries = {flat_name(key): data.get(key) for key in loss.in_keys}
        torch.manual_seed(1)
        out = loss(**entries)
        assert set(losses_of(expected)) <= set(loss.out_keys)
        for key, value in zip(loss.out_keys, out, strict=True):
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)
        # Fewer outputs, in another order, and one alone.
        selected = list(losses_of(expected))[::-1][:2]
        for count in range(len(selected), 0, -1):
            each = copy.deepcopy(loss)
            each.select_out_keys(*selected[:count])
            torch.manual_seed(1)
            found = each(**entries)
            assert count == 1 or isinstance(found, tuple)
            for value, key in zip(found if count > 1 else [found], selected[:count], strict=True):
                torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)
            with pytest.raises(Exception, match="no_such_key"):
                each.select_out_keys("no_such_key")

    def test_input_is_not_changed(self) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        before = data.clone()
        self.backward(self.seeded(loss, data))
        assert set(data.keys(True, True)) == set(before.keys(True, True))
        for key, value in before.items(True, True):
            assert torch.equal(data.get(key), value), key

    def test_exploration_type(self) -> None:
        """A loss has its own way to draw, whatever the exploration around it."""
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        expected = self.seeded(loss, data)
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            with set_exploration_type(kind):
                assert_same(self.seeded(loss, data), expected)

    # -- reductions ------------------------------------------------------------------------

    def test_reduction(self) -> None:
        outs = {}
        for reduction in (None, "mean", "sum", "none"):
            torch.manual_seed(0)
            kwargs = {} if reduction is None else {"reduction": reduction}
            loss = self.build_loss(**kwargs)
            data = self.build_data(loss, 2, 3)
            outs[reduction] = self.seeded(loss, data)
        assert_same(outs[None], outs["mean"])
        for key, rows in losses_of(outs["none"]).items():
            assert rows.shape[:2] == (2, 3), key
            assert outs["mean"][key].shape == outs["sum"][key].shape == ()
            torch.testing.assert_close(rows.mean(), outs["mean"][key], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(rows.sum(), outs["sum"][key], rtol=1e-9, atol=1e-11)
        for key, value in outs["mean"].items():
            if not key.startswith("loss_"):
                for other in ("sum", "none"):
                    torch.testing.assert_close(outs[other][key], value)

    def test_reduction_rows_are_those_of_the_input(self) -> None:
        """The loss of each row, in its place, is that of the row alone."""
        loss = self.build_loss(reduction="none")
        data = self.build_data(loss, 5)
        rows = losses_of(self.evaluate(loss, data))
        for i in range(5):
            alone = losses_of(self.evaluate(loss, data[i : i + 1]))
            for key, value in alone.items():
                torch.testing.assert_close(rows[key][i : i + 1], value, rtol=1e-9, atol=1e-11)
        assert not self.trains or any(len(value.unique()) > 2 for value in rows.values())

    def test_unknown_reduction(self) -> None:
        with pytest.raises((ValueError, NotImplementedError), match="average"):
            loss = self.build_loss(reduction="average")
            loss(self.build_data(loss, 4))

    # -- batches ---------------------------------------------------------------------------

    def layouts(self, data: TensorDict) -> Iterator[tuple[str, TensorDictBase]]:
        """The rows ``[12]`` of ``data`` in other layouts, in the same order."""
        yield "time", data.reshape(3, 4)
        yield "nested", data.reshape(2, 6, 1)
        yield "none", data[0]
        strided = data.reshape(4, 3).apply(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
        assert not all(value.is_contiguous() for value in strided.values(True, True))
        yield "strided", strided
        yield "lazy", lazy_stack([data[i] for i in range(12)])
        yield "lazy in time", lazy_stack(list(data.reshape(3, 4).unbind(1)), 1)
        named = data.reshape(3, 4)
        named.names = ["env", "time"]
        yield "named", named
        with tempfile.TemporaryDirectory() as folder:
            yield "memmap", data.clone().memmap(folder)

    def test_batch_layout(self) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 12)
        expected = self.evaluate(loss, data)
        assert all(value.shape == () for value in losses_of(expected).values())
        for layout, other in self.layouts(data):
            out = self.evaluate(loss, other)
            if layout == "none":
                assert_same(losses_of(out), losses_of(self.evaluate(loss, data[:1])))
                continue
            try:
                assert_same(losses_of(out), losses_of(expected))
            except AssertionError as error:
                raise AssertionError(f"{layout}: {error}") from None
        per_row = self.build_loss(reduction="none")
        for shape in ((3, 4), (2, 6, 1)):
            for value in losses_of(self.evaluate(per_row, data.reshape(shape))).values():
                assert value.shape[: len(shape)] == shape

    @pytest.mark.parametrize("batch", [(0,), (0, 3)], ids=str)
    def test_empty_batch(self, batch) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 3)[:0]
        if len(batch) > 1:
            data = data.unsqueeze(-1).expand(0, 3)
        with pytest.raises(ValueError, match="empty"):
            loss(data)

    @pytest.mark.parametrize("device", get_default_devices(), ids=str)
    def test_devices(self, device) -> None:
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        expected = self.evaluate(loss, data)
        out = self.evaluate(loss.to(device), data.to(device))
        assert {value.device.type for value in out.values()} == {device.type}
        assert_same(out.to("cpu"), expected)
        self.backward(out)

    # -- transforms ------------------------------------------------------------------------

    def stacked(self, loss, count: int = 3) -> TensorDictBase:
        """Parameters and buffers of losses that differ in all parameters."""
        params = TensorDict.from_module(loss)
        trained = {name for name, _ in loss.named_parameters()}

        def moved(name, value):
            name = name if isinstance(name, str) else ".".join(name)
            return value + 0.02 * torch.randn_like(value) if name in trained else value.clone()

        each = [params.data.named_apply(moved, nested_keys=True) for _ in range(count)]
        return torch.stack(each)

    def test_vmap_over_stacked_parameters(self) -> None:
        loss = self.build_loss(reduction="none")
        data = self.build_data(loss, 4)
        params = self.stacked(loss)

        def call(params):
            with params.to_module(loss):
                return self.evaluate(loss, data)

        out = torch.vmap(call, randomness="error")(params)
        each = [call(params[k]) for k in range(3)]
        assert_same(out, torch.stack(each))
        moved = [key for key, value in losses_of(out).items() if len(value.unique()) > 1]
        assert moved or not self.trains

        if not self.trains:
            return
        gradient = torch.func.grad(lambda flat: total(call(TensorDict(flat))))
        flat = dict(params.items(True, True))
        slopes = torch.vmap(gradient)(flat)
        for k in range(3):
            for key, value in gradient({key: value[k] for key, value in flat.items()}).items():
                torch.testing.assert_close(slopes[key][k], value, rtol=1e-8, atol=1e-10)

    def test_vmap_randomness(self) -> None:
        """Each member draws its own numbers, if it is told to."""
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        params = torch.stack([TensorDict.from_module(loss).data] * 3)

        def call(params):
            with params.to_module(loss):
                return total(loss(data))

        if not self.draws:
            assert len(torch.vmap(call, randomness="error")(params).unique()) == 1
            return
        assert len(torch.vmap(call, randomness="different")(params).unique()) == 3
        same = torch.vmap(call, randomness="same")(params)
        torch.testing.assert_close(same, same[:1].expand(3))

    def compile_test(self, **kwargs) -> None:
        torch._dynamo.reset()
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        params = [param for param in loss.parameters() if param.requires_grad]
        compiled = torch.compile(loss, fullgraph=True, **kwargs)
        outs = [self.seeded(loss, data), self.seeded(compiled, data)]
        assert_same(outs[1], outs[0], rtol=1e-7, atol=1e-9)
        slopes = [torch.autograd.grad(total(out), params, allow_unused=True) for out in outs]
        for eager, other in zip(*slopes, strict=True):
            # One form leaves a parameter out where the other has a zero.
            eager, other = (torch.zeros(()) if slope is None else slope for slope in (eager, other))
            torch.testing.assert_close(
                other.expand_as(eager) if other.ndim == 0 else other,
                eager.expand_as(other) if eager.ndim == 0 else eager,
                rtol=1e-6,
                atol=1e-8,
                check_dtype=False,
            )

    def test_compile(self) -> None:
        """In one graph, with the numbers and the gradients of the eager form."""
        self.compile_test(backend="eager")

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_compile_slow(self, backend) -> None:
        # Inductor draws random numbers of its own unless it is told not to.
        options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
        self.compile_test(backend=backend, **options)
