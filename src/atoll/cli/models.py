"""Verbs of models in and out: convert, export."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from atoll.api import ExportArguments


@dataclass
class Convert:
    """Convert checkpoints of others, or add a LoRA file to a run."""

    source: Annotated[Positional[Path], arg(metavar="SRC")]
    """A .pt, .pth or .safetensors file, or a folder that contains one."""
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    """Folder to write: config.json, the weights, and conversion.json with a record of all changes. With --expert: a
    run on a base model."""
    to: str = "atoll"
    """Target layout: atoll, flow-matching (as in HDDM), dit, sit, pixart, diffusers-dit, diffusers-pixart, paris or
    paris-router."""
    fold: Annotated[bool, arg(help_behavior_hint="(default: fold into AdaLN-Single by least squares)")] = True
    """flow-matching: keep the AdaLN-Zero layers."""
    text_width: int = 768
    """flow-matching: width of the text tokens that the expert is conditioned on; 0 for none."""
    keep_labels: bool = False
    """flow-matching: keep the class embedding."""
    final: Literal["new", "keep"] = "new"
    """flow-matching: a new final layer, or the source's without its variance channels."""
    time: Literal["steps", "snr", "same"] = "steps"
    """flow-matching: map time t to a timestep by 999 t, by equal signal-to-noise ratio, or unchanged."""
    heads: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: from config.json or the width)")] = None
    """Number of attention heads."""
    layout: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: detect)")] = None
    """Layout of SRC, dit or sit, if neither config.json nor the file name contains it; both have the same tensors."""
    num_classes: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: detect, or 1000)")] = None
    """Number of classes of a DiT or SiT, without the null class."""
    seed: int = 0
    """flow-matching: seed of the new weights."""
    expert: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: none)")] = None
    """LoRA file: number of the expert that it becomes in the run DST."""
    images: Annotated[str | None, arg(metavar="SOURCE", help_behavior_hint="(default: generated for --prompts)")] = None
    """LoRA file: images with captions, by which `nearest` routing finds the expert."""
    prompts: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """LoRA file, without images: text file with a prompt in each line, for which it generates them."""
    force: bool = False
    """Write into a folder that is not empty."""
    json: bool = False
    """Print conversion.json instead of a table."""
    epilog: ClassVar = """
examples:
  atoll convert DiT-XL-2-256x256.pt converted/dit
  atoll convert converted/dit start --to flow-matching --text-width 768
"""

    def run(self) -> None:
        """Convert, and print a summary."""
        if self.expert is not None:
            from atoll.apps.models.lora_files import join

            lines = self.prompts.read_text(encoding="utf-8").splitlines() if self.prompts else []
            prompts = [line for line in lines if line.strip()]
            made = join(self.source, self.destination, self.expert, images=self.images, prompts=prompts)
            print(json.dumps(made.content) if self.json else f"expert {self.expert} of {self.destination}: done")
            return
        from rich.console import Console

        from atoll.apps.models.convert import CONVERSION_FILE, as_table, convert
        from atoll.apps.models.fold import FlowMatchingOptions

        options = FlowMatchingOptions(self.fold, self.text_width, self.keep_labels, self.final, self.time, self.seed)
        conversion = convert(
            self.source,
            self.destination,
            self.to,
            options=options,
            heads=self.heads,
            force=self.force,
            layout=self.layout,
            num_classes=self.num_classes,
        )
        if self.json:
            print((self.destination / CONVERSION_FILE).read_text(encoding="utf-8"), end="")
        else:
            Console().print(as_table(conversion, self.source, self.destination))


@dataclass(frozen=True)
class Export(ExportArguments):
    __doc__ = ExportArguments.__doc__

    json: bool = False
    """Print JSON."""
    epilog: ClassVar = """
examples:
  atoll export runs/mine my-model --license cc-by-sa-4.0
  atoll export runs/mine my-student --model student --standalone
"""

    def run(self) -> None:
        """Export, and print how to load the folder."""
        from atoll.experts.pipeline_folder import INDEX_FILE

        made, folder = self.call(), Path(self.destination)
        if self.json:
            print(json.dumps({"folder": str(folder), "digest": made.digest, **made.content}))
            return
        size = sum(entry.size for entry in made.files.values())
        card = "" if self.merge else "; its card is README.md"
        print(f"{folder}: {len(made.files)} files, {size / 1e6:.1f} MB{card}. To use it:")
        if self.merge:
            print(f'  the network of its pipeline: AutoModel.from_pretrained("{folder}") of diffusers')
            return
        if not (folder / INDEX_FILE).is_file():
            print(f'  atoll.attach(pipe, "{folder}"), or pipe.load_lora_weights("{folder}/expert_0")')
            return
        if self.standalone or self.dit_pipeline:
            trust = ", trust_remote_code=True" if self.standalone else ""
            print(f'  DiffusionPipeline.from_pretrained("{folder}"{trust}) of diffusers')
            return
        print(f'  AtollPipeline.from_pretrained("{folder}"), or atoll.load("{folder}")')
