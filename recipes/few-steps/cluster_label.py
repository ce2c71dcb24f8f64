"""Make a run whose monolith is told the cluster: the training images of RUN, with their cluster as the class.

    python recipes/few-steps/cluster_label.py RUN OUT
    atoll prepare OUT && atoll train OUT --monolith

A prompt of OUT has the class of its image, which is a draw from p(cluster | prompt) of the data.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from atoll.core.layout import CONFIG_FILE
from atoll.data.dataset import Shards
from atoll.data.sources.open import open_source


def main(run: Path, out: Path) -> None:
    """Write the images of RUN as parquet, and the settings of OUT."""
    settings = yaml.safe_load((run / CONFIG_FILE).read_text())
    cluster_of: dict[str, str] = {}
    for cluster in range(settings["clusters"]["count"]):
        cluster_of |= dict.fromkeys(Shards.open(run, [cluster]).ids(), str(cluster))
    images = [image for image in open_source(settings["data"]["source"]).images() if image.id in cluster_of]
    out.mkdir(parents=True, exist_ok=True)
    table = {
        "id": [image.id for image in images],
        "image": [image.read() for image in images],
        "caption": [image.caption for image in images],
        "label": [cluster_of[image.id] for image in images],
    }
    pq.write_table(pa.table(table), out / "images.parquet")
    # The validation images are left out, so that both runs have the same training images.
    settings["data"] |= {"source": "images.parquet", "label": "label", "val_fraction": 0}
    settings["clusters"]["method"] = "labels"  # the clusters of RUN
    settings["train"]["conditioning"] = "both"
    (out / CONFIG_FILE).write_text(yaml.safe_dump(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
