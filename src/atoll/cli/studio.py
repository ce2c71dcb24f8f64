"""Verb of the studio: serve."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from atoll.cli.verb import Devices, DType, MaxLoadedExperts, ModelName
from atoll.core.errors import AtollError

TOKEN = "ATOLL_TOKEN"
"""Environment variable with the token. Other users of the machine can read options, but not the environment."""


@dataclass
class Serve:
    """Serve a run as a web page and an HTTP API, also in training."""

    folder: ModelName
    """Folder of the run, folder of an export (`./NAME`), or hub name of an export (`OWNER/NAME`)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8400
    """Port to listen on; 0 picks a free port."""
    token: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="(default: random)")] = None
    """Token that every request must send; the environment variable ATOLL_TOKEN keeps it out of process lists."""
    no_token: bool = False
    """Accept all users of this machine without a token; only for a loopback address."""
    batch_size: int = 32
    """Maximum number of images in one forward pass, over all requests."""
    queue: int = 64
    """Maximum number of waiting requests."""
    routing: str = "top-1"
    """Routing of requests that set none."""
    max_loaded_experts: MaxLoadedExperts = None
    """Maximum number of experts on each device at once."""
    devices: Devices = None
    """Devices to spread the experts over, such as cuda:0,cuda:1."""
    dtype: DType = "auto"
    """Precision of the networks."""
    compile: bool = False
    """Compile the networks with torch.compile."""
    quantize: Annotated[Literal["int8"] | None, arg(metavar="int8", help_behavior_hint="(default: off)")] = None
    """Store the weights of linear layers as 8-bit integers."""
    grace: float = 60.0
    """Seconds that running requests may take after SIGTERM."""
    json: bool = False
    """Print the address and the random token as JSON."""

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        # The web framework is an optional extra.
        try:
            from atoll.studio.serve import Options, serve
        except ModuleNotFoundError as error:
            raise AtollError(f"the studio needs the package {error.name}; pip install 'atoll[studio]'") from error
        from atoll.studio.registry import LoadOptions

        load_options = LoadOptions(
            batch_size=self.batch_size,
            max_loaded_experts=self.max_loaded_experts,
            devices=self.devices,
            dtype=self.dtype,
            quantize=self.quantize,
            compile=self.compile,
            routing=self.routing,
        )
        token = self.token if self.token is not None else os.environ.get(TOKEN)
        options = Options(
            self.host, self.port, token, self.no_token, queue=self.queue, grace=self.grace, json=self.json
        )
        serve(self.folder, load_options, options)
