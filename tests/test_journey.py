"""The first hour with somebody's own photographs, from `atoll init` to an export."""

import io
import json
import random
import shutil
from pathlib import Path

import pytest
from PIL import Image

import atoll
from atoll import cli
from atoll.core import config as configuration
from shapes import draw

SETTINGS = {
    "clusters.count": "2", "data.resolution": "32", "latents.autoencoder": "pixels", "features.resolution": "64",
    "networks.default": "{name: DiT-XS/8, width: 32, depth: 2, heads: 2}", "train.log_every": "64",
    "router.network": "{name: DiT-XS/8, width: 32, depth: 2, heads: 2}", "router.total_images": "64",
}  # fmt: skip


def write_photographs(folder: Path) -> None:
    """Write images as they are found on a disk: of many formats, in folders and with names in several scripts."""
    rng = random.Random(0)
    apples, japan = folder / "Äpfel & Birnen", folder / "日本"
    for own in (apples, japan):
        own.mkdir(parents=True)
    # Captions beside the images, and in a table
    for number in range(40):
        draw("circle", rng).resize((64, 48)).save(apples / f"ein Apfel {number:02d}.jpg")
        (apples / f"ein Apfel {number:02d}.txt").write_text(f"ein Apfel {number}", encoding="utf-8")
    rows = []
    for number in range(40):
        draw("square", rng).save(japan / f"写真{number:02d}.png")
        rows.append(json.dumps({"file_name": f"写真{number:02d}.png", "text": f"写真 {number}"}, ensure_ascii=False))
    (japan / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    # Unusual images
    exif = Image.Exif()
    exif[0x0112] = 6
    draw("triangle", rng).save(folder / "rotated.jpg", exif=exif)
    draw("triangle", rng).convert("CMYK").save(folder / "printed.jpg")
    draw("triangle", rng).convert("L").convert("I;16").save(folder / "scanned.png")
    frames = [draw(kind, rng) for kind in ("circle", "square")]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "pages.tiff", save_all=True, append_images=frames[1:])
    draw("circle", rng).resize((400, 20)).save(folder / "thin.webp")
    # Unusable ones
    (folder / "empty.png").write_bytes(b"")
    (folder / "broken.jpg").write_text("<html>not found</html>")
    whole = io.BytesIO()
    draw("square", rng).resize((200, 200)).save(whole, "JPEG")
    (folder / "truncated.jpg").write_bytes(whole.getvalue()[:-200])
    draw("square", rng).save(folder / "latin.png")
    (folder / "latin.txt").write_text("Käse", encoding="latin-1")
    # No images
    for name in ("film.mp4", "Thumbs.db", ".DS_Store"):
        (folder / name).write_bytes(b"\0")


@pytest.mark.slow
def test_from_photographs_to_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str, code: int = 0) -> str:
        capfd.readouterr()
        assert cli.main(list(words)) == code, capfd.readouterr().err
        output = capfd.readouterr()
        return output.out + output.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    photographs = Path("Meine Fotos").absolute()
    write_photographs(photographs)
    options = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]
    run("init", "runs/mine", "--preset", "demo", "--data.source", "Meine Fotos", *options)

    # Later commands may run in another folder.
    elsewhere = tmp_path / "runs"
    monkeypatch.chdir(elsewhere)
    shown = run("prepare", "mine", "--dry-run")
    assert "90 images" in shown
    assert "ignored files: 1 .db, 1 .mp4\n" in shown
    assert "patches" not in shown
    assert "fits 24 GB: yes\n" in run("train", "mine", "--dry-run")

    # Unusable files are named. After they are fixed or removed, the same command goes on.
    shown = run("prepare", "mine", code=2)
    assert "4 of 90 images are unusable" in shown
    for name in ("empty.png: ", "broken.jpg: ", "truncated.jpg: ", "latin.png: "):
        assert f"\n  {name}" in shown
    (photographs / "empty.png").unlink()
    (photographs / "broken.jpg").unlink()
    (photographs / "latin.txt").write_text("Käse", encoding="utf-8")
    shutil.copy(photographs / "rotated.jpg", photographs / "truncated.jpg")
    shown = run("prepare", "mine")
    assert "2 gone: broken, empty\n" in shown
    assert "2 changed: latin, truncated\n" in shown
    assert "ingest: 88 images, 0 rejected, " in shown
    assert "patches" not in shown

    # An image that is added later
    draw("triangle", random.Random(1)).save(photographs / "one more.png")
    shown = run("prepare", "mine")
    assert "1 new: one more\n" in shown
    assert "gone" not in shown
    assert "ingest: 89 images, 0 rejected, " in shown

    # Training, with settings of the first launch
    words = [line.split()[:3] for line in run("status", "mine").splitlines() if "not started" in line]
    assert words == [[job, "not", "started"] for job in ("experts/000", "experts/001", "router")]
    shown = run("launch", "mine", "--train.total_images", "64")
    assert "written into mine/atoll.yaml: train.total_images 64\n" in shown
    assert " inf" not in shown
    assert configuration.load(elsewhere / "mine").train.total_images == 64
    lines = json.loads(run("status", "mine", "--json"))
    assert [line["state"] for line in lines] == ["done"] * 3
    assert all(line["loss"] > 0 for line in lines)
    assert "all requested jobs are done" in run("launch", "mine")

    # Images, metrics and a model to give away
    run("sample", "mine", "ein Apfel", "写真", "--steps", "4", "--num-images", "4")
    assert len(list(Path("mine/samples").glob("0*.png"))) == 4
    assert "it has 2 experts, expert:0 to expert:1" in run("sample", "mine", "--model", "expert:7", code=2)
    few = ("--num-images", "8", "--num-real", "16", "--num-val", "8", "--steps", "2", "--routings", "top-1")
    fast = ("--extractors", "efficientnet-lite0", "--without", "diversity", "trajectories")
    run("evaluate", "mine", *few, *fast, "--allow-small")
    run("report", "mine", "--steps", "2")
    assert Path("mine/report.html").is_file()
    run("export", "mine", "my-model")
    assert "no such folder" in run("sample", "mine/nothing", code=2)
    assert len(atoll.load("./my-model").generate(["ein Apfel"], num_inference_steps=2).images) == 1
