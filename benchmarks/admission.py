"""Print every figure that admission looks at, for all experts of a run: `python benchmarks/admission.py RUN`.

A figure above its limit means a refusal. Of figures for many times, the one nearest to its limit is printed.
"""

import argparse
import json
import math
import re
from pathlib import Path

from atoll.apps.share.measured import figures, float32_options
from atoll.core import layout
from atoll.data.dataset import Shards
from atoll.experts.expert import open_expert
from atoll.experts.run import expert_of_run


def main() -> None:
    """Measure each expert beside all others and the shared start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="measurements of each expert, with a seed each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    run, results = arguments.run, {}
    finished = [job for job in layout.jobs(run) if (run / layout.final(job) / layout.MANIFEST_FILE).is_file()]
    for job in filter(layout.is_expert, finished):
        images = Shards.open(run, [layout.expert_number(job) or 0], "train")

        def opened(name: str, images: Shards = images):
            return open_expert(expert_of_run(run, name), images.statistics, float32_options())

        others = [name for name in finished if name != job and (layout.is_expert(name) or name == layout.START)]
        worst: dict[str, tuple[float, float]] = {}
        for seed in range(arguments.seeds):
            for figure in figures(opened(job), images, map(opened, others), seed=10_007 * seed):
                # The same figure at all times, and beside all other networks.
                name = re.sub(r"at times? .*? (?=with)|(?<=better than )(experts/.*|start)", "… ", figure.what)
                worst[name] = max(worst.get(name, (-math.inf, figure.limit)), (figure.value, figure.limit))
        results[job] = worst
        if not arguments.json:
            for name, (value, limit) in worst.items():
                print(f"{job}  {value:8.4f} of {limit:6.3f}{'  REFUSED' if not value <= limit else ''}  {name}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
