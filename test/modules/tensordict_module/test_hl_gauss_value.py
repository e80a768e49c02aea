"""The TensorDict front of the HL-Gauss critic."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator


def make(randomize, in_dim=5, in_keys=None, out_keys=None, **kwargs) -> HLGaussValueOperator:
    critic = HLGaussCritic(in_dim, -1.0, 3.0, hidden_size=8, num_bins=21, **kwargs)
    return HLGaussValueOperator(randomize(critic, 0.1), in_keys, out_keys)


def data(*batch, device=None) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.randn(*batch, 3),
            "action": torch.randn(*batch, 2),
            "privileged": torch.randn(*batch, 4),
        },
        batch,
        device=device,
    )


@pytest.mark.parametrize("device", get_default_devices())
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_writes_the_outputs_of_the_critic(batch, device, randomize):
    operator = make(randomize, device=device)
    td = data(*batch, device=device)
    out = operator(td)
    assert out is td
    expected = operator.module(td["observation"], td["action"])
    assert operator.out_keys == [
        "state_action_value",
        ("critic", "logits"),
        ("critic", "embedding"),
        ("critic", "next_embedding"),
    ]
    for key, value in zip(operator.out_keys, expected, strict=True):
        assert torch.equal(out[key], value)
    assert out["state_action_value"].shape == (*batch, 1)
    assert operator.support is operator.module.support


@pytest.mark.parametrize(
    "in_keys, value_key",
    [
        (None, "state_action_value"),
        (["observation", "action"], "state_action_value"),
        (["observation", ("agent", "action")], "state_action_value"),
        ([("agent", "observation")], "state_value"),
        (["observation", "last_actions"], "state_value"),
        ([("action", "goal")], "state_value"),
    ],
)
def test_value_key_follows_the_presence_of_an_action(in_keys, value_key, randomize):
    operator = make(randomize, in_keys=in_keys)
    assert operator.value_key == operator.out_keys[0] == value_key
    assert operator.in_keys == (in_keys or ["observation", "action"])


def test_state_value(randomize):
    operator = make(randomize, 3, ["observation"])
    td = operator(data(4))
    assert torch.equal(td["state_value"], operator.module(td["observation"])[0])
    assert "state_action_value" not in td


def test_privileged_observation(randomize):
    operator = make(randomize, 9, ["privileged", "observation", "action"])
    td = data(4)
    expected = operator.module(torch.cat([td["privileged"], td["observation"], td["action"]], -1))
    assert torch.equal(operator(td)["state_action_value"], expected[0])


def test_nested_keys(randomize):
    in_keys = [("agent", "observation"), ("agent", "action")]
    out_keys = [("agent", "value"), ("agent", "logits"), "embedding", ("agent", "next")]
    operator = make(randomize, in_keys=in_keys, out_keys=out_keys)
    source = data(4)
    td = operator(TensorDict({"agent": source.select("observation", "action")}, [4]))
    expected = operator.module(source["observation"], source["action"])
    for key, value in zip(out_keys, expected, strict=True):
        assert torch.equal(td[key], value)
    assert operator.value_key == ("agent", "value")


def test_without_predictor(randomize):
    operator = make(randomize, predict_embedding=False)
    td = operator(data(4))
    keys = set(td.keys(True, True))
    assert {"state_action_value", ("critic", "logits"), ("critic", "embedding")} <= keys
    assert ("critic", "next_embedding") not in keys and "_" not in keys
    assert operator.value_key == "state_action_value"


@pytest.mark.parametrize("predict_embedding, count", [(True, 4), (False, 3)])
def test_number_of_out_keys(predict_embedding, count, randomize):
    for wrong in (count - 1, count + 1):
        out_keys = list("abcdef"[:wrong])
        with pytest.raises(ValueError, match=rf"has {count} outputs, got out_keys=\['a'"):
            make(randomize, out_keys=out_keys, predict_embedding=predict_embedding)


def test_dispatch(randomize):
    operator = make(randomize)
    td = data(4)
    outputs = operator(observation=td["observation"], action=td["action"])
    expected = operator.module(td["observation"], td["action"])
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)


def test_vmap_over_an_ensemble(randomize):
    operators = [randomize(make(randomize), seed=seed) for seed in (1, 2)]
    td = data(4)
    params = torch.stack([TensorDict.from_module(o) for o in operators]).detach()

    def call(params):
        with params.to_module(operators[0]):
            return operators[0](td.select("observation", "action"))["state_action_value"]

    values = torch.vmap(call)(params)
    for value, operator in zip(values, operators, strict=True):
        torch.testing.assert_close(value, operator(td.copy())["state_action_value"])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(clone, randomize):
    operator = make(randomize)
    other = clone(operator)
    td = data(4)
    expected = operator(td.copy())["state_action_value"]
    assert torch.equal(other(td.copy())["state_action_value"], expected)
    torch.nn.init.zeros_(other.module.prior_logits)
    assert torch.equal(operator(td.copy())["state_action_value"], expected)


def test_dispatch_without_predictor(randomize):
    operator = make(randomize, predict_embedding=False)
    td = data(4)
    outputs = operator(observation=td["observation"], action=td["action"])
    assert torch.equal(outputs[0], operator.module(td["observation"], td["action"])[0])
