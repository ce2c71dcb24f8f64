"""Many experts, one model: routing, the velocity field, experts in and out of memory, sampling."""

from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.loading import load
from atoll.ensemble.routing import Memory, Routing, parse
from atoll.ensemble.sampler import Samples, Settings, Trace
from atoll.experts.batch_conditions import Told
from atoll.experts.expert_cache import Member, Placement
from atoll.experts.router import OpenRouter

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
