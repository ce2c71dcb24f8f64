"""Read sources in a process of its own, and print what became of every image and how much memory it took."""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.data.images import BadImage, decode
from atoll.data.sources.open import open_source


def read(folder: str) -> dict[str, object]:
    """Return the outcome of every image: `fine`, or the reason why it is rejected."""
    outcomes: dict[str, str] = {}
    captions: Counter[str | None] = Counter()
    try:
        for image in open_source(folder).images():
            captions[image.caption] += 1
            try:
                decode(image.read(), 16)
                outcomes[image.id] = "fine"
            except BadImage as bad:
                outcomes[image.id] = bad.reason
    except AtollError as error:
        return {"error": str(error)}
    return {"outcomes": outcomes, "captions": [caption for caption in captions if caption]}


def peak_megabytes() -> float:
    """Return the largest resident memory so far; `ru_maxrss` would include that of the parent process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    before = peak_megabytes()
    found = [read(folder) for folder in sys.argv[1:]]
    print(json.dumps({"found": found, "megabytes": peak_megabytes() - before}))
