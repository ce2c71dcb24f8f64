"""Many experts as one model: routing, the velocity field and sampling."""

from atoll.core.options import Settings
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.loading import load
from atoll.ensemble.routing import Routing, RoutingState, parse
from atoll.ensemble.sampler import Sampler, SamplerState
from atoll.ensemble.samples import Samples, Trace

__all__ = [
    "Ensemble",
    "Routing",
    "RoutingState",
    "Sampler",
    "SamplerState",
    "Samples",
    "Settings",
    "Trace",
    "load",
    "parse",
]
