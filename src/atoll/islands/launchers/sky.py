"""For clouds: a SkyPilot task file whose machines join a shared run."""

from pathlib import Path
from typing import Any

import yaml

from atoll import __version__
from atoll.config import Config
from atoll.errors import AtollError
from atoll.run import Artifact


def task(config: Config, url: str) -> dict[str, Any]:
    """One machine that takes free experts until none is left; a spot machine loses only what it had not published."""
    island = config.island
    if island.nodes > 1 or island.gpus > 1:
        raise AtollError(
            "a machine that joins a run uses one GPU; --on sky takes island.gpus 0 or 1 and island.nodes 1"
        )
    if island.gpus and island.accelerator is None:
        raise AtollError("which GPU? for example --island.accelerator A100")
    resources: dict[str, Any] = {"use_spot": True}
    resources |= {"accelerators": f"{island.accelerator}:1"} if island.gpus else {}
    resources |= {"cpus": f"{island.cores}+"} if island.cores else {}
    resources |= {"memory": f"{island.memory_gb:g}+"} if island.memory_gb else {}
    return {
        "name": "atoll-join",
        "resources": resources,
        "num_nodes": 1,
        "envs": {"ATOLL_RUN": url},
        "setup": f"pip install 'atoll[islands]=={__version__}'",
        "run": 'atoll join "$ATOLL_RUN"',
    }


def write_task(run: Path, config: Config, url: str | None, dry: bool) -> str:
    """Write RUN/launch/sky.yaml; its text, or where it is and how to use it."""
    if url is None or "://" not in url:
        raise AtollError("machines of a cloud need the run at a URL: push it there, and give --url s3://bucket/run")
    text = yaml.safe_dump(task(config, url), sort_keys=False)
    if dry:
        return text
    Artifact(run, "launch").write("sky.yaml", text.encode())
    file = run / "launch" / "sky.yaml"
    return f"wrote {file}; once for each machine that shall join: sky jobs launch --yes --detach-run {file}\n"
