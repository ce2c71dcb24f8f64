"""The verb of several machines of one owner: launch."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import ClassVar

from atoll.api import LaunchArguments


@dataclass(frozen=True)
class Launch(LaunchArguments):
    __doc__ = LaunchArguments.__doc__

    print: bool = False
    """Print the commands or scripts of all jobs and exit."""
    json: bool = False
    """Print the submitted jobs as JSON."""
    epilog: ClassVar = """
examples:
  atoll launch runs/mine --on slurm --island.gpus 8 --jobs experts router
  atoll launch runs/mine --on command "qsub -N {name} {command}" --wait
"""

    def run(self) -> None:
        """Submit the jobs, or print them."""
        if self.print:
            launcher, config, request = self.request(store=False)
            from atoll.apps.launch.launch import show

            print(show(launcher, config, request))
            return
        with redirect_stdout(sys.stderr):  # Ray prints about its nodes there
            found = self.call()
        if self.json:
            from atoll.apps.launch.launch import names_of

            submitted = names_of(found.to_submit)
            print(json.dumps({"submitted": submitted, "running": found.running, "blocked": found.blocked}))
