"""The parts of scripts/walk.py: the recording of calls, and the functions in the source code."""
