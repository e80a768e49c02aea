"""The step of a minibatch, and its compiled, autocast and captured forms."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from objectives._parts import make_actor, make_batch, make_critic, make_gaussian, nudge
from torch import nn

from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss
from torchrl_trudi.trainers.update import TruDiUpdate

ROWS = 12


def make_loss(dtype=torch.float32, device=None, make=make_actor, **kwargs) -> TruDiLoss:
    torch.manual_seed(0)
    actor = make(dtype=dtype)
    region = TrajectoryKLProjection(actor, eps=0.003)
    return TruDiLoss(actor, make_critic(dtype=dtype), trajectory_kl=region, **kwargs).to(device)


def make_update(
    loss: TruDiLoss,
    *,
    capturable: bool = False,
    fused: bool | None = None,
    lr: float = 3e-3,
    **kwargs,
) -> TruDiUpdate:
    # What a CUDA graph needs.
    fused = capturable if fused is None else fused
    groups = loss.actor_param_groups(lr=lr)
    return TruDiUpdate(
        loss,
        torch.optim.Adam(groups, capturable=capturable, fused=fused),
        torch.optim.Adam(loss.critic_parameters(), lr=lr, capturable=capturable, fused=fused),
        **kwargs,
    )


def make_batches(loss: TruDiLoss, count: int) -> list:
    """Batches that the policy recorded a little earlier, half of them outside the bound."""
    torch.manual_seed(1)
    actor = copy.deepcopy(loss.actor_network)
    nudge(actor, 0.03)
    batches = []
    device = next(loss.actor_parameters()).device
    for _ in range(count):
        batch = make_batch(actor.cpu(), ROWS)
        batch["value_target"] = torch.randn(ROWS, 1).to(batch["observation"])
        batch["next", "critic", "embedding"] = torch.randn(ROWS, 8).to(batch["observation"])
        batches.append(batch.to(device))
    return batches


def run(update: TruDiUpdate, batches) -> tuple[list, list]:
    """The metrics of every step and the parameters at the end."""
    torch.manual_seed(2)
    metrics = [update(batch) for batch in batches]
    return metrics, [p.detach().clone() for p in update.loss.parameters()]


def assert_equal_runs(first, second, **tolerance) -> None:
    for ours, theirs in zip(first[0], second[0], strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, **tolerance)
    torch.testing.assert_close(first[1], second[1], **tolerance)


def test_is_the_published_order():
    """The critic's step first, and the actor's loss on the stepped critic."""
    loss = make_loss()
    batches = make_batches(loss, 3)
    ours = run(make_update(loss, max_grad_norm=0.1), batches)

    loss = make_loss()
    optims = make_update(loss)
    torch.manual_seed(2)
    for batch, metrics in zip(batches, ours[0], strict=True):
        for name, optim in (("critic", optims.optim_critic), ("actor", optims.optim_actor)):
            out = getattr(loss, f"{name}_loss")(batch)
            optim.zero_grad()
            sum(value for key, value in out.items() if key.startswith("loss_")).backward()
            params = [p for group in optim.param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(params, 0.1)
            optim.step()
            key = "grad_norm" if name == "actor" else "grad_norm_critic"
            torch.testing.assert_close(metrics[key], norm)
            assert not any(value.requires_grad for value in metrics.values())
    assert any(0 < metrics["gate_fraction"] < 1 for metrics in ours[0])
    torch.testing.assert_close(ours[1], [p.detach() for p in loss.parameters()])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient", ["pathwise", pytest.param("adjoint", marks=pytest.mark.slow)])
def test_compiled_equals_eager_over_20_updates(backend, gradient):
    loss = make_loss(actor_gradient=gradient)
    batches = make_batches(loss, 20)
    keys = list(loss.state_dict())
    eager = run(make_update(loss), batches)
    # The generated code draws other random numbers unless it is told to draw the eager ones.
    options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
    update = make_update(
        make_loss(actor_gradient=gradient), compile={"backend": backend, **options}
    )
    compiled = run(update, batches)
    assert update.warmup_seconds > 0
    assert list(update.loss.state_dict()) == keys
    assert_equal_runs(compiled, eager, rtol=1e-4, atol=1e-6)


def test_falls_back_with_one_warning(caplog):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    loss = make_loss()
    batches = make_batches(loss, 3)
    eager = run(make_update(loss), batches)
    update = make_update(make_loss(), compile={"backend": broken})
    with caplog.at_level(logging.WARNING):
        fallen = run(update, batches)
    messages = [record.getMessage() for record in caplog.records]
    messages = [text for text in messages if "evaluated eagerly" in text]
    assert len(messages) == 2  # one for each of the two losses
    assert all("could not be compiled" in text for text in messages)
    assert_equal_runs(fallen, eager)


def test_what_fails_without_compilation_too_is_raised():
    loss = make_loss()
    (batch,) = make_batches(loss, 1)
    with pytest.raises(KeyError, match="value_target"):
        make_update(loss, compile={"backend": "eager"})(batch.exclude("value_target"))


def test_autocast():
    """The networks alone compute in the short type."""
    loss = make_loss()
    (batch,) = make_batches(loss, 1)
    seen = set()
    network = loss.actor_network.module.score_network
    network.hidden.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    plain = run(make_update(make_loss()), [batch])
    short = run(make_update(loss, autocast_dtype=torch.bfloat16), [batch])
    assert seen == {torch.bfloat16}
    for key, value in short[0][0].items():
        assert value.dtype == torch.float32, key
    assert all(p.dtype == torch.float32 for p in short[1])
    for key in ("value_cross_entropy", "entropy", "loss_critic"):
        torch.testing.assert_close(short[0][0][key], plain[0][0][key], rtol=0.02, atol=0.02)
        assert not torch.equal(short[0][0][key], plain[0][0][key])


def test_gaussian_policy(caplog):
    """It compiles in one graph, and under autocast its kernel stays in the type of the parameters."""
    loss = make_loss(make=make_gaussian)
    batches = make_batches(loss, 5)
    eager = run(make_update(loss), batches)
    update = make_update(make_loss(make=make_gaussian), compile={"backend": "aot_eager"})
    compiled = run(update, batches)
    assert update.warmup_seconds > 0 and "could not be compiled" not in caplog.text
    assert_equal_runs(compiled, eager, rtol=1e-4, atol=1e-6)

    loss = make_loss(make=make_gaussian)
    seen = set()
    network = loss.actor_network.module.network
    network.hidden.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    (short,), params = run(make_update(loss, autocast_dtype=torch.bfloat16), batches[:1])
    assert seen == {torch.bfloat16}
    assert {value.dtype for value in (*short.values(), *params)} == {torch.float32}
    for key in ("entropy", "loss_critic"):
        torch.testing.assert_close(short[key], eager[0][0][key], rtol=0.02, atol=0.02)


def test_autocast_gradients_and_kl():
    """Of the gate's pass without a graph and the passes with one, in one context."""
    grads = []
    for dtype in (None, torch.bfloat16):
        loss = make_loss()
        update = make_update(loss, autocast_dtype=dtype, max_grad_norm=1e9)
        batches = make_batches(loss, 1)
        metrics = run(update, batches)[0][0]
        assert 0 < metrics["gate_fraction"] < 1
        grads.append([p.grad for p in loss.actor_network_params.values(True, True)])
    pairs = [pair for pair in zip(*grads, strict=True) if pair[0] is not None]
    assert len(pairs) > 8
    for exact, short in pairs:
        assert (exact - short).norm() < 0.1 * exact.norm() + 1e-4
    # Rounding alone, of a policy that has not moved.
    loss = make_loss()
    batch = make_batch(loss.actor_network, ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        kl = loss.trajectory_kl.path_kl(batch).kl
    assert 0 < kl.max() < 1e-3


def test_mask_reaches_the_critic():
    loss = make_loss()
    (batch,) = make_batches(loss, 1)
    batch["mask"] = torch.zeros(ROWS, 1)
    assert make_update(loss)(batch)["loss_critic"] == 0


def test_optimisers_of_other_parameters():
    loss, other = make_loss(), make_loss()
    actor = torch.optim.Adam(loss.actor_param_groups(lr=1e-3))
    critic = torch.optim.Adam(loss.critic_parameters())
    for pair, name in (
        ((critic, actor), "actor"),
        ((actor, torch.optim.Adam(other.critic_parameters())), "critic"),
    ):
        with pytest.raises(ValueError, match=f"optim_{name} holds parameters that are not those"):
            TruDiUpdate(loss, *pair)


@pytest.mark.parametrize(
    "key, advice",
    [
        (("next", "critic", "embedding"), "run loss.value_estimator"),
        (("denoising", "chain"), "return_chain=True"),
    ],
)
def test_missing_entries_are_named_with_advice(key, advice):
    loss = make_loss()
    (batch,) = make_batches(loss, 1)
    with pytest.raises(KeyError, match=advice):
        make_update(loss)(batch.exclude(key))


def test_compile_is_a_bool_or_its_arguments():
    with pytest.raises(TypeError, match="bool or a dict of arguments, got None"):
        make_update(make_loss(), compile=None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"autocast_dtype": torch.float16}, "must be torch.bfloat16 or None, got torch.float16"),
        ({"max_grad_norm": 0.0}, "must be positive, got 0.0"),
        ({"max_grad_norm": float("nan")}, "must be positive, got nan"),
        ({"cudagraphs": True}, "need a policy on a CUDA device, it is on cpu"),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_update(make_loss(), **kwargs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestCudaGraphs:
    def test_equals_eager(self):
        # No noise: the two draw in another order.
        kwargs = {"device": "cuda", "split_by_gate": False}
        loss = make_loss(**kwargs)
        batches = make_batches(loss, 20)
        for part in (loss, other := make_loss(**kwargs)):
            part.actor_network.module.draw_noise = lambda shape, generator=None: torch.zeros(
                *shape, 4, 2, device="cuda"
            )
        eager = run(make_update(loss), batches)
        captured = run(make_update(other, capturable=True, cudagraphs=True), batches)
        assert_equal_runs(captured, eager, rtol=1e-4, atol=1e-6)

    def test_noise_is_fresh(self):
        loss = make_loss(device="cuda")
        update = make_update(loss, capturable=True, cudagraphs=True, lr=0.0)
        (batch,) = make_batches(loss, 1)
        entropy = torch.stack([update(batch)["entropy"] for _ in range(40)])
        assert len(entropy[5:].unique()) == 35

    def test_learning_rates_are_part_of_the_graph(self):
        loss = make_loss(device="cuda")
        update = make_update(loss, capturable=True, cudagraphs=True)
        (batch,) = make_batches(loss, 1)
        update(batch)
        update.optim_actor.param_groups[0]["lr"] = 0.0
        with pytest.raises(RuntimeError, match="learning rate has changed"):
            update(batch)

    def test_optimisers_must_be_capturable(self):
        with pytest.raises(ValueError, match="capturable=True, got Adam without"):
            make_update(make_loss(device="cuda"), cudagraphs=True)
        with pytest.raises(ValueError, match="fused=True, got Adam without"):
            make_update(make_loss(device="cuda"), capturable=True, fused=False, cudagraphs=True)
