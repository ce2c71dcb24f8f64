"""The HTTP API of a run whose images have five sizes."""

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

import atoll
from sized import SIZES
from studio.conftest import http, serving


@pytest.fixture(scope="module")
def url(sized_run: Path) -> Iterator[str]:
    with serving(sized_run) as (address, _):
        yield address


def image(generated: dict[str, Any]) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(generated["png"])))


def test_the_run_lists_its_sizes(url: str) -> None:
    run = http.get(f"{url}/v1/run").json()
    assert run["size"] == [16, 16]
    assert run["sizes"] == [[size.height, size.width] for size in SIZES]


def test_images_of_a_size_equal_those_of_the_library(url: str, sized_run: Path) -> None:
    body = {"label": "dots", "num_images": 2, "steps": 3, "guidance_scale": 2.0, "seed": 4, "width": 20, "height": 12}
    response = http.post(f"{url}/v1/images", json=body).json()
    expected = atoll.load(sized_run).generate(
        label="dots", num_images=2, width=20, height=12, num_inference_steps=3, guidance_scale=2.0, seed=4
    )
    for generated, other in zip(response["images"], expected.images, strict=True):
        assert image(generated).size == (20, 12)
        assert np.abs(np.asarray(image(generated), int) - np.asarray(other, int)).max() <= 1
        assert (generated["settings"]["width"], generated["settings"]["height"]) == (20, 12)
    default = http.post(f"{url}/v1/images", json={"steps": 1}).json()["images"][0]
    assert image(default).size == (16, 16)
    assert default["settings"]["width"] == 16


def test_requests_for_several_sizes_run_together(url: str) -> None:
    """Each is the same as alone, although images of two sizes cannot share a forward pass."""
    bodies = [
        {"label": "dots", "num_images": 2, "steps": 12, "seed": 1, "width": size.width, "height": size.height}
        for size in SIZES
    ]
    found: list[list[np.ndarray]] = [[] for _ in bodies]

    def request(number: int) -> None:
        response = http.post(f"{url}/v1/images", json=bodies[number]).json()
        found[number] = [np.asarray(image(generated), int) for generated in response["images"]]

    threads = [Thread(target=request, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = list(found)
    for number, size in enumerate(SIZES):
        request(number)
        for one, other in zip(together[number], found[number], strict=True):
            assert one.shape == (size.height, size.width, 3)
            assert np.abs(one - other).max() <= 1


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"width": 20}, "height", "give both width and height, or neither"),
        ({"height": 12}, "width", "give both width and height, or neither"),
        ({"width": 12, "height": 12}, "width", "images of 16x16, 20x12, 12x20, 24x8, 8x24 pixels"),
        ({"width": 65536, "height": 65536}, "width", "images of 16x16"),
        ({"size": [16, 16]}, "size", "Extra inputs are not permitted"),
    ],
)
def test_other_sizes_are_errors(url: str, body: dict[str, Any], field: str, message: str) -> None:
    response = http.post(f"{url}/v1/images", json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == field
    assert message in response.json()["error"]["message"]
