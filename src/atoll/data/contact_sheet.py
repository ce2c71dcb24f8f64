"""Contact sheets: one page of thumbnails per cluster, to judge the partition by eye, and one per size of several."""

from collections import Counter
from contextlib import suppress

from PIL import Image

from atoll.core.artifacts import Artifact
from atoll.core.sizes import Size, nearest_size
from atoll.data.images import BadImage, fit, image_size, open_image
from atoll.data.index import Index
from atoll.data.sources.base import Source

# In pixels; choices. Eight thumbnails of 64 pixels with gaps are 548 pixels wide, which fits a web page.
_SIDE, _GAP, _COLUMNS = 64, 4, 8
_PER_SIZE = 64  # as many as for a cluster


def contact_sheets(artifact: Artifact, index: Index, source: Source, *, examples: list[list[str]]) -> None:
    """Write one page per cluster (`cluster_000.png`, …); `examples` has the ids of each cluster's images.

    If the run has several sizes, also write one page per size (`size_96x64.png`, …).
    """
    pages = {f"cluster_{number:03d}.png": ids for number, ids in enumerate(examples)}
    if len(index.content.sizes) > 1:
        pages |= {f"size_{size}.png": ids for size, ids in _examples_by_size(index).items()}
    # A set: the source is listed once, and an image may be on two pages.
    wanted = {id for ids in pages.values() for id in ids}
    side = min(_SIDE, int(index.manifest.made_from["resolution"]))
    sizes = [Size.parse(name) for name in index.content.sizes]
    thumbnails: dict[str, Image.Image] = {}
    for image in source.images():
        if image.id in wanted:
            # An image that became unreadable since the ingest stage is left out.
            with suppress(BadImage):
                data = image.read()
                size = nearest_size(sizes, *image_size(data))
                target = _thumbnail(size, side)
                thumbnails[image.id] = fit(open_image(data, [target]), target, size)
    for name, ids in pages.items():
        with artifact.writing(name) as path:
            sheet([thumbnails[id] for id in ids if id in thumbnails]).save(path, format="PNG")


def _examples_by_size(index: Index) -> dict[Size, list[str]]:
    """Return the ids of at most `_PER_SIZE` images of each size, evenly spread: sources are often sorted."""
    stride = {Size.parse(name): -(-bucket.images // _PER_SIZE) for name, bucket in index.content.sizes.items()}
    found: dict[Size, list[str]] = {size: [] for size in stride}
    seen: Counter[Size] = Counter()
    for chunk in range(len(index.lengths)):
        for id, size in zip(index.read(chunk, ["id"])["id"], index.sizes(chunk), strict=True):
            if seen[size] % stride[size] == 0:
                found[size].append(id)
            seen[size] += 1
    return found


def _thumbnail(size: Size, side: int) -> Size:
    """Return the largest size with about the ratio of another one that fits into a square."""
    scale = side / max(size.height, size.width)
    return Size(max(1, round(size.height * scale)), max(1, round(size.width * scale)))


def sheet(images: list[Image.Image], columns: int = _COLUMNS) -> Image.Image:
    """Return images in a grid on white, row by row, each in the middle of a cell as large as the largest image."""
    width = max((image.width for image in images), default=_SIDE)
    height = max((image.height for image in images), default=_SIDE)
    rows = max(1, -(-len(images) // columns))
    page = Image.new("RGB", (columns * (width + _GAP) + _GAP, rows * (height + _GAP) + _GAP), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        left, top = (width - image.width) // 2, (height - image.height) // 2
        page.paste(image, (_GAP + column * (width + _GAP) + left, _GAP + row * (height + _GAP) + top))
    return page
