"""Atoll: train one image model as isolated experts on many islands, and sample from all of them as one."""

from importlib.metadata import version

__version__ = version("atoll")
