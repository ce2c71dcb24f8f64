"""Contact sheets: a page of small pictures for every cluster, for people to judge the partition by."""

from contextlib import suppress

from PIL import Image

from atoll.core.artifacts import Artifact
from atoll.data.sources.base import BadImage, Source, decode
from atoll.data.stages.ingest import Index

_SIDE, _GAP, _COLUMNS = 64, 4, 8


def contact_sheets(artifact: Artifact, index: Index, source: Source, *, examples: list[list[str]]) -> None:
    """Write `cluster_000.png` and so on, from the ids of each cluster's examples."""
    wanted = {id for ids in examples for id in ids}
    side = min(_SIDE, int(index.manifest.made_from["resolution"]))
    pictures: dict[str, Image.Image] = {}
    for sample in source.samples():
        if sample.id in wanted:
            with suppress(BadImage):
                pictures[sample.id] = decode(sample.read(), side)
    for number, ids in enumerate(examples):
        with artifact.writing(f"cluster_{number:03d}.png") as path:
            sheet([pictures[id] for id in ids if id in pictures]).save(path, format="PNG")


def sheet(pictures: list[Image.Image], columns: int = _COLUMNS) -> Image.Image:
    """Pictures of one size, side by side on white."""
    side = pictures[0].width if pictures else _SIDE
    rows = max(1, -(-len(pictures) // columns))
    page = Image.new("RGB", (columns * (side + _GAP) + _GAP, rows * (side + _GAP) + _GAP), "white")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, columns)
        page.paste(picture, (_GAP + column * (side + _GAP), _GAP + row * (side + _GAP)))
    return page
