"""Recording: scalars, learning curves and evaluation."""

from __future__ import annotations

from typing import Any

from torchrl_trudi.record.evaluation import EvaluationResult, evaluate
from torchrl_trudi.record.scalars import ScalarWriter, read_scalars

__all__ = [
    "EvaluationResult",
    "ScalarWriter",
    "evaluate",
    "plot_learning_curve",
    "read_scalars",
]


def __getattr__(name: str) -> Any:
    # Not imported above: `python -m torchrl_trudi.record.curves` would then find its module loaded
    # already, and warn.
    if name == "plot_learning_curve":
        from torchrl_trudi.record.curves import plot_learning_curve

        return plot_learning_curve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
