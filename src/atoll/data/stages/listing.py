"""What is decided before the pass, from a listing of the source without decoding: `listing.json` of the index."""

from pathlib import Path

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, to_json
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.data.buckets import choose_sizes
from atoll.data.sources.base import describe
from atoll.data.stages.base import Job

_FILE = "listing.json"


class Listing(Content):
    """What is decided before the pass, from a listing of the source."""

    images: int
    """Number of images, readable or not."""
    train: int
    """Number of images of the training split."""
    labels: int
    """Number of classes."""
    sizes: tuple[str, ...]
    """The buckets: sizes that images are cropped and resized to."""

    @property
    def buckets(self) -> tuple[Size, ...]:
        """The buckets as sizes."""
        return tuple(map(Size.parse, self.sizes))

    @classmethod
    def find(cls, run: Path, data: str = layout.DATA) -> "Listing | None":
        """Return the listing of a run; None if no worker has written it yet."""
        try:
            return cls.model_validate(Artifact(run, layout.INGEST.replace(layout.DATA, data, 1)).read_json(_FILE))
        except FileNotFoundError:
            return None

    @classmethod
    def of(cls, job: Job) -> "Listing":
        """Return the listing of a run; list the source if no worker has."""
        if found := cls.find(job.run):
            return found
        counted = describe(job.source)
        if not counted.images:
            raise AtollError(f"{job.config.data.source} has no images; change data.source")
        # The sizes of a source that has grown stay the same, because unchanged chunks have them.
        before = cls.find(job.run, layout.PREVIOUS)
        data, images = job.config.data, counted.images
        sizes = before.buckets if before else choose_sizes(data, job.source, images=images, multiple=job.multiple)
        made = cls(images=images, train=counted.train, labels=counted.labels, sizes=tuple(str(size) for size in sizes))
        # Several workers may list the source at the same time. The first file counts for all of them.
        artifact = Artifact(job.run, layout.INGEST)
        artifact.create(_FILE, to_json(made.model_dump()))
        return cls.find(job.run) or made
