"""`atoll export`: write a model of a run as a complete diffusers folder with a model card.

DST/
    model_index.json       the components: AtollPipeline
    expert_0/ …, router/   networks with their declarations (atoll.experts.network_folder)
    vae/, text_encoder/, tokenizer/, scheduler/
    root/, snapshot/       of a shared run: its root and its signed snapshot (verify/trust.py), and
                           expert_0/manifest.json and so on: the manifest of each network, which the snapshot lists
    manifest.json          SHA-256 of every file above
    README.md              the model card; not hashed, because people edit it
    *.py                   with `standalone`: the code of the pipeline (`standalone.py`)

`dit_pipeline.py` describes the folder of `--dit-pipeline`.

Experts of a base are written without it: adapters.json names the base, with its fingerprint, and the experts. Their
folders have the files of peft and of diffusers (`experts/network_folder.py`).
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from atoll.apps.models.dit_pipeline import write_dit_pipeline
from atoll.apps.models.model_card import CARD_FILE, CardData, model_card
from atoll.apps.models.pipeline import components
from atoll.apps.models.standalone import code_hashes, write_code
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, PIPELINE, ExpertContent, PipelineContent, RouterContent
from atoll.core.networks import LOCAL, BaseConfig, OwnConfig
from atoll.core.progress import progress, say
from atoll.data.density import DENSITY_FILE
from atoll.encoders.base_pipeline import BaseName
from atoll.encoders.encoders import source_folders
from atoll.encoders.pretrained import covered_files
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.sampler import Sampler, load
from atoll.experts import network_folder
from atoll.experts.pipeline_folder import (
    ADAPTERS_FILE,
    COMPONENTS,
    INDEX_FILE,
    LIBRARIES,
    PIPELINE_CLASS,
    PIPELINE_MODULE,
    remove_source_paths,
)
from atoll.experts.run import network_manifests, open_run, public_content
from atoll.nets.base import BaseExpert, base_folder, opened_base
from atoll.nets.io import read_files
from atoll.nets.quantization import Int8Linear
from atoll.verify.local_trust import copy_trust, local_trust
from atoll.verify.verified_files import VerifiedFiles


def export(
    run: Path,
    destination: Path,
    model: str = "experts",
    *,
    license: str | None = None,
    merge: bool = False,
    standalone: bool = False,
    dit_pipeline: bool = False,
) -> Manifest:
    """Write a model of a run. A finished export is left as it is; a folder with other content is an error.

    With `merge`, the network of one expert on a base is written as a whole: the base with the adapter in its weights.
    With `standalone`, the folder contains the code of its pipeline, so that diffusers opens it without Atoll. With
    `dit_pipeline`, one network is written as a pipeline of diffusers (`dit_pipeline.py`).
    """
    if merge + standalone + dit_pipeline > 1:
        raise AtollError("--merge and --dit-pipeline write what diffusers opens without code; choose one option")
    if merge:
        return _export_merged(run, destination, model)
    sampler = load(run, model, device="cpu", strict=True)
    ensemble = sampler.ensemble
    if dit_pipeline and len(ensemble.declarations) > 1:
        raise AtollError("a DiTPipeline has one network; choose it with --model expert:K, monolith or student")
    for declared in ensemble.declarations:
        if isinstance(declared.network, OwnConfig):
            raise AtollError(
                f"{declared.name} is a {declared.network.path}, code outside Atoll; an export has networks of Atoll "
                "and diffusers only, so that whoever opens it runs no code of strangers"
            )
    # Without a router only `nearest` can combine experts, and it needs the density of every cluster. Testing from the
    # second expert on exempts a model of one network.
    if ensemble.router is None and any(reference.density is None for reference in ensemble.references[1:]):
        raise AtollError(f"{run} has several experts and no router; train one with: atoll train {run} --router")
    trained = network_manifests(
        run, [expert.name for expert in ensemble.declarations], router=ensemble.router is not None
    )
    artifact = _folder(run, destination)
    destination = artifact.folder
    networks = {job: manifest.digest for job, manifest in trained.items()}
    made_from: dict[str, Any] = {"model": model, "networks": networks}
    if standalone:
        made_from["standalone"] = True
    if dit_pipeline:
        made_from["dit_pipeline"] = True
    if artifact.begin(PIPELINE, made_from) is None:
        if dit_pipeline:
            (job, only), network = next(iter(trained.items())), ensemble.references[0].open()
            write_dit_pipeline(artifact, network, EXPERT.parse(only, job), sampler.encoders.autoencoder())
            remove_source_paths(destination)
        else:
            _write(run, artifact, sampler, trained, standalone=standalone)
            _copy_origin(run, artifact, model, trained)
        artifact.commit(PipelineContent(experts=len(ensemble.references), model=model), exclude=[CARD_FILE])
    manifest = artifact.open(PIPELINE, verify=True)
    # An existing card may have been edited.
    base = _base_of(ensemble)
    if not (destination / CARD_FILE).exists() and base is not None:
        text = _adapter_card(destination.name, base, len(ensemble.references), license)
        (destination / CARD_FILE).write_text(text, encoding="utf-8")
    elif not (destination / CARD_FILE).exists():
        public = [public_content(job, manifest) for job, manifest in trained.items()]
        experts = [content for content in public if isinstance(content, ExpertContent)]
        router = next((content for content in public if isinstance(content, RouterContent)), None)
        sizes = sampler.sizes if len(ensemble.sizes) > 1 else ()
        code = code_hashes(destination)
        data = CardData(run, destination.name, model, experts, router, license, sizes, code, dit_pipeline)
        (destination / CARD_FILE).write_text(model_card(data), encoding="utf-8")
    return manifest


def _folder(run: Path, destination: Path) -> Artifact:
    """Return the folder to write; raise an error if it has other content."""
    destination = destination.resolve()
    artifact = Artifact(destination.parent, destination.name)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())) and not artifact.begun():
        raise AtollError(f"{destination} exists and is not an export of {run}; choose another folder")
    return artifact


def _copy_origin(run: Path, artifact: Artifact, model: str, trained: Mapping[str, Manifest]) -> None:
    """Write the root and snapshot of a shared run, and what was signed: manifest and density of each network, encoders.

    With them, whoever opens the export can compare every network with the snapshot, and the encoders with the
    fingerprints that the networks declare. For these, their files are copied as they are.
    """
    if local_trust(run) is None:
        return
    content = EXPERT.parse(next(iter(trained.values())), run)
    # Adapters name their base, which has the encoders.
    on_base = content.text is not None and content.text.base is not None
    sources = {} if on_base else source_folders(content.latents, content.text, run=run)
    files = {part: {file.relative_to(own): file for file in covered_files(own)} for part, own in sources.items()}
    configurations = [file for own in files.values() for file in own.values() if file.suffix == ".json"]
    local = LOCAL in (content.latents.autoencoder, content.text and content.text.encoder)
    if local and any(b'name_or_path"' in file.read_bytes() for file in configurations):
        say("note: an encoder has the path of a folder, so root and snapshot are not part of the export")
        return
    networks = {job: manifest.digest for job, manifest in trained.items()}
    if not copy_trust(run, artifact, networks, whole=model == "experts"):
        return
    own = files.get("text_encoder", {})
    files["tokenizer"] = {name: file for name, file in own.items() if name.suffix != ".safetensors"}
    for part, own in files.items():
        if (artifact.folder / part).is_dir():
            shutil.rmtree(artifact.folder / part)
            for relative, file in own.items():
                artifact.write(f"{part}/{relative.as_posix()}", file.read_bytes())
    for number, (job, manifest) in enumerate(trained.items()):
        name = "router" if job == layout.ROUTER else f"expert_{number}"
        artifact.write(f"{name}/{layout.MANIFEST_FILE}", manifest.to_json())
        if DENSITY_FILE in manifest.files:
            density = VerifiedFiles(Artifact(run, layout.final(job)), manifest).read(DENSITY_FILE)
            artifact.write(f"{name}/{DENSITY_FILE}", bytes(density))


def _write(
    run: Path, artifact: Artifact, sampler: Sampler, trained: Mapping[str, Manifest], *, standalone: bool
) -> None:
    """Write all components, one after the other, so that one network is in memory at a time."""
    import diffusers

    if (base := _base_of(sampler.ensemble)) is not None:
        if standalone:
            raise AtollError("adapters of a base open without Atoll, one by one; omit --standalone")
        _write_on_base(run, artifact, sampler.ensemble, trained, base=base)
        return
    index: dict[str, list[str | None]] = {}
    # 5: router, vae, text_encoder, tokenizer and scheduler.
    with progress("exporting", len(sampler.ensemble.references) + 5, unit="components") as bar:
        for name, part in components(sampler, trained):
            index[name] = [None, None] if part is None else [LIBRARIES.get(name, COMPONENTS), type(part).__name__]
            if part is not None:
                part.save_pretrained(artifact.folder / name)
            bar.update(1)
    kind = [PIPELINE_MODULE, PIPELINE_CLASS] if standalone else PIPELINE_CLASS
    if standalone:
        networks = [name for name, (library, _) in index.items() if library == COMPONENTS]
        module = write_code(artifact, networks)
        index |= {name: [module, index[name][1]] for name in networks}
    fields = {"_class_name": kind, "_diffusers_version": diffusers.__version__, **dict(sorted(index.items()))}
    artifact.write(INDEX_FILE, (json.dumps(fields, indent=2) + "\n").encode())
    remove_source_paths(artifact.folder)


def _write_on_base(
    run: Path, artifact: Artifact, ensemble: Ensemble, trained: Mapping[str, Manifest], *, base: BaseConfig
) -> None:
    """Write the experts and the router, without the base of the experts."""
    slot = BaseName.parse(configuration.load(run).text.encoder).slot
    for number, reference in enumerate(ensemble.references):
        job, own = reference.declaration.name, artifact.folder / f"expert_{number}"
        content = public_content(job, trained[job])
        if isinstance(content.network, BaseConfig):
            # Read without its base, which may be large.
            source = Artifact(run, layout.final(job))
            _, state = read_files(source.folder, VerifiedFiles(source, trained[job]).read)
            network_folder.write_base_expert(own, content.network, state, slot=slot)
            network_folder.write_declaration(own, content, density=reference.density)
        else:
            network_folder.write(own, reference.open(), content, density=reference.density)
    if ensemble.router is not None:
        content = public_content(layout.ROUTER, trained[layout.ROUTER])
        network_folder.write(artifact.folder / "router", ensemble.router.network, content, density=None)
    experts = [{"job": own.name, "clusters": own.clusters} for own in ensemble.declarations]
    named = {"name": base.base, "fingerprint": base.weights, "component": slot, "class": base.network_class}
    fields = {"base": named, "experts": experts, "router": "router" if ensemble.router else None}
    artifact.write(ADAPTERS_FILE, (json.dumps(fields, indent=2) + "\n").encode())


def _base_of(ensemble: Ensemble) -> BaseConfig | None:
    """Return the base of the experts; None if they have none."""
    return next((own.network for own in ensemble.declarations if isinstance(own.network, BaseConfig)), None)


def _export_merged(run: Path, destination: Path, model: str) -> Manifest:
    """Write one expert as a network that diffusers opens, in the precision of the base's files."""
    import diffusers

    experts = open_run(run, model, strict=True).experts
    if len(experts) > 1:
        raise AtollError("--merge needs one expert; choose it with --model expert:K")
    reference = experts[0]
    config = reference.declaration.network
    if not isinstance(config, BaseConfig):
        raise AtollError(f"{run}: only experts on a base model are merged with it")
    trained = network_manifests(run, [reference.declaration.name], router=False)
    artifact = _folder(run, destination)
    made_from = {"model": model, "merge": True, "networks": {job: made.digest for job, made in trained.items()}}
    if artifact.begin(PIPELINE, made_from) is None:
        folder = base_folder(config)
        with safe_open(next(folder.glob("*.safetensors")), "pt") as stored:
            dtype = stored.get_tensor(stored.keys()[0]).dtype
        base = getattr(diffusers, config.network_class).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        for layer in base.modules() if config.lora and config.lora.quantize else ():
            if isinstance(layer, nn.Linear):  # the weights that the adapter was trained with
                layer.weight.data = Int8Linear(layer).weight
        with opened_base(config, base):
            expert = reference.open()
        assert isinstance(expert, BaseExpert)
        network: Any = expert.merge()
        network.to(dtype).save_pretrained(artifact.folder)
        remove_source_paths(artifact.folder)
        artifact.commit(PipelineContent(experts=1, model=model))
    return artifact.open(PIPELINE, verify=True)


def _adapter_card(name: str, base: BaseConfig, count: int, license: str | None) -> str:
    known = base.base != LOCAL
    named, what = (f"base_model: {base.base}\n", f"`{base.base}`") if known else ("", "a base that has no public name")
    front = f"{f'license: {license}' + chr(10) if license else ''}{named}library_name: diffusers"
    weights = f"Weights: {license}." if license else "No license was declared for the weights."
    return f"""---
{front}
pipeline_tag: text-to-image
tags: [atoll, decentralized-diffusion, lora]
---

# {name}

{count} experts of {what}, trained independently, each on one cluster of the data.
The network of the base is a `{base.network_class}` with the fingerprint `{base.weights}`. It is not in this folder.

## Usage

All experts together, routed for each image and step:

```bash
atoll sample {name} "a red apple"{"" if known else " --base BASE"}
```

In a diffusers pipeline, all of them or one adapter:

```python
pipe = DiffusionPipeline.from_pretrained("{base.base if known else "BASE"}")
atoll.attach(pipe, "{name}")
pipe.load_lora_weights("{name}/expert_0")  # instead, without Atoll
image = pipe("a red apple").images[0]
```

`PeftModel.from_pretrained(network, "{name}/expert_0")` of peft opens an adapter, too.

## License

{weights} The base, and the training images, have separate licenses.
"""
