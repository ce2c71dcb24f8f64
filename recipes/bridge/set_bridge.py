"""Copy an expert from one run to another and replace its bridge: set_bridge.py FROM TO EXPERT BRIDGE."""

import sys
from pathlib import Path

from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, BridgeSpec

source, target, expert, bridge = sys.argv[1:]
name = f"experts/{int(expert):03d}/final"
old, new = Artifact(Path(source), name), Artifact(Path(target), name)
manifest = old.open(EXPERT, verify=True)
if new.begin(EXPERT, {**manifest.made_from, "bridge": bridge}) is None:
    for file in manifest.files:
        new.write(file, old.path(file).read_bytes())
    content = EXPERT.parse(manifest, old.folder)
    new.commit(content.model_copy(update={"bridge": BridgeSpec.model_validate({"mode": bridge})}))
