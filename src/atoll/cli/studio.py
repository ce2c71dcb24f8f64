"""Verb of the studio: serve."""

import os
from dataclasses import dataclass, field, replace
from typing import Annotated

from tyro.conf import OmitArgPrefixes

from atoll.apps.studio.serve_options import ServerOptions
from atoll.cli.verb import ModelArgument
from atoll.core.errors import AtollError
from atoll.core.options import QuantizedLoadOptions

TOKEN = "ATOLL_TOKEN"
"""Environment variable with the token. Other users of the machine can read options, but not the environment."""


@dataclass
class Serve:
    """Serve a run as a web page and an HTTP API, also in training."""

    folder: ModelArgument
    """Folder of the run, folder of an export (`./NAME`), or hub name of an export (`OWNER/NAME`)."""
    server: Annotated[ServerOptions, OmitArgPrefixes] = field(default_factory=ServerOptions)
    load: Annotated[QuantizedLoadOptions, OmitArgPrefixes] = field(default_factory=QuantizedLoadOptions)

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        # The web framework is an optional extra.
        try:
            from atoll.apps.studio.on_ray import serve_on_ray
            from atoll.apps.studio.serve import serve
        except ModuleNotFoundError as error:
            raise AtollError(f"the studio needs the package {error.name}; pip install 'atoll[studio]'") from error
        token = self.server.token if self.server.token is not None else os.environ.get(TOKEN)
        start = serve_on_ray if self.server.on == "ray" else serve
        start(self.folder, self.load, replace(self.server, token=token))
