"""Other people's weights: reading files safely, and translating layouts both ways."""

from atoll.nets.io import read_weights, sha256, write_weights
from atoll.nets.weights.layout import Layout, check_fit
from atoll.nets.weights.layouts import LAYOUTS, detect, layout

__all__ = ["LAYOUTS", "Layout", "check_fit", "detect", "layout", "read_weights", "sha256", "write_weights"]
