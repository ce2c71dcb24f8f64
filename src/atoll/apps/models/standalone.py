"""An export that runs where Atoll is not installed: its code is written into the folder, generated from this package.

DST/
    atoll_DIGEST.py        all that the pipeline needs to sample (`bundle.py`), without what checks and writes folders
    pipeline.py            names the class of the pipeline, for this number of experts
    expert_0/network_DIGEST.py    names the classes of networks, and so in every folder of one

`DiffusionPipeline.from_pretrained(DST, trust_remote_code=True)` copies pipeline.py, and the files that it imports
relatively, into its cache; they become modules of `diffusers_modules.local`. It executes pipeline.py anew for every
folder, but imports the bundle once. A module with a digest in its name is never taken for that of another folder:
Python takes a file that is replaced by one of the same size within a second for the old one, and uses its bytecode.
"""

from hashlib import sha256
from pathlib import Path

from atoll.apps.models.bundle import bundle
from atoll.apps.models.pipeline import __name__ as pipeline
from atoll.core.artifacts import Artifact
from atoll.experts.pipeline_folder import PIPELINE_CLASS, PIPELINE_MODULE

_ROOTS = ("AtollPipeline", "ExpertModel", "RouterModel", "_sized")
_OMIT = (
    *(f"{pipeline}:AtollPipeline.{name}" for name in ("from_pretrained", "_of_run", "save_pretrained")),
    f"{pipeline}:_Declared.save_pretrained",
    "atoll.encoders.encoders:Encoders.of",
    "atoll.encoders.encoders:Encoders.of_folder",
    "atoll.experts.network_folder:NetworkFolder._check_declaration",
)
# Experts on a base and networks of one's own are not part of such a folder, and who opens it with its own code trusts
# it as a whole.
_REPLACE = {
    "atoll.encoders.base_pipeline:BasePipeline": "class BasePipeline: pass",
    "atoll.nets.base:BaseExpert": "class BaseExpert: pass",
    "atoll.nets.own:open_own": "def open_own(config): raise ImportError(config.path)",
    "atoll.experts.pipeline_folder:COMPONENTS": "COMPONENTS = __name__",
    "atoll.verify.local_trust:signed_networks": "def signed_networks(folder): return None",
    "atoll.verify.trust:Network": "class Network: pass",
}


def write_code(artifact: Artifact, networks: list[str]) -> str:
    """Write the code of a folder with these networks (expert_0, … and router); return the module of their classes."""
    roots = [f"{pipeline}:{name}" for name in _ROOTS]
    code = bundle(roots, omit=_OMIT, replace=_REPLACE)
    digest = sha256(code.encode()).hexdigest()[:16]
    module, network = f"atoll_{digest}", f"network_{digest}"
    artifact.write(f"{module}.py", code.encode())
    count = sum(name != "router" for name in networks)
    text = f"from .{module} import _sized\n\n{PIPELINE_CLASS} = _sized({count})\n"
    # Its name is fixed, so its size differs from those of other folders.
    size = int(sha256(text.encode()).hexdigest()[:4], 16) % 1024
    artifact.write(f"{PIPELINE_MODULE}.py", f"{text}#{'#' * size}\n".encode())
    for name in networks:
        # Relative imports would be looked up beside this file; the module is imported already, by pipeline.py.
        line = f"from diffusers_modules.local.{module} import ExpertModel, RouterModel\n"
        artifact.write(f"{name}/{network}.py", line.encode())
    return network


def code_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every code file of a folder by its name; empty for an export without code."""
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder).as_posix(): sha256(file.read_bytes()).hexdigest() for file in files}
