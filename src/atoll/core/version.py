"""The version of Atoll, as it was installed."""

from importlib.metadata import version

__version__ = version("atoll")
