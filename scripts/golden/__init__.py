"""The parts of scripts/golden.py: the data, the driver of one side, the comparison; both sides' tables and results."""
