"""Other people's weights: reading files safely, and translating layouts both ways."""

from atoll.convert.layout import Layout, check_fit
from atoll.convert.layouts import LAYOUTS, detect, layout
from atoll.nets.io import read_weights, sha256, write_weights

__all__ = ["LAYOUTS", "Layout", "check_fit", "detect", "layout", "read_weights", "sha256", "write_weights"]
