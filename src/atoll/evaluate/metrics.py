"""Figures of merit of a set of samples, each with the protocol that gave it."""

from pathlib import Path

import numpy as np
import torch

from atoll.core.errors import AtollError
from atoll.core.progress import progress
from atoll.data.vision.lpips import open_perceptual
from atoll.evaluate import results
from atoll.evaluate.cache import cached
from atoll.evaluate.distances import Gaussian, frechet, kernel_distance, pairwise_mean, precision_recall
from atoll.evaluate.extractors import Alignment
from atoll.evaluate.features import FeatureSet, Reference, of_samples, opened
from atoll.evaluate.generated import Samples
from atoll.evaluate.results import Baseline, Distances, Diversity, Frechet, Kid, Metrics, PrecisionRecall, Spread

KID_LEAST, NEIGHBOURS_LEAST = 100, 500
"""Samples below which KID's error, or the holes between neighbours, drown what is measured."""
_ERROR = "samples and reference are finite: compare with `floor`, what real pictures get against other real ones"


def check_enough(samples: int, reference: Reference) -> None:
    """Refuse numbers of pictures too small for the figures to mean what people take them to mean."""
    dimensions = reference.content.dimensions
    least = {"the Frechet distance": dimensions + 1, "KID": KID_LEAST, "precision and recall": NEIGHBOURS_LEAST}
    lacking = [f"{name} needs {count:,}" for name, count in least.items() if min(samples, len(reference)) < count]
    if lacking:
        raise AtollError(
            f"{samples:,} samples against {len(reference):,} real pictures are too few for unbiased figures through "
            f"{reference.content.protocol.extractor} ({dimensions} dimensions): {', '.join(lacking)} on both sides. "
            "Raise --num-images, take --reference train, use a network of fewer dimensions, or use --allow-small"
        )


def against_reference(run: Path, samples: Samples, reference: Reference, *, vision: str) -> Metrics:
    """Return Frechet distance, KID, precision and recall of samples against real images."""
    made, label = of_samples(run, samples, vision), f"{samples.label} {Path(vision).name}"
    made_from = {"samples": made.digest, "reference": reference.digest}

    def compute() -> Distances:
        count = min(len(made), len(reference))
        kid = kernel_distance(made.features(), reference.features())
        near = precision_recall(_first(reference, count), made.features()[:count])
        return Distances(
            frechet=Frechet(value=frechet(made.gaussian(), reference.gaussian()), note=_ERROR),
            kid=Kid(**dict(kid), note="unbiased; standard_error is that of value"),
            precision_recall=PrecisionRecall(**dict(near), pictures_of_each=count),
            floor=floor(reference, len(made)),
        )

    found = cached(run, "figures", label, made_from=made_from, result=Distances, compute=compute)
    protocol = results.MetricsProtocol(
        **dict(samples.protocol()),
        **dict(reference.content.protocol),
        reference=reference.about,
        reference_fingerprint=reference.digest,
    )
    return Metrics(**dict(found), protocol=protocol)


def _first(reference: FeatureSet, count: int) -> torch.Tensor:
    """`count` rows at random, always the same."""
    rows = torch.randperm(len(reference), generator=torch.Generator().manual_seed(0))[:count]
    return reference.features()[rows]


def floor(reference: FeatureSet, samples: int) -> Baseline:
    """What real pictures get against real pictures: the small-sample bias of the Frechet distance, and KID's noise."""
    count = min(samples, len(reference) // 2)
    order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(1))
    part, rest = reference.features()[order[:count]], reference.features()[order[count:]]
    kid = kernel_distance(part, rest, subsets=1)
    return Baseline(
        frechet=frechet(Gaussian.of(part), Gaussian.of(rest)),
        kid=kid.value,
        kid_standard_error=kid.standard_error,
        real_pictures=count,
        against_real_pictures=len(reference) - count,
    )


def diversity(run: Path, samples: Samples, seeds: int, *, vision: str, lpips: Path | None) -> Diversity:
    """Mean distance between pictures of one prompt, over prompts. `samples` has each prompt `seeds` times in a row."""
    distance = open_perceptual(opened(vision), lpips)
    made_from = {"samples": samples.digest(), "seeds": seeds, "distance": distance.name, "weights": distance.weights}

    def compute() -> Spread:
        pictures = np.concatenate(list(samples.chunks()))
        groups = pictures.reshape(-1, seeds, *pictures.shape[1:])
        distances = []
        with progress(f"diversity of {samples.label}", len(pictures)) as bar:
            for group in groups:
                distances.append(distance(group))
                bar.update(seeds)
        return Spread.of(pairwise_mean(torch.stack(distances)))

    label = f"{samples.label} diversity"
    found = cached(run, "figures", label, made_from=made_from, result=Spread, compute=compute)
    protocol = results.DiversityProtocol(
        **dict(samples.protocol()), distance=distance.name, weights_sha256=distance.weights, seeds_per_prompt=seeds
    )
    return Diversity(**dict(found), protocol=protocol)


def alignment(run: Path, samples: Samples, model: Alignment) -> results.Alignment:
    """Mean cosine between pictures and their prompts in an image-text model."""
    captions = samples.prompts.captions
    if captions is None:
        raise AtollError("text alignment needs prompts; this run has classes only")
    made_from = {"samples": samples.digest(), "model": model.name, "weights": model.weights}

    def compute() -> Spread:
        scores, start = [], 0
        for chunk in samples.chunks():
            scores.append(model(chunk, captions[start : start + len(chunk)]))
            start += len(chunk)
        return Spread.of(torch.cat(scores))

    label = f"{samples.label} alignment"
    found = cached(run, "figures", label, made_from=made_from, result=Spread, compute=compute)
    protocol = results.AlignmentProtocol(
        **dict(samples.protocol()), image_text_model=model.name, weights_sha256=model.weights
    )
    return results.Alignment(**dict(found), protocol=protocol)
