"""Diagnostics on measurements with known metrics."""

import math

import pytest
import torch
from torch import Tensor

from atoll.apps.evaluate.diagnostics import (
    Measurements,
    calibration_error,
    error_matrix,
    mean_angle,
    router_metrics,
    summarize,
)
from atoll.apps.evaluate.generated import shares
from atoll.apps.evaluate.trajectories import nearest_distances


def test_mean_angle_between_experts() -> None:
    east, north = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
    east[..., 0], north[..., 1] = 1, 5
    assert mean_angle(torch.stack([east, north])[None]).item() == pytest.approx(90)
    assert mean_angle(torch.stack([east, -3 * east])[None]).item() == pytest.approx(180)
    assert mean_angle(torch.stack([east, 2 * east, north])[None]).item() == pytest.approx(60)
    assert mean_angle(torch.stack([east])[None]).item() == 0


def test_calibration_error_of_known_routers() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(20_000, generator=generator)
    calibrated = (torch.rand(20_000, generator=generator) < confidence).float()
    assert calibration_error(confidence, calibrated) < 0.02
    assert calibration_error(torch.full((100,), 0.9), torch.cat([torch.ones(60), torch.zeros(40)])) == pytest.approx(
        0.3
    )
    assert calibration_error(torch.empty(0), torch.empty(0)) is None


def test_router_metrics_by_time() -> None:
    t = torch.tensor([0.05, 0.05, 0.95, 0.95])
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.75, 0.25]])
    found = router_metrics(p, torch.tensor([0, 1, 1, 0]), t)
    assert found.accuracy.mean == 0.75
    assert found.accuracy.by_time[0] == 1
    assert found.accuracy.by_time[9] == 0.5
    assert found.accuracy.by_time[4] is None
    assert found.cross_entropy.by_time[9] == pytest.approx((math.log(2) - math.log(0.75)) / 2)


def measurements(column: list[int]) -> Measurements:
    t = torch.tensor([0.1, 0.1, 0.9])
    errors = torch.tensor([[1.0, 3.0], [5.0, 1.0], [2.0, 4.0]])
    cluster = torch.tensor([0, 2, 2])
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9]])
    angles: Tensor = torch.tensor([10.0, 20.0, 30.0])
    return Measurements(
        t, cluster, torch.tensor(column), p, errors, angles, angles, {"top-1": torch.tensor([1.0, 5.0, 4.0])}
    )


def test_errors_of_experts_on_clusters() -> None:
    found = error_matrix(measurements([0, 1, 1]))
    assert found.mean == ((1.0, 3.0), (None, None), (3.5, 2.5))
    assert found.by_time[1] == ((1.0, 3.0), (None, None), (5.0, 1.0))


def test_images_of_missing_experts_count_only_where_their_expert_is_not_needed() -> None:
    whole, partial = summarize(measurements([0, 1, 1])), summarize(measurements([0, -1, -1]))
    assert whole.own_cluster_error.mean == pytest.approx(2.0)
    assert whole.other_clusters_error.mean == pytest.approx(10 / 3)
    assert whole.router.accuracy.mean == pytest.approx(2 / 3)
    assert whole.router_choice_is_best.mean == pytest.approx(1 / 3)
    assert whole.router_choice_error.mean == pytest.approx(10 / 3)
    assert partial.own_cluster_error.mean == 1.0
    assert partial.router.accuracy.mean == 1.0
    assert partial.velocity_error == whole.velocity_error


def test_distance_to_the_nearest_latent_of_each_cluster() -> None:
    clusters = [torch.zeros(1, 4), torch.tensor([[2.0, 2, 2, 2], [1, 1, 1, 1]])]
    distances = nearest_distances(torch.full((1, 1, 2, 2), 3.0), clusters)
    assert distances.tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize(("sizes", "count", "wanted"), [([1, 1, 1], 4, 4), ([90, 9, 1], 10, 10), ([5, 7], 1, 1)])
def test_shares_add_up_and_follow_the_sizes(sizes: list[int], count: int, wanted: int) -> None:
    found = shares(sizes, count)
    assert sum(found) == wanted
    assert all(abs(share - count * size / sum(sizes)) < 1 for share, size in zip(found, sizes, strict=True))
