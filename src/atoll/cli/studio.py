"""The verb of the studio."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atoll.core.errors import AtollError

TOKEN = "ATOLL_TOKEN"


@dataclass
class Serve:
    """Serve a run, finished or in training, to browsers and programs: a page and an HTTP API."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run; or an exported one, or its name on the hub."""
    host: str = "127.0.0.1"
    """Address to listen at; one that others can reach needs a token."""
    port: int = 8400
    """Port to listen at; 0 takes any that is free."""
    token: str | None = None
    """What every request must know. The environment variable ATOLL_TOKEN does the same and is not seen by others."""
    batch: int = 32
    """Pictures that are worked on at once, of all requests together."""
    queue: int = 64
    """Requests that may wait."""
    routing: str = "top-1"
    """Routing of requests that name none."""
    resident: int | None = None
    """Experts in memory at once; default all."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the networks."""
    device: str | None = None
    """Where to compute; default the accelerator if there is one."""
    quantise: Literal["int8"] | None = None
    """Keep weights in eight bits."""
    grace: float = 60.0
    """Seconds that running requests have when the server is told to stop."""
    json: bool = False
    """Print the address as JSON."""

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        try:
            from atoll.studio.serve import Options, serve
        except ModuleNotFoundError as error:
            raise AtollError(f"the studio needs the package {error.name}; pip install 'atoll[studio]'") from error
        from atoll.studio.registry import Opening

        opening = Opening(self.batch, self.resident, self.dtype, self.device, self.quantise, self.routing)
        token = self.token if self.token is not None else os.environ.get(TOKEN)
        serve(str(self.folder), opening, Options(self.host, self.port, token, self.queue, self.grace, self.json))
