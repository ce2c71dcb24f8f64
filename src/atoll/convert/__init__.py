"""Released checkpoints of others: read files safely, and translate their layouts in both directions."""

from atoll.convert.layout import Layout
from atoll.convert.layouts import LAYOUTS, detect, layout
from atoll.nets.io import check_fit, read_weights, sha256, write_weights

__all__ = ["LAYOUTS", "Layout", "check_fit", "detect", "layout", "read_weights", "sha256", "write_weights"]
