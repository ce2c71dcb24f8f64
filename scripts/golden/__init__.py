"""The parts of scripts/golden.py: the data, the driver of one side, the comparison; both sides' tables and results."""

GOLDEN_COMMIT = "3dcaa54180d5a39089888101f6b3a8c915759b9a"
"""The reference commit. After changing it, write the committed results again (--commit-results)."""
