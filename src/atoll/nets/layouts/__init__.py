"""Released checkpoints of others: read files safely, and translate their layouts in both directions."""

from atoll.nets.io import check_fit, read_weights, sha256, write_weights
from atoll.nets.layouts.known import LAYOUTS, detect, layout
from atoll.nets.layouts.pairs import Layout

__all__ = ["LAYOUTS", "Layout", "check_fit", "detect", "layout", "read_weights", "sha256", "write_weights"]
