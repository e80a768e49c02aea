"""Policies in ONNX files: as those of the run, refused when tampered with, and without PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrl_trudi.export import OnnxPolicy, PolicyFileError, export_policy, load_policy

pytestmark = pytest.mark.export

ROOT = Path(__file__).parents[2]

# Acts in Gymnasium in a process that cannot import PyTorch, by the file of the policy alone.
STRANGER = """
import importlib.util, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensordict", "torchrl", "torchrl_trudi"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
source, model = sys.argv[1:]
spec = importlib.util.spec_from_file_location("onnx_policy", source)
module = sys.modules["onnx_policy"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import gymnasium
policy = module.OnnxPolicy(model)
env = gymnasium.make("InvertedPendulum-v5")
seen, acted, returns = [], [], []
for seed in range(3):
    observation, _ = env.reset(seed=seed)
    done, total = False, 0.0
    while not done and total < 50:
        action = policy(observation)
        seen.append(observation.tolist())
        acted.append(action.tolist())
        observation, reward, terminated, truncated, _ = env.step(action)
        total, done = total + reward, terminated or truncated
    returns.append(total)
assert "torch" not in sys.modules
print(json.dumps([seen, acted, returns]))
"""


@pytest.mark.parametrize(("variant", "stochastic"), [("diffusion", False), ("gaussian", True)])
def test_parity(runs, onnx_files, variant, stochastic):
    path = onnx_files(variant, stochastic)
    policy, live = OnnxPolicy(path), load_policy(runs(variant)[0], stochastic=stochastic)
    assert policy.metadata == live.metadata
    meta = policy.metadata
    for batch in (1, 3, 64):
        noise = torch.randn(batch, meta.num_steps + 1, 1) if stochastic else None
        for scale in (1.0, 1e3):
            observation = scale * torch.randn(batch, 4)
            actions = policy(observation, noise)
            assert isinstance(actions, torch.Tensor)
            torch.testing.assert_close(actions, live(observation, noise), atol=1e-4, rtol=0)
    if stochastic:
        draws = [OnnxPolicy(path, seed=seed)(np.zeros((8, 4))) for seed in (0, 0, 1)]
        assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    else:
        assert (policy(observation) == policy(observation)).all()


def test_without_torch(runs, onnx_files):
    source = ROOT / "torchrl_trudi" / "export" / "onnx_policy.py"
    words = [sys.executable, "-c", STRANGER, str(source), str(onnx_files("diffusion"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen, acted, returns = json.loads(done.stdout)
    assert len(returns) == 3 and min(returns) > 0
    live = load_policy(runs("diffusion")[0])(np.asarray(seen))
    np.testing.assert_allclose(acted, live, atol=1e-4)


def test_the_package_needs_no_torch_for_it():
    code = "import sys; sys.modules['torch'] = None; from torchrl_trudi.export.onnx_policy import OnnxPolicy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": "[-4.0]"}, "was changed"),
        ({"observation": '[["observation", 5]]'}, "was changed"),
        ({"format": "99"}, "has format 99"),
        ({"dt": None}, "lacks"),
        (None, "no metadata"),
    ],
)
def test_tampered(onnx_files, tmp_path, change, message):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_files("diffusion"))
    texts = {entry.key: entry.value for entry in model.metadata_props}
    for name, text in (change or {}).items():
        texts[f"torchrl_trudi.{name}"] = text
    texts = {} if change is None else {k: v for k, v in texts.items() if v is not None}
    write(onnx, model, texts, tmp_path / "policy.onnx")
    with pytest.raises(PolicyFileError, match=message):
        load_policy(tmp_path / "policy.onnx")


def test_metadata_of_another_file(onnx_files, tmp_path):
    """Whole in itself, and not of this graph."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_files("diffusion"))
    other = OnnxPolicy(onnx_files("gaussian", True)).metadata.encode()
    write(onnx, model, other, tmp_path / "policy.onnx")
    with pytest.raises(PolicyFileError, match="not that of the graph"):
        OnnxPolicy(tmp_path / "policy.onnx")


def test_no_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "policy.onnx").write_bytes(b"nothing")
    with pytest.raises(PolicyFileError, match="not an ONNX file"):
        OnnxPolicy(tmp_path / "policy.onnx")


def test_existing_files_stay(runs, onnx_files):
    path = onnx_files("diffusion")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_policy(runs("diffusion")[0], path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["policy.onnx"]


def write(onnx, model, texts, path):
    del model.metadata_props[:]
    for key, value in texts.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
