"""Contact sheets: one page of thumbnails per cluster, to judge the partition by eye."""

from contextlib import suppress

from PIL import Image

from atoll.core.artifacts import Artifact
from atoll.data.sources.base import BadImage, Source, decode
from atoll.data.stages.ingest import Index

# In pixels; choices. Eight thumbnails of 64 pixels with gaps are 548 pixels wide, which fits a web page.
_SIDE, _GAP, _COLUMNS = 64, 4, 8


def contact_sheets(artifact: Artifact, index: Index, source: Source, *, examples: list[list[str]]) -> None:
    """Write one page per cluster (`cluster_000.png`, …); `examples` has the ids of each cluster's images."""
    wanted = {id for ids in examples for id in ids}
    side = min(_SIDE, int(index.manifest.made_from["resolution"]))
    thumbnails: dict[str, Image.Image] = {}
    for image in source.images():
        if image.id in wanted:
            # An image that became unreadable since the ingest stage is left out here; the latents stage reports it.
            with suppress(BadImage):
                thumbnails[image.id] = decode(image.read(), side)
    for number, ids in enumerate(examples):
        with artifact.writing(f"cluster_{number:03d}.png") as path:
            sheet([thumbnails[id] for id in ids if id in thumbnails]).save(path, format="PNG")


def sheet(images: list[Image.Image], columns: int = _COLUMNS) -> Image.Image:
    """Return images of one size in a grid on white, row by row."""
    side = images[0].width if images else _SIDE
    rows = max(1, -(-len(images) // columns))
    page = Image.new("RGB", (columns * (side + _GAP) + _GAP, rows * (side + _GAP) + _GAP), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        page.paste(image, (_GAP + column * (side + _GAP), _GAP + row * (side + _GAP)))
    return page
