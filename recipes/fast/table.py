"""Print the results of the arms of `run.sh` as a Markdown table over all finished seeds: table.py ROOT ARM...

Columns: the lowest validation error; the training FLOPs until the error is at most the lowest one of `base` with the
same seed, relative to the FLOPs of `base` until then; KID; all training FLOPs and seconds relative to `base`. The
FLOPs are those of the manifest, with all overheads (the projector of the alignment, Newton-Schulz of Muon).
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Arm:
    """One finished training."""

    errors: list[tuple[int, float]]
    """Images seen and validation error of every validation."""
    images: int
    flops: float
    seconds: float
    kid: float | None

    @property
    def lowest(self) -> float:
        """The lowest validation error."""
        return min(error for _, error in self.errors)

    def flops_to(self, error: float) -> float | None:
        """Return the training FLOPs until the validation error is at most this; None if it never is."""
        reached = next((images for images, found in self.errors if found <= error), None)
        return None if reached is None else self.flops * reached / self.images


def read_arm(run: Path) -> Arm | None:
    """Return the results of a run; None if it is not finished."""
    manifest = run / "experts/000/final/manifest.json"
    if not manifest.exists():
        return None
    compute = json.loads(manifest.read_text())["content"]["compute"]
    lines = [json.loads(line) for line in (run / "experts/000/metrics.jsonl").read_text().splitlines()]
    errors = [(line["images"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    evaluation, kid = run / "evaluation/fast.json", None
    if evaluation.exists():
        kid = 1000 * json.loads(evaluation.read_text())["models"][0]["metrics"]["inception"]["kid"]["value"]
    return Arm(errors, compute["images"], compute["flops"], compute["seconds"], kid)


def cell(values: list[float | None], digits: int) -> str:
    """Return mean and spread over the seeds; `never` for the seeds in which the error was not reached."""
    found = [value for value in values if value is not None]
    if not found:
        return "never" if values else ""
    spread = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    missing = f" (never in {len(values) - len(found)})" if len(found) < len(values) else ""
    return f"{statistics.fmean(found):.{digits}f}{spread}{missing}"


def main(root: Path, names: list[str]) -> None:
    """Print the table."""
    print("| arm | seeds | lowest validation error | FLOPs to the error of base | KID x1000 | all FLOPs | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        pairs = []
        for seed in sorted(root.glob("seed*")):
            arm, base = read_arm(seed / f"fast-{name}"), read_arm(seed / "fast-base")
            if arm and base:
                pairs.append((arm, base))
        if not pairs:
            continue
        reached = [
            None if (flops := arm.flops_to(base.lowest)) is None else flops / (base.flops_to(base.lowest) or 1)
            for arm, base in pairs
        ]
        columns = [
            cell([arm.lowest for arm, _ in pairs], 4),
            cell(reached, 2),
            cell([arm.kid for arm, _ in pairs if arm.kid is not None], 1),
            cell([arm.flops / base.flops for arm, base in pairs], 2),
            cell([arm.seconds / base.seconds for arm, base in pairs], 2),
        ]
        print(f"| {name} | {len(pairs)} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
