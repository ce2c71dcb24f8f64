"""The notebook of the tutorials, executed as a reader would: every cell, with its images at the end."""

import base64
import os
from io import BytesIO
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "docs/tutorials/from-python.ipynb"
COLORS = {"red": (220, 20, 60), "green": (46, 139, 87), "blue": (65, 105, 225)}


def pictures(cell: nbformat.NotebookNode) -> list[Image.Image]:
    found = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [Image.open(BytesIO(base64.b64decode(data))).convert("RGB") for data in found]


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_the_notebook_ends_in_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    client = nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (samples,), (routing,) = pictures(code[-2]), pictures(code[-1])
    assert samples.size == (576, 96)
    assert routing.size[1] > 6 * 56
    # Labels cycle through circle, square and triangle: each image has the color of its own shape.
    for number in range(6):
        left = 96 * number
        pixels = np.asarray(samples.crop((left, 0, left + 96, 96)), dtype=float).reshape(-1, 3)
        colored = pixels[pixels.min(1) < 150]
        nearest = min(COLORS, key=lambda name: np.abs(colored.mean(0) - COLORS[name]).sum())
        assert nearest == list(COLORS)[number % 3], number
