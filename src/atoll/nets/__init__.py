"""The networks: DiT experts, the router, diffusers models as experts, and their files."""

from atoll.core.networks import NAMES, DiTConfig, RouterConfig
from atoll.nets.adapters import Expert
from atoll.nets.conditioning import Condition, PreparedCondition, concatenate
from atoll.nets.dit import DiT, count_parameters
from atoll.nets.io import build, load_network, save_network
from atoll.nets.router import Router

__all__ = [
    "NAMES",
    "Condition",
    "DiT",
    "DiTConfig",
    "Expert",
    "PreparedCondition",
    "Router",
    "RouterConfig",
    "build",
    "concatenate",
    "count_parameters",
    "load_network",
    "save_network",
]
