"""Writing of policies into files that need neither this package nor the run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchrl_trudi.export.loader import METADATA_FILE, load_policy
from torchrl_trudi.export.onnx_policy import PolicyMetadata
from torchrl_trudi.export.policy_module import PolicyModule
from torchrl_trudi.export.restore import RestoredPolicy, restore_policy

__all__ = ["ExportError", "export_policy"]

_SUFFIXES = (".onnx", ".pt2")
_NUM_CHECKED = 1000
_SCALES = (1.0, 1e3)


class ExportError(RuntimeError):
    """An export that was refused; no file was written."""


def export_policy(
    run_or_checkpoint: str | os.PathLike,
    path: str | os.PathLike,
    *,
    stochastic: bool = False,
    overwrite: bool = False,
    tolerance: float = 1e-4,
) -> PolicyMetadata:
    """Writes the policy of a run into one file: normalisation, chain, squashing and action box.

    The file takes observations and returns actions in the units of the task, for any batch size. Before
    it gets its name it is loaded and compared with the policy as it acted in its run (transform, actor and
    action scaling) on 1,000 observations drawn with the statistics of the normalisation, and again on
    1,000 times those.

    Args:
        run_or_checkpoint (str or Path): a checkpoint, or the directory of a run (its newest checkpoint).
        path (str or Path): the file, ``.onnx`` or, for :func:`torch.export.load`, ``.pt2``.

    Keyword Args:
        stochastic (bool, optional): export the chain with noise, a second input of standard normals
            ``[B, N + 1, A]``. Defaults to ``False``, the noise-free chain.
        overwrite (bool, optional): replace the file if there is one. Defaults to ``False``.
        tolerance (float, optional): largest difference of an action, times half the width of its box
            where that is above 1. Defaults to ``1e-4``.

    Returns:
        PolicyMetadata: what the file says of itself.

    Raises:
        ValueError: another suffix.
        FileExistsError: the file exists.
        ConfigError: no checkpoint, or one that cannot be used.
        ImportError: onnx, onnxscript or onnxruntime is not installed, see the extra ``export``.
        ExportError: the file differs from the policy by more than ``tolerance``; nothing is written.
    """
    target = Path(path)
    if target.suffix not in _SUFFIXES:
        raise ValueError(f"the file must end with one of {_SUFFIXES}, got {os.fspath(path)!r}")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{os.fspath(path)!r} exists; overwrite=True replaces it")
    if target.suffix == ".onnx":
        _check_packages()
    restored = restore_policy(run_or_checkpoint)
    metadata = restored.metadata(stochastic=stochastic)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename within a file system is whole or not at all.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
        stage = Path(folder) / f"policy{target.suffix}"
        write = write_onnx if target.suffix == ".onnx" else write_pt2
        write(restored.module(), metadata, stage)
        _check_parity(restored, metadata, stage, tolerance)
        if overwrite:
            os.replace(stage, target)
        else:
            os.link(stage, target)  # which fails where another process was faster
    return metadata


def _check_packages() -> None:
    import importlib.util

    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"export to ONNX needs {', '.join(missing)}: pip install 'torchrl_trudi[export]'"
        )


def _example(metadata: PolicyMetadata) -> tuple[torch.Tensor, ...]:
    # Two rows: a batch of one would be taken for a constant.
    inputs = [torch.zeros(2, metadata.obs_dim)]
    if metadata.stochastic:
        inputs.append(torch.zeros(2, metadata.num_steps + 1, metadata.action_dim))
    return tuple(inputs)


def _export(module: PolicyModule, metadata: PolicyMetadata) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    names = ("observation", "noise") if metadata.stochastic else ("observation",)
    shapes = dict.fromkeys(names, batch)
    with torch.no_grad():
        return torch.export.export(module, _example(metadata), dynamic_shapes=shapes, strict=False)


def write_pt2(module: PolicyModule, metadata: PolicyMetadata, path: Path) -> None:
    """Writes a module and its metadata as an archive of ``torch.export``; checks nothing."""
    text = json.dumps(metadata.encode())
    torch.export.save(_export(module, metadata), path, extra_files={METADATA_FILE: text})


def write_onnx(module: PolicyModule, metadata: PolicyMetadata, path: Path) -> None:
    """Writes a module and its metadata as an ONNX file; checks nothing."""
    names = ["observation", "noise"] if metadata.stochastic else ["observation"]
    with _quiet():
        program = torch.onnx.export(
            _export(module, metadata),
            input_names=names,
            output_names=["action"],
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    del model.metadata_props[:]
    for name, text in metadata.encode().items():
        model.metadata_props.add(key=name, value=text)
    path.write_bytes(model.SerializeToString())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's talk: of its own parts, and of packages that it would like to have."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _check_parity(
    restored: RestoredPolicy, metadata: PolicyMetadata, path: Path, tolerance: float
) -> None:
    """Compares the file with the policy as it acted in its run."""
    generator = torch.Generator().manual_seed(0)
    module, policy = restored.module(), load_policy(path)
    observation = torch.randn(_NUM_CHECKED, metadata.obs_dim, generator=generator)
    observation = module.mean + module.scale * observation
    noise: Any = None
    if metadata.stochastic:
        shape = (_NUM_CHECKED, metadata.num_steps + 1, metadata.action_dim)
        noise = torch.randn(shape, generator=generator)
    low, high = restored.task.bounds()
    unit = ((high - low) / 2).clamp_min(1.0)
    for scale in _SCALES:
        expected = restored.act(scale * observation, noise)
        difference = ((policy(scale * observation, noise) - expected).abs() / unit).max().item()
        if not difference <= tolerance:  # a NaN too
            raise ExportError(
                f"the exported policy differs from the one of the run by {difference:.3g} on "
                f"observations of {scale:g} times their usual scale; at most {tolerance:g} is accepted. "
                "Nothing was written."
            )
