"""Many experts as one model: routing, the velocity field and sampling."""

from atoll.core.options import SampleSettings
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.routing import Routing, RoutingState, parse
from atoll.ensemble.sampler import Sampler, SamplerState, Samples, Trace, load

__all__ = [
    "Ensemble",
    "Routing",
    "RoutingState",
    "SampleSettings",
    "Sampler",
    "SamplerState",
    "Samples",
    "Trace",
    "load",
    "parse",
]
