"""Many experts, one model: routing, the velocity field, experts in and out of memory, sampling."""

from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.loading import load
from atoll.ensemble.routing import RoutingState, Routing, parse
from atoll.ensemble.sampler import Samples, Settings, Trace
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert_cache import ExpertReference, DeviceOptions
from atoll.experts.router import OpenRouter

__all__ = [
    "Ensemble",
    "ExpertReference",
    "RoutingState",
    "OpenRouter",
    "DeviceOptions",
    "Routing",
    "Samples",
    "Settings",
    "BatchConditions",
    "Trace",
    "load",
    "parse",
]
