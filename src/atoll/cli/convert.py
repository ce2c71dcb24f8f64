"""The verb of other people's weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass
class Convert:
    """Bring other people's checkpoints in, or write an expert in someone else's layout."""

    source: Annotated[Positional[Path], arg(metavar="SRC")]
    """A .pt, .pth or .safetensors file, or a folder that holds one. The names of its tensors decide the layout, except
    between DiT and SiT: see --layout."""
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    """Folder to write: config.json, the weights, and conversion.json with the account."""
    to: str = "atoll"
    """atoll, flow-matching (a DDPM DiT becomes an expert as in HDDM), dit, sit, pixart, diffusers-dit,
    diffusers-pixart, paris or paris-router."""
    fold: bool = True
    """flow-matching: fold AdaLN-Zero into AdaLN-Single by least squares."""
    text_width: int = 768
    """flow-matching: width of the text tokens the expert will be told; 0 for none."""
    keep_labels: bool = False
    """flow-matching: keep the class embedding."""
    final: Literal["new", "keep"] = "new"
    """flow-matching: a new final layer, or the source's without its variance channels."""
    time: Literal["steps", "snr", "same"] = "steps"
    """flow-matching: network time to timestep by 999 t, by equal signal-to-noise ratio, or unchanged."""
    heads: int | None = None
    """Attention heads, where neither config.json nor a known width tells them."""
    layout: str | None = None
    """Layout of SRC. Needed for a DiT or SiT (the same tensors, with time and sign reversed) if neither config.json nor
    the file's name, such as DiT-XL-2-256x256.pt, names one of them: dit or sit."""
    num_classes: int | None = None
    """Classes of a DiT or SiT without the null class. Needed if the class table has other than the 1001 rows of
    ImageNet with a null class, and config.json does not give them."""
    seed: int = 0
    """flow-matching: seed of the new weights."""
    force: bool = False
    """Write into a folder that is not empty."""
    json: bool = False
    """Print the content of conversion.json instead of the table."""

    def run(self) -> None:
        """Convert, and print what was done."""
        from rich.console import Console

        from atoll.convert.convert import CONVERSION_FILE, as_table, convert
        from atoll.convert.fold import FlowMatchingOptions

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
