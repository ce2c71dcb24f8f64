"""Many experts, one model: routing, the velocity field, experts in and out of memory, sampling."""

from atoll.ensemble.field import Ensemble, OpenRouter
from atoll.ensemble.loading import load
from atoll.ensemble.residency import Member, Placement
from atoll.ensemble.routing import Memory, Routing, parse
from atoll.ensemble.sampling import Samples, Settings, Trace
from atoll.ensemble.told import Told

__all__ = [
    "Ensemble",
    "Member",
    "Memory",
    "OpenRouter",
    "Placement",
    "Routing",
    "Samples",
    "Settings",
    "Told",
    "Trace",
    "load",
    "parse",
]
