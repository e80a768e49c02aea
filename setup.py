"""Packaging of torchrl_trudi."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version, from the text of the package: importing it would need its dependencies."""
    text = (ROOT / "torchrl_trudi" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r"""^__version__(?::\s*\w+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("torchrl_trudi/__init__.py defines no __version__")
    return match.group(1)


def read_readme() -> str:
    """The README, if this is a checkout that has one."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="torchrl_trudi",
    version=read_version(),
    description="Trust-region diffusion policies for TorchRL",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["torchrl_trudi", "torchrl_trudi.*"]),
    package_data={"torchrl_trudi": ["py.typed"]},
    install_requires=[
        # TorchRL's replay buffers ask for 2.7, and the training loop needs them.
        "torch>=2.7",
        # TorchRL 0.15 will have names that this package defines meanwhile; it also fixes the
        # matching tensordict, which this repeats because tensordict is imported directly.
        "torchrl>=0.14.1,<0.15",
        "tensordict>=0.14.3,<0.15",
        # Vector environments with a selectable autoreset mode, and the -v5 MuJoCo tasks.
        "gymnasium[mujoco]>=1.1",
        "mujoco>=3.17",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "pyyaml>=6",
        "tensorboard>=2.15",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "numpy>=1.26",
    ],
    extras_require={
        # Reports (rliable) and the arm that is not ours (stable-baselines3) of examples/benchmark.py.
        "benchmark": [
            "rliable>=1.2,<2",
            # rliable asks for arch<8, which cannot be imported with pandas 3.
            "pandas<3",
            "stable-baselines3>=2.7,<3",
        ],
        # ONNX files of policies; acting with one needs numpy and onnxruntime alone.
        "export": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5"],
        # The suites whose requirements agree with the above; of the others docs/suites.md says more.
        "envpool": ["envpool>=1.2.5"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "scipy>=1.12",
            # A formatter decides the same only within one minor version.
            "ruff==0.17.*",
            "mypy>=2.4,<3",
            # Types only. All its releases are candidates, so the range has to name one.
            "isaacgym-stubs>=1.1rc4",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
