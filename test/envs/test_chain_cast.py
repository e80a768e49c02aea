"""Chains stored in a short type, and what that changes."""

from __future__ import annotations

import copy

import pytest
import torch
from objectives._parts import make_actor, make_batch, nudge
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

from torchrl_trudi.envs import ChainCast
from torchrl_trudi.objectives import TrajectoryKLProjection

ROWS = 256
SHORT = [torch.bfloat16, torch.float16]


def stored_and_sampled(data, transform):
    """What lies in the buffer, and a sample of all rows in their order."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=transform,
        batch_size=ROWS,
    )
    buffer.extend(data)
    return buffer.storage[:], buffer.sample()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_half_the_memory_and_the_same_types_again(dtype):
    data = make_batch(make_actor(dtype=torch.float32), ROWS)
    before = data.clone()
    stored, sampled = stored_and_sampled(data, ChainCast(dtype))
    for key in ("chain", "loc", "scale"):
        assert stored["denoising", key].dtype == dtype
        assert sampled["denoising", key].dtype == torch.float32
        torch.testing.assert_close(
            sampled["denoising", key], before["denoising", key], rtol=1e-2, atol=1e-2
        )
    # The caller's data are left as they were.
    assert (data == before).all()


@pytest.mark.parametrize("kind", ["simplified", "full"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 1e-4), (torch.float16, 1e-5)])
def test_path_kl_of_a_stored_chain(dtype, error, kind):
    """Rounding the increments costs far less than rounding the means does."""
    torch.manual_seed(0)
    actor = make_actor(dtype=torch.float32, action=17, obs=3, num_steps=8)
    data = make_batch(actor, ROWS)
    nudge(actor, 0.02)
    region = TrajectoryKLProjection(actor, kl=kind)
    exact = region.path_kl(data).kl
    _, sampled = stored_and_sampled(data, ChainCast(dtype))
    naive = data.clone()
    for key in ("chain", "loc", "scale"):
        naive["denoising", key] = data["denoising", key].to(dtype).float()
    ours, theirs = (
        ((region.path_kl(batch).kl - exact).abs()).max().item() for batch in (sampled, naive)
    )
    assert exact.mean() > 0.003
    # A scale that is rounded moves the KL in proportion to it.
    assert ours < error + 2 * torch.finfo(dtype).eps * exact.max().item()
    assert theirs > 20 * ours


def test_other_keys():
    actor = make_actor(dtype=torch.float32)
    actor.set_keys(chain="c", loc="m", scale="s")
    data = make_batch(actor, ROWS)
    stored, sampled = stored_and_sampled(
        data, ChainCast(torch.float16, chain="c", loc="m", others=["s"])
    )
    assert {stored[key].dtype for key in "cms"} == {torch.float16}
    assert {sampled[key].dtype for key in "cms"} == {torch.float32}


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float16, got torch.float32"):
        ChainCast(torch.float32)
    data = make_batch(make_actor(dtype=torch.float32), 4).exclude(("denoising", "loc"))
    with pytest.raises(KeyError, match="There is no .*loc.* to cast"):
        stored_and_sampled(data, ChainCast(torch.float16))


@pytest.mark.parametrize(
    "storage, index",
    [
        (LazyTensorStorage, slice(None)),
        (LazyMemmapStorage, slice(None)),
        (ListStorage, 0),
        (LazyTensorStorage, torch.tensor([3, 1])),
    ],
)
def test_reading_leaves_the_storage_as_it_is(storage, index):
    data = make_batch(make_actor(dtype=torch.float32), 8)
    buffer = TensorDictReplayBuffer(
        storage=storage(8), transform=ChainCast(torch.bfloat16), batch_size=4
    )
    buffer.extend(data)
    for _ in range(3):
        torch.testing.assert_close(
            buffer[index]["denoising", "loc"], data[index]["denoising", "loc"], rtol=0, atol=0.05
        )
    buffer.extend(data)


def test_float64_and_a_buffer_of_another_kind():
    data = make_batch(make_actor(), 4)
    with pytest.raises(ValueError, match="float64 and would be restored as torch.float32"):
        stored_and_sampled(data, ChainCast(torch.float16))
    cast = ChainCast(torch.float16, restored_dtype=torch.float64)
    plain, short, again, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=t, batch_size=4)
        for t in (None, cast, *(copy.deepcopy(cast) for _ in range(2)))
    )
    plain.extend(data)
    short.extend(data)
    again.load_state_dict(short.state_dict())
    assert again[:]["denoising", "chain"].dtype == torch.float64
    torch.testing.assert_close(again[:]["denoising", "loc"], short[:]["denoising", "loc"])
    other.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="was not written through this transform"):
        other[:]


def test_missing_scale():
    data = make_batch(make_actor(dtype=torch.float32), 4).exclude(("denoising", "scale"))
    with pytest.raises(KeyError, match="There is no .*scale.* to cast"):
        stored_and_sampled(data, ChainCast(torch.float16))
