"""The kinds of manifests of networks."""

ROUTER_KIND = "router"


EXPERT_KIND = "expert"
