"""The stated memory against what PyTorch allocates."""

from __future__ import annotations

import gc

import _memory
import pytest
import torch
from _learner_parts import Sizes, actor_total, make_batch, make_parts, move_policy, set_gate
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_trudi.envs import ChainCast
from torchrl_trudi.objectives import SoftTDLambdaEstimator
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss

TOLERANCE = 0.1


def make_update(sizes: Sizes, batch: int, gate: float, device=None, **kwargs):
    """The loss, a batch of which the fraction ``gate`` is inside, and a function that descends once."""
    actor, loss = make_parts(sizes, device=device, **kwargs)
    data = make_batch(actor, batch)
    move_policy(loss, data)
    set_gate(loss, data, gate)
    assert loss.actor_loss(data)["gate_fraction"] == gate

    def update():
        actor_total(loss, data).backward()

    update()  # what is allocated once and kept
    loss.zero_grad()
    return loss, data, update


def retained(loss, data) -> int:
    """Bytes that the graph of the actor's loss keeps, beside parameters and the batch."""
    existing = [*loss.parameters(), *loss.buffers(), *data.values(True, True)]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in existing}
    return _memory.retained_by_graph(lambda: actor_total(loss, data), addresses)


@pytest.fixture(scope="module")
def rollout():
    """A rollout as the training script has it, of a small task."""
    config = validate(
        {
            "env": {"name": "Hopper-v5", "num_envs": 2, "num_threads": 1},
            "collector": {"frames_per_batch": 16},
            "policy": {"hidden_size": 32, "num_steps": 3},
            "critic": {"hidden_size": 32},
        }
    )
    env = build_env(config)
    actor = build_actor(config, env)
    loss = build_loss(config, actor, build_critic(config, env))
    collector = Collector(
        env,
        actor,
        frames_per_batch=16,
        total_frames=16,
        auto_register_policy_transforms=False,
    )
    (data,) = list(collector)
    loss.value_estimator(data)
    collector.shutdown()
    return Sizes(obs=11, act=3, width=32, num_steps=3), loss, data


class TestStored:
    @staticmethod
    def allocated(data: TensorDict) -> dict[str, int]:
        """Bytes per transition of every entry's storage."""
        entries = data.flatten_keys(".").items()
        return {key: value.untyped_storage().nbytes() / data.numel() for key, value in entries}

    def test_rollout(self, rollout):
        sizes, _, data = rollout
        found, stated = self.allocated(data), _memory.rollout_bytes(sizes)
        rest = stated.pop("bookkeeping")
        assert {key: found.pop(key) for key in stated} == stated
        assert sum(found.values()) == rest

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_buffer(self, rollout, dtype):
        sizes, loss, data = rollout
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(16),
            transform=None if dtype == torch.float32 else ChainCast(dtype),
            batch_size=16,
        )
        buffer.extend(data.select(*loss.in_keys).reshape(-1))
        found = self.allocated(buffer.storage[:])
        assert found == _memory.buffer_bytes(sizes, dtype.itemsize)


class TestPeaks:
    @pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize(
        ("sizes", "batch"),
        [
            (Sizes(), 256),
            (Sizes(num_steps=2), 512),
            (Sizes(num_steps=16, width=64), 256),
            (Sizes(obs=17, act=6, width=128), 512),
            (Sizes(act=61, num_steps=4), 256),
            (Sizes(obs=17, act=6, num_layers=4), 128),
        ],
        ids=str,
    )
    def test_actor(self, sizes, batch, gate):
        loss, data, update = make_update(sizes, batch, gate)
        graph = sum(_memory.actor_graph(sizes, batch, gate))
        assert graph == pytest.approx(retained(loss, data), rel=TOLERANCE)
        peak = _memory.actor_peak(sizes, batch, gate)
        assert peak == pytest.approx(_memory.measured_peak(update), rel=TOLERANCE)

    @pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("adjoint_steps", [1, 2, 4])
    @pytest.mark.parametrize("sizes", [Sizes(), Sizes(num_steps=4, width=128)], ids=str)
    def test_adjoint(self, sizes, adjoint_steps, gate):
        kwargs = {"actor_gradient": "adjoint", "num_adjoint_steps": adjoint_steps}
        *_, update = make_update(sizes, 512, gate, **kwargs)
        peak = _memory.actor_peak(sizes, 512, gate, adjoint_steps)
        assert peak == pytest.approx(_memory.measured_peak(update), rel=TOLERANCE)

    @pytest.mark.parametrize(
        "sizes", [Sizes(), Sizes(17, 6, 64, num_bins=51, critic_layers=3)], ids=str
    )
    def test_critic(self, sizes):
        actor, loss = make_parts(sizes)
        batch = make_batch(actor, 256)
        peak = _memory.measured_peak(lambda: loss.critic_loss(batch)["loss_critic"].backward())
        assert _memory.critic_peak(sizes, 256) == pytest.approx(peak, rel=TOLERANCE)

    @pytest.mark.parametrize(
        "sizes", [Sizes(), Sizes(num_steps=1), Sizes(17, 6, 64), Sizes(act=61)], ids=str
    )
    def test_estimation(self, sizes):
        actor, loss = make_parts(sizes)
        zeros = torch.zeros(32, 8, 1)
        following = {
            "observation": torch.randn(32, 8, sizes.obs),
            "reward": zeros,
            "done": zeros.bool(),
            "terminated": zeros.bool(),
        }
        data = TensorDict(
            {"observation": torch.randn(32, 8, sizes.obs), "next": following}, [32, 8]
        )
        estimator = SoftTDLambdaEstimator(
            gamma=0.99, lmbda=0.95, value_network=loss.critic_network, actor_network=actor
        )
        peak = _memory.measured_peak(lambda: estimator(data.copy()))
        assert _memory.estimation_peak(sizes, 256) == pytest.approx(peak, rel=TOLERANCE)

    @pytest.mark.gpu
    @pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
    def test_actor_on_a_gpu(self, gate):
        device = torch.device("cuda")
        *_, update = make_update(Sizes(), 4096, gate, device)
        gc.collect()
        peak = _memory.actor_peak(Sizes(), 4096, gate)
        measured = _memory.measured_peak(update, device)
        assert peak == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
def test_the_graph_of_adjoint_matching_does_not_depend_on_the_number_of_steps(gate):
    """The pathwise graph grows by what the network retains in a step, adjoint matching's does not."""
    batch, sizes = 256, {steps: Sizes(20, 4, 64, num_steps=steps) for steps in (4, 16)}
    graphs, peaks = {}, {}
    for name, kwargs in {
        "pathwise": {},
        "adjoint": {"actor_gradient": "adjoint", "num_adjoint_steps": 2},
    }.items():
        for steps, size in sizes.items():
            loss, data, update = make_update(size, batch, gate, **kwargs)
            graphs[name, steps] = retained(loss, data)
            peaks[name, steps] = _memory.measured_peak(update)
    # What is left are the embeddings of the steps, which no state has its own of.
    growth = {name: graphs[name, 16] - graphs[name, 4] for name in ("pathwise", "adjoint")}
    assert growth["pathwise"] > 12 * batch * 4 * 5 * 64
    assert growth["adjoint"] < 0.02 * growth["pathwise"]
    for steps, size in sizes.items():
        stated = sum(_memory.actor_graph(size, batch, gate, 2))
        assert stated == pytest.approx(graphs["adjoint", steps], rel=TOLERANCE)
    # The recorded chain, the noise and their like remain: actions, not layers.
    per_step = (peaks["adjoint", 16] - peaks["adjoint", 4]) / batch / 12
    assert per_step < 4 * (7 * 4 + 4) * 1.1
    assert peaks["pathwise", 16] > 2.5 * peaks["pathwise", 4]


def test_linear_in_the_number_of_steps_at_worst():
    for low, high in ((1, 2), (2, 4), (4, 8), (8, 16)):
        for gate in (0.0, 0.5, 1.0):
            few, many = (
                _memory.actor_peak(Sizes(num_steps=steps), 256, gate) for steps in (low, high)
            )
            assert few < many <= 2 * few


def test_measured_peak():
    def function():
        first = torch.empty(1000)
        del first
        second, third = torch.empty(700), torch.empty(800)
        return second, third

    assert _memory.measured_peak(function) == 4 * 1500
