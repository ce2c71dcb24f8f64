"""Metrics of a set of generated images, each with the protocol it was measured under."""

from pathlib import Path

import numpy as np
import torch

from atoll.apps.evaluate.cache import cached
from atoll.apps.evaluate.distances import Gaussian, frechet, kernel_distance, pairwise_mean, precision_recall
from atoll.apps.evaluate.extractors import CaptionScorer
from atoll.apps.evaluate.feature_sets import FeatureSet, Reference, generated_features, opened
from atoll.apps.evaluate.generated import GeneratedSet, rows_by_size
from atoll.apps.evaluate.results import Baseline, Metrics, Spread
from atoll.core.errors import AtollError
from atoll.core.progress import progress
from atoll.encoders.lpips import open_perceptual
from atoll.encoders.pretrained import Pixels

# Orders of magnitude, not measured limits. With fewer images the standard error of KID, or the gaps between the
# neighborhoods of precision and recall, are larger than the differences between models.
MIN_KID, MIN_PRECISION_RECALL = 100, 500


def check_enough(num_images: int, num_real: int | None, *, extractor: str, dimensions: int) -> None:
    """Raise an error if there are too few images for the metrics to be comparable with published ones.

    `num_real` is None if only the statistics of the real images are known.
    """
    # A covariance of N images has rank N - 1: with fewer than D + 1 it is singular, and bias dominates.
    least = {"the Frechet distance": dimensions + 1, "KID": MIN_KID, "precision and recall": MIN_PRECISION_RECALL}
    found = num_images if num_real is None else min(num_images, num_real)
    lacking = [f"{name} needs {count:,}" for name, count in least.items() if found < count]
    if lacking:
        real = "" if num_real is None else f" and {num_real:,} real"
        raise AtollError(
            f"{num_images:,} generated{real} images are too few for {extractor} features ({dimensions} "
            f"dimensions): {', '.join(lacking)} on both sides. Raise --num-images, use --reference train, choose "
            "--extractors with fewer dimensions, or accept biased metrics with --allow-small"
        )


def against_reference(run: Path, images: GeneratedSet, reference: Reference, *, vision: str) -> Metrics:
    """Return Frechet distance, KID, precision and recall of generated against real images."""
    generated, label = generated_features(run, images, vision), f"{images.label} {Path(vision).name}"
    made_from = {"generated": generated.digest(), "reference": reference.digest()}

    def compute() -> Metrics:
        measured = Metrics(
            frechet=frechet(generated.gaussian(), reference.gaussian()),
            protocol=images.protocol(
                **reference.content().protocol, reference=reference.about, reference_fingerprint=reference.digest()
            ),
        )
        if not len(reference):
            return measured
        # Precision and recall need as many real images as generated ones: a random part, always the same.
        count = min(len(generated), len(reference))
        rows = torch.randperm(len(reference), generator=torch.Generator().manual_seed(0))[:count]
        compared = {
            "kid": kernel_distance(generated.features(), reference.features()),
            "precision_recall": precision_recall(reference.features()[rows], generated.features()[:count]),
            "real_baseline": real_baseline(reference, len(generated)),
        }
        return measured.model_copy(update=compared)

    return cached(run, "metrics", label, made_from=made_from, result=Metrics, compute=compute)


def real_baseline(reference: FeatureSet, num_images: int) -> Baseline:
    """Return the real-vs-real baseline: the distances between two disjoint sets of real images.

    One set has as many images as the generated one, at most half of all; the other has the rest. The Frechet distance
    of the baseline is the bias of these numbers of images, and its KID shows the noise.
    """
    count = min(num_images, len(reference) // 2)
    order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(1))
    part, rest = reference.features()[order[:count]], reference.features()[order[count:]]
    return Baseline(
        frechet=frechet(Gaussian.of(part), Gaussian.of(rest)),
        kid=kernel_distance(part, rest, subsets=1),
        num_images=count,
        num_real=len(reference) - count,
    )


def diversity(run: Path, images: GeneratedSet, seeds: int, *, vision: str, lpips: Path | None) -> Spread:
    """Return the mean distance between images of one prompt. `images` has each prompt `seeds` times in a row."""
    distance = open_perceptual(opened(vision), lpips)
    made_from = {"generated": images.digest(), "seeds": seeds, "distance": distance.name, "weights": distance.weights}

    def compute() -> Spread:
        pixels = [image for chunk in images.chunks() for image in chunk]
        distances = []
        with progress(f"diversity of {images.label}", len(pixels), unit="images") as bar:
            for first in range(0, len(pixels), seeds):
                distances.append(distance(np.stack(pixels[first : first + seeds])))  # (seeds, H, W, 3), one prompt
                bar.update(seeds)
        protocol = images.protocol(extractor=distance.name, weights_sha256=distance.weights)
        return Spread.of(pairwise_mean(torch.stack(distances)), protocol)

    return cached(run, "metrics", f"{images.label} diversity", made_from=made_from, result=Spread, compute=compute)


def alignment(run: Path, images: GeneratedSet, model: CaptionScorer) -> Spread:
    """Return the mean cosine between images and their prompts in an image-text model."""
    captions = images.prompts.captions
    assert captions is not None
    made_from = {"generated": images.digest(), "model": model.name, "weights": model.weights}

    def compute() -> Spread:
        scores, start = [], 0
        for chunk in images.chunks():
            own = captions[start : start + len(chunk)]

            def score(pixels: Pixels, rows: list[int], own: list[str] = own) -> torch.Tensor:
                return model(pixels, [own[row] for row in rows])

            scores.append(rows_by_size(score, chunk))
            start += len(chunk)
        return Spread.of(torch.cat(scores), images.protocol(extractor=model.name, weights_sha256=model.weights))

    return cached(run, "metrics", f"{images.label} alignment", made_from=made_from, result=Spread, compute=compute)
