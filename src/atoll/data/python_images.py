"""Images of a Python program as a source: they are stored in tar files of the run."""

import json
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from shutil import rmtree

from PIL.Image import Image

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.progress import progress

ROWS = 4096
"""Images per tar file: some hundred megabytes of photographs, so that several workers have files to divide."""


def store(run: Path, images: Iterable[tuple[Image, str | Mapping[str, object]]]) -> None:
    """Write images with captions or metadata into RUN/images, and make this folder the source of the run.

    The folder gets its name when it is complete. An interrupted attempt is removed by the next one: an iterator cannot
    be asked where it was.
    """
    folder = run / layout.IMAGES
    configuration.load(run)  # raises an error before the work
    if folder.exists():
        raise AtollError(f"{folder} exists: its images are stored; go on without images=, or remove the folder first")
    unfinished = folder.with_name(f".{folder.name}")
    rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    number = -1
    with ExitStack() as stack, progress("images", 0) as bar:
        for number, (image, given) in enumerate(images):
            if number % ROWS == 0:
                stack.close()
                tar = stack.enter_context(tarfile.open(unfinished / f"{number // ROWS:05d}.tar", "w"))
            encoded = BytesIO()
            image.save(encoded, "PNG")
            metadata = json.dumps({"caption": given} if isinstance(given, str) else dict(given))
            for suffix, data in (("png", encoded.getvalue()), ("json", metadata.encode())):
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, BytesIO(data))
            bar.update()
    if number < 0:
        raise AtollError("images= has no image")
    unfinished.rename(folder)
    configuration.store(run, {"data.source": layout.IMAGES, "data.kind": "webdataset"})
