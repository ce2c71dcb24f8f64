"""Metrics with their protocol, and diagnostics of an ensemble."""

from atoll.apps.evaluate.evaluation import Options, evaluate

__all__ = ["Options", "evaluate"]
