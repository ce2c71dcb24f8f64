"""Samples as files: single images and a grid, with their settings as metadata, and a plot of the routing."""

import json
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps, PngImagePlugin

from atoll.core import layout
from atoll.data.images import sheet
from atoll.ensemble.sampler import Samples, Trace

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#99ddff", "#bbbbbb")
"""Color of each expert in plots, reused beyond ten experts: Paul Tol's schemes for color-blind readers."""
# Pixels of the routing plot: row of an image, width of the bars, margin, line of the legend. By eye.
_ROW, _WIDTH, _MARGIN, _LEGEND = 56, 640, 8, 22


def save(samples: Samples, folder: Path) -> dict[str, list[str] | str]:
    """Write 000.png, 001.png, …, grid.png and, if the routing was recorded, routing.png; return the paths by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, image in enumerate(samples.images):
        files.append(str(folder / f"{number:03d}.png"))
        image.save(files[-1], pnginfo=_described(samples.metadata(number)))
    # A square grid up to 64 images, then eight columns, so that it stays readable on a screen.
    columns = min(8, max(1, round(len(samples.images) ** 0.5)))
    grid = folder / "grid.png"
    settings = {**samples.metadata(0), "prompt": samples.prompts, "number": None}
    sheet(samples.images, columns).save(grid, pnginfo=_described(settings))
    written: dict[str, list[str] | str] = {"images": files, "grid": str(grid)}
    if samples.trace is not None:
        draw_trace(samples.trace, samples.images).save(folder / "routing.png")
        written["routing"] = str(folder / "routing.png")
    return written


def to_png(image: Image.Image, settings: dict[str, object] | None = None) -> bytes:
    """Return an image as the bytes of a PNG file with its settings as metadata."""
    target = BytesIO()
    image.save(target, format="PNG", pnginfo=None if settings is None else _described(settings))
    return target.getvalue()


def _described(settings: dict[str, object]) -> PngImagePlugin.PngInfo:
    # An iTXt chunk: international text, because prompts may be in any script.
    info = PngImagePlugin.PngInfo()
    info.add_itxt("atoll", json.dumps(settings, ensure_ascii=False))
    return info


def draw_trace(trace: Trace, images: list[Image.Image]) -> Image.Image:
    """Plot the experts' weights of each image over the steps as stacked bars, from noise (left) to data (right)."""
    steps, count, experts = trace.weights.shape
    step = max(3, _WIDTH // steps)
    left = _ROW + 2 * _MARGIN
    width, height = left + step * steps + _MARGIN, 2 * _LEGEND + count * (_ROW + _MARGIN) + _MARGIN
    page = Image.new("RGB", (max(width, 360), height), "white")
    pen = ImageDraw.Draw(page)
    colors = [COLORS[number % len(COLORS)] for number in range(experts)]
    x = float(left)
    for name, color in zip(trace.experts, colors, strict=True):
        expert = layout.expert_number(name)
        label = name if expert is None else f"{expert:03d}"
        pen.rectangle((x, 6, x + 10, 16), fill=color)
        pen.text((x + 14, 5), label, fill="black")
        x += 26 + pen.textlength(label)
    for number in range(count):
        top = 2 * _LEGEND + number * (_ROW + _MARGIN)
        page.paste(ImageOps.contain(images[number].convert("RGB"), (_ROW, _ROW)), (_MARGIN, top))
        for position in range(steps):
            bottom = float(top + _ROW)
            for weight, color in zip(trace.weights[position, number].tolist(), colors, strict=True):
                top_of_part = bottom - weight * _ROW
                if round(top_of_part) < round(bottom):  # a small weight may have no pixel
                    x = left + step * position
                    pen.rectangle((x, round(top_of_part), x + step - 2, round(bottom) - 1), fill=color)
                bottom = top_of_part
    for position in range(0, steps, max(1, steps // 5)):
        pen.text((left + step * position, _LEGEND), f"t = {float(trace.t[position]):.2f}", fill="black")
    return page
