"""Figures of merit of a set of samples, each with the protocol that gave it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.core.errors import AtollError
from atoll.core.progress import progress
from atoll.data.vision.lpips import Perceptual, open_perceptual
from atoll.evaluate.cache import figures
from atoll.evaluate.distances import Gaussian, Spread, frechet, kernel_distance, pairwise_mean, precision_recall
from atoll.evaluate.extractors import Alignment
from atoll.evaluate.features import FEATURES, FeatureSet, opened
from atoll.evaluate.generated import Samples

KID_LEAST, NEIGHBOURS_LEAST = 100, 500
"""Samples below which KID's error, or the holes between neighbours, drown what is measured."""
_ERROR = "samples and reference are finite: compare with `floor`, what real pictures get against other real ones"


def check_enough(samples: int, reference: FeatureSet) -> None:
    """Refuse numbers of pictures too small for the figures to mean what people take them to mean."""
    dimensions = reference.artifact.read(FEATURES).dimensions
    least = {"the Frechet distance": dimensions + 1, "KID": KID_LEAST, "precision and recall": NEIGHBOURS_LEAST}
    lacking = [f"{name} needs {count:,}" for name, count in least.items() if min(samples, len(reference)) < count]
    if lacking:
        raise AtollError(
            f"{samples:,} samples against {len(reference):,} real pictures are too few for unbiased figures through "
            f"{reference.protocol['extractor']} ({dimensions} dimensions): {', '.join(lacking)} on both sides. Raise "
            "--samples, take --reference train, use a network of fewer dimensions, or say --allow-few"
        )


def against_reference(run: Path, made: FeatureSet, reference: FeatureSet, *, label: str) -> dict[str, Any]:
    """Frechet distance, KID, precision and recall of samples against real pictures."""
    made_from = {"samples": made.digest, "reference": reference.digest}

    def compute() -> dict[str, Any]:
        count = min(len(made), len(reference))
        kid = kernel_distance(made.features, reference.features)
        near = precision_recall(_first(reference, count), made.features[:count])
        return {
            "frechet": {"value": frechet(made.gaussian, reference.gaussian), "note": _ERROR},
            "kid": {**asdict(kid), "note": "unbiased; standard_error is that of value"},
            "precision_recall": {**asdict(near), "pictures_of_each": count},
            "floor": floor(reference, len(made)),
        }

    return {
        **figures(run, "figures", label, made_from=made_from, compute=compute),
        "protocol": {**made.protocol, **reference.protocol},
    }


def _first(reference: FeatureSet, count: int) -> torch.Tensor:
    """`count` rows at random, always the same."""
    rows = torch.randperm(len(reference), generator=torch.Generator().manual_seed(0))[:count]
    return reference.features[rows]


def floor(reference: FeatureSet, samples: int) -> dict[str, Any]:
    """What real pictures get against real pictures: the small-sample bias of the Frechet distance, and KID's noise."""
    count = min(samples, len(reference) // 2)
    order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(1))
    part, rest = reference.features[order[:count]], reference.features[order[count:]]
    kid = kernel_distance(part, rest, subsets=1)
    return {
        "frechet": frechet(Gaussian.of(part), Gaussian.of(rest)),
        "kid": kid.value,
        "kid_standard_error": kid.standard_error,
        "real_pictures": count,
        "against_real_pictures": len(reference) - count,
    }


def diversity(run: Path, samples: Samples, seeds: int, *, vision: str, lpips: Path | None) -> dict[str, Any]:
    """Mean distance between pictures of one prompt, over prompts. `samples` has each prompt `seeds` times in a row."""
    distance = open_perceptual(opened(vision), lpips)
    made_from = {"samples": samples.digest, "seeds": seeds, "distance": distance.name, "weights": distance.weights}

    def compute() -> dict[str, Any]:
        pictures = np.concatenate(list(samples.chunks()))
        groups = pictures.reshape(-1, seeds, *pictures.shape[1:])
        distances = []
        with progress(f"diversity of {samples.label}", len(pictures)) as bar:
            for group in groups:
                distances.append(distance(group))
                bar.update(seeds)
        return asdict(Spread.of(pairwise_mean(torch.stack(distances))))

    answer = figures(run, "figures", f"{samples.label} diversity", made_from=made_from, compute=compute)
    return {**answer, "protocol": {**samples.protocol, **_protocol(distance), "seeds_per_prompt": seeds}}


def _protocol(distance: Perceptual) -> dict[str, str]:
    return {"distance": distance.name, "weights_sha256": distance.weights}


def alignment(run: Path, samples: Samples, model: Alignment) -> dict[str, Any]:
    """Mean cosine between pictures and their prompts in an image-text model."""
    captions = samples.prompts.captions
    if captions is None:
        raise AtollError("text alignment needs prompts; this run has classes only")
    made_from = {"samples": samples.digest, "model": model.name, "weights": model.weights}

    def compute() -> dict[str, Any]:
        scores, start = [], 0
        for chunk in samples.chunks():
            scores.append(model(chunk, captions[start : start + len(chunk)]))
            start += len(chunk)
        return asdict(Spread.of(torch.cat(scores)))

    answer = figures(run, "figures", f"{samples.label} alignment", made_from=made_from, compute=compute)
    about = {"image_text_model": model.name, "weights_sha256": model.weights}
    return {**answer, "protocol": {**samples.protocol, **about}}
