"""Memory of the learner, from the sizes, and what an operation really allocates.

All formulas give bytes, with numbers of 4 bytes. They count, tensor by tensor, what autograd retains
for the backward pass and what is alive beside it where the sum is largest. ``measured_peak`` is what
they are checked against.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from _learner_parts import Sizes
from torch.multiprocessing.reductions import StorageWeakRef

FLOAT = 4


def rollout_bytes(s: Sizes, bookkeeping: int = 46) -> dict[str, int]:
    """A transition of a rollout as the collector and the value estimator leave it, by key.

    Args:
        s: the sizes.
        bookkeeping: rewards, flags, counters and indices. Defaults to those of ``MujocoBatchEnv``.
    """
    chain = s.num_steps * s.act
    floats = {
        "denoising.chain": chain + s.act,
        "denoising.loc": chain,
        # The same for all states, but the collector's copies have it in full.
        "denoising.scale": chain,
        "action": s.act,
        "observation": s.obs,
        "value_target": 1,
        "next.observation": s.obs,
        "next.action": s.act,
        "next.denoising.log_prob": 1,
        "next.state_action_value": 1,
        "next.critic.embedding": s.width,
    }
    return {**{key: FLOAT * count for key, count in floats.items()}, "bookkeeping": bookkeeping}


def buffer_bytes(s: Sizes, chain_bytes: int = FLOAT) -> dict[str, int]:
    """A transition in the buffer that minibatches are drawn from, by key.

    Args:
        s: the sizes.
        chain_bytes: bytes of a number of the chain, 2 with ``collector.chain_dtype=bfloat16``.
    """
    rollout = rollout_bytes(s)
    chain = ("denoising.chain", "denoising.loc", "denoising.scale")
    others = ("action", "observation", "value_target", "next.critic.embedding")
    return {
        **{key: rollout[key] * chain_bytes // FLOAT for key in chain},
        **{key: rollout[key] for key in others},
        "index": 8,
    }


def estimation_peak(s: Sizes, transitions: int) -> int:
    """Value estimation of a rollout in one call, beside the rollout itself."""
    chain = (4 * s.num_steps + 1) * s.act
    return FLOAT * transitions * (s.obs + max(chain, s.obs + 2 * s.act) + 5 * s.width)


def critic_peak(s: Sizes, batch: int) -> int:
    """Loss of the critic and its backward pass."""
    retained = s.obs + s.act + (12 * (s.critic_layers - 1) + 4) * s.width
    return FLOAT * batch * (retained + max(7 * s.num_bins, 4 * s.width + 2 * s.num_bins))


def first_layer(s: Sizes, step_dim: int = 16) -> int:
    """Weights of the score network's first layer."""
    return (s.act + s.obs + step_dim) * s.width


def parameter_count(s: Sizes) -> int:
    """Parameters of the score network, but for the few of norms and step embedding."""
    hidden = (s.num_layers - 2) * (s.width + 1) * s.width
    return first_layer(s) + s.width + hidden + (s.width + 1) * s.act


def _row(s: Sizes) -> int:
    """What a row of the score network retains: layers, and an output of a multiple of 8 columns."""
    # Input and output of the first activation; per further layer also the input of its norm.
    layers = (2 + 3 * (s.num_layers - 2)) * s.width
    return layers + -(-s.act // 8) * 8 + 2


def _value(s: Sizes) -> int:
    """What the critic's value retains of a state; its weights are fixed, so no layer's input."""
    return (4 * (s.critic_layers - 1) + 1) * s.width + s.num_bins


def actor_graph(
    s: Sizes, batch: int, gate: float, adjoint_steps: int | None = None
) -> tuple[float, float]:
    """What the graph of the actor's loss retains for the backward pass.

    Args:
        s: the sizes.
        batch: states.
        gate: fraction of them inside the trust region.
        adjoint_steps: ``num_adjoint_steps`` of adjoint matching; ``None`` is the pathwise gradient.

    Returns:
        Bytes of the states inside, and of those beyond.
    """
    if adjoint_steps is None:
        latents = (s.num_steps + 1) * s.act
        inside = s.num_steps * (_row(s) + 7 * s.act) + latents + 5 * s.act + s.obs + _value(s)
        beyond = s.num_steps * (_row(s) + 4 * s.act) + latents + s.obs
    else:
        inside = adjoint_steps * (_row(s) + 3 * s.act) + s.obs
        beyond = adjoint_steps * (_row(s) + 6 * s.act) + s.obs
    return FLOAT * batch * gate * inside, FLOAT * batch * (1 - gate) * beyond


def actor_peak(
    s: Sizes,
    batch: int,
    gate: float,
    adjoint_steps: int | None = None,
) -> float:
    """Loss of the actor and its backward pass, beside parameters, gradients and the minibatch.

    The largest of what is alive while the critic values the states inside, while the network scores
    the recorded chain of the states beyond, while the entropy of these is sampled, and, which counts
    in small batches, after the backward pass of the states beyond.

    Args:
        s: the sizes.
        batch: states.
        gate: fraction of them inside the trust region.
        adjoint_steps: ``num_adjoint_steps`` of adjoint matching; ``None`` is the pathwise gradient.
    """
    # Those of the parameters, and two slices' of the first layer's weight, zeros around each. They
    # are there when the part that was recorded last is through the backward pass.
    gradients = FLOAT * (parameter_count(s) + 2 * first_layer(s))
    num_inside, num_beyond = FLOAT * batch * gate, FLOAT * batch * (1 - gate)
    inside, beyond = actor_graph(s, batch, gate, adjoint_steps)
    left = inside if gate < 1 else 0.0
    numbers = 4 * s.num_steps
    noise = (s.num_steps + 1) * s.act
    # Sampling without a graph: two parts of the first layer, their sum, and a layer's two ends.
    sampling = 5 * s.width + 6 * s.num_steps * s.act + s.act + numbers
    held = num_inside * noise
    if adjoint_steps is None:
        backward = 3.5 * s.width + s.num_bins
        critic = max(3 * noise + s.obs + 2 * s.width + numbers, backward)
        scoring = num_beyond * (s.width + noise + s.num_steps * s.act)
        return max(
            inside + num_inside * critic,
            inside + beyond + held + scoring,
            inside + beyond + held + num_beyond * sampling,
            left + gradients,
        )
    chain = (4 * s.num_steps + 2) * s.act + numbers
    target = s.obs + (s.obs + s.act) + _value(s) + 2.5 * s.width + s.num_bins + chain
    # Per row the step's part of the first layer.
    regression = (adjoint_steps + 1) * s.width
    sampling += noise + s.act
    return max(
        num_inside * target,
        inside + num_inside * (regression + chain),
        inside + beyond + held + num_beyond * (regression + chain + noise),
        inside + beyond + held + num_beyond * sampling,
        left + gradients,
    )


def measured_peak(function: Callable[[], object], device: torch.device | None = None) -> int:
    """Largest number of bytes that a call has allocated at once, beyond what was there before it."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Garbage of earlier calls must not be freed within this one.
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    allocations = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda event: event[0],
    )
    total = peak = 0
    for _, size in allocations:
        total += size
        peak = max(peak, total)
    return peak


def retained_by_graph(function: Callable[[], torch.Tensor], existing: set[int]) -> int:
    """Bytes of the storages that the graph of a loss keeps for the backward pass.

    Args:
        function: returns a loss.
        existing: addresses of storages that are not counted.
    """
    found: dict[int, StorageWeakRef] = {}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in existing:
            found[address], sizes[address] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = function()
    # Graphs inside of the call are gone by now.
    kept = sum(sizes[address] for address, ref in found.items() if not ref.expired())
    del loss
    return kept
