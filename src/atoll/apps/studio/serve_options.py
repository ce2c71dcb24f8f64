"""Options of the server. They import no web framework, since `atoll serve --help` works without one."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8400
    """Port to listen on; 0 picks a free port."""
    token: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="(default: random)")] = None
    """Token that every request must send; the environment variable ATOLL_TOKEN keeps it out of process lists."""
    no_token: bool = False
    """Accept all users of this machine without a token; only for a loopback address."""
    on: Literal["local", "ray"] = "local"
    """Serve from this process, or from replicas on the Ray cluster to which this machine belongs."""
    replicas: tuple[int, int] = (1, 1)
    """Ray: minimum and maximum number of replicas; their number follows the load."""
    replica_gpus: float = 0.0
    """Ray: GPUs of each replica; with a fraction, several share one."""
    batch_size: int = 32
    """Maximum number of images in one forward pass, over all requests."""
    queue: int = 64
    """Maximum number of waiting requests."""
    routing: str = "top-1"
    """Routing of requests that set none."""
    grace: float = 60.0
    """Seconds that running requests may take after SIGTERM."""
    json: bool = False
    """Print the address and the random token as JSON."""
