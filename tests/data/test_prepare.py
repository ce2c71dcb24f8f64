import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file

from atoll import cli
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.presets import PRESETS
from atoll.data import chunks
from atoll.data.chunks import WorkerShare
from atoll.data.index import Index
from atoll.data.kmeans import nearest_center
from atoll.data.prepare import STAGES, open_preparation, prepare, stages_of
from atoll.data.stages import latents
from atoll.data.stages.clusters import Partition
from autoencoders import write_autoencoder
from shapes import chunk_files, write_run, write_shapes


def files(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def rejected(run: Path) -> list[str]:
    return [line.split("\t")[0] for line in (run / "data/ingest/rejected.txt").read_text().splitlines()]


def test_readable_images_are_indexed_and_others_are_listed_with_the_reason(prepared: Path) -> None:
    index = pq.read_table(prepared / "data/ingest/images.parquet").to_pydict()
    assert len(index["id"]) == len(set(index["id"])) == 99
    assert (prepared / "data/ingest/rejected.txt").read_text() == "broken.png\tthe file is empty (0 bytes)\n"
    assert set(index["split"]) == {"train", "validation"}
    assert index["captions"][index["id"].index("circle-003")] == ["a circle with the number 3"]


def test_too_many_unusable_images_are_an_error(tmp_path: Path, shapes: Path) -> None:
    config = write_run(tmp_path / "run", shapes, data={"max_rejects": 0.005})
    with pytest.raises(AtollError, match=r"1 of 100 images are unusable, more than data.max_rejects = 0.005 allows"):
        prepare(tmp_path / "run", config, ["ingest"])
    assert rejected(tmp_path / "run") == ["broken.png"]
    prepare(
        tmp_path / "run",
        config.model_copy(update={"data": config.data.model_copy(update={"max_rejects": 0.01})}),
        ["ingest"],
    )
    assert (tmp_path / "run/data/ingest/manifest.json").is_file()


def test_an_error_names_ten_unusable_files_and_a_text_file_lists_all(tmp_path: Path) -> None:
    source, run = write_shapes(tmp_path / "shapes", 30), tmp_path / "run"
    (source / "Äpfel & Birnen").mkdir()
    for number in range(12):
        (source / f"Äpfel & Birnen/photo {number:02d}.JPG").write_text("no image")
    with pytest.raises(AtollError) as error:
        prepare(run, write_run(run, source), ["ingest"])
    lines = str(error.value).splitlines()
    assert lines[0].startswith("13 of 43 images are unusable")
    assert [line.partition(":")[0] for line in lines[1:12]] == [
        *("  broken.png", *(f"  Äpfel & Birnen/photo {number:02d}.JPG" for number in range(9)), "  and 3 more")
    ]
    assert str(run / "data/ingest/rejected.txt") in lines[12]
    assert len(rejected(run)) == 13


def test_a_dry_run_lists_the_source_and_ignored_files_before_it_needs_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = write_shapes(tmp_path / "shapes", 9), tmp_path / "run"
    for name in ("film.mp4", "Thumbs.db", "README", "another.MP4", "alone.txt", ".DS_Store"):
        (source / name).write_text("not an image")
    write_run(run, source, latents={"autoencoder": str(tmp_path / "absent")}, data={"buckets": "auto"})
    assert cli.main(["prepare", str(run), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert "10 images" in shown.out
    assert "ignored files: 1 .db, 2 .mp4, 1 .txt, 1 without a suffix" in shown.out
    assert "absent" in shown.err


def test_repaired_images_are_read_again(tmp_path: Path) -> None:
    """They have the same name and size, so the fingerprint does not change."""
    source, run = write_shapes(tmp_path / "shapes", 30), tmp_path / "run"
    good = (source / "circle-000.png").read_bytes()
    (source / "circle-000.png").write_bytes(bytes(len(good)))
    config = write_run(run, source)
    with pytest.raises(AtollError, match="2 of 31 images are unusable"):
        prepare(run, config, ["ingest"])
    (source / "circle-000.png").write_bytes(good)
    prepare(run, config, ["ingest"])
    assert rejected(run) == ["broken.png"]


def test_contact_sheets_omit_unreadable_images(tmp_path: Path) -> None:
    """Neither metadata of a missing a.jpg next to a.png nor an image damaged later stops the partition."""
    source, run = write_shapes(tmp_path / "shapes", 30), tmp_path / "run"
    (source / "metadata.jsonl").write_text('{"file_name": "circle-000.jpg", "text": "a circle"}')
    config = write_run(run, source, clusters={"method": "random"}, data={"max_rejects": 0.1})
    prepare(run, config, ["ingest"])
    assert rejected(run) == ["broken.png", "circle-000.jpg"]
    size = (source / "circle-003.png").stat().st_size
    (source / "circle-003.png").write_bytes(bytes(size))
    with pytest.warns(UserWarning, match="a router cannot learn"):
        prepare(run, config, ["clusters"])
    assert (run / "data/clusters/cluster_002.png").is_file()


def test_the_footer_of_a_table_is_read_once(prepared: Path, tmp_path: Path) -> None:
    index = replace(Index.open(prepared), artifact=Artifact(tmp_path, "data/ingest"))
    shutil.copytree(prepared / "data/ingest", tmp_path / "data/ingest")
    before = chunks._metadata.cache_info().misses
    ids = [id for chunk in range(7) for id in index.read(chunk, ["id"])["id"]]
    assert ids == pq.read_table(tmp_path / "data/ingest/images.parquet")["id"].to_pylist()
    assert chunks._metadata.cache_info().misses == before + 1
    pq.write_table(pa.table({"id": ["another"]}), tmp_path / "data/ingest/images.parquet")
    assert index.read(0, ["id"]) == {"id": ["another"]}


def test_clusters_are_the_kinds_of_shapes(prepared: Path) -> None:
    rows = pq.read_table(prepared / "data/clusters/assignments.parquet").to_pylist()
    pairs = {(row["coarse"], row["id"].split("-")[0]) for row in rows}
    assert len(pairs) == 3
    report = json.loads((prepared / "data/clusters/report.json").read_text())
    assert report["imbalance"] <= 1.25
    assert sum(report["sizes"]["train"]) + sum(report["sizes"]["validation"]) == 99
    assert report["separation"]["clusters"]["neighbors"] > 0.95 > 0.5 > report["separation"]["random"]["neighbors"]


def test_the_saved_rule_gives_the_saved_assignment(prepared: Path) -> None:
    rows = pq.read_table(prepared / "data/clusters/assignments.parquet").to_pydict()
    features = torch.cat([load_file(file)["features"] for file in chunk_files(prepared, "features")])
    centers = load_file(prepared / "data/clusters/centroids.safetensors")
    fine, distance = nearest_center(features.float().numpy(), centers["fine"].numpy())
    assert fine.tolist() == rows["fine"]
    assert centers["coarse_of_fine"][fine].tolist() == rows["coarse"]
    assert_allclose(distance, rows["distance"], atol=1e-5)
    brute = (features.float() @ centers["fine"].T).argmax(1)
    assert brute.tolist() == fine.tolist()


def test_there_is_a_contact_sheet_for_each_cluster(prepared: Path) -> None:
    from PIL import Image

    for cluster in range(3):
        page = np.asarray(Image.open(prepared / f"data/clusters/cluster_{cluster:03d}.png"))
        assert page.shape[1] == 8 * 36 + 4
        inked = page[np.ptp(page.astype(int), axis=2) > 100]
        assert len(set(inked.argmax(1).tolist())) == 1  # red, green or blue, like the kind


def test_latent_statistics_are_those_of_all_training_images(prepared: Path) -> None:
    splits = pq.read_table(prepared / "data/ingest/images.parquet")["split"].to_pylist()
    latents = torch.cat([load_file(file)["mean"] for file in chunk_files(prepared, "latents")])
    train = latents[torch.tensor([split == "train" for split in splits])].double()
    for cluster in range(3):
        declared = json.loads((prepared / f"data/shards/cluster_{cluster:03d}/manifest.json").read_text())["content"]
        assert_allclose(declared["statistics"]["mean"], train.mean((0, 2, 3)), rtol=1e-12)
        assert_allclose(declared["statistics"]["std"], train.std((0, 2, 3), correction=0), rtol=1e-9)


def test_preparing_again_changes_nothing(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(prepared)
    assert cli.main(["prepare", str(prepared)]) == 0
    assert files(prepared) == before
    shown = [f"{stage.name}: already done" for stage in STAGES if stage.name != "patches"]  # not needed
    assert capsys.readouterr().out.splitlines() == shown


def test_scratch_of_a_job_killed_right_after_its_commit_is_removed(prepared: Path) -> None:
    scratch = prepared / "data/clusters/.sums.safetensors"
    scratch.write_bytes(b"left behind")
    assert cli.main(["prepare", str(prepared)]) == 0
    assert not scratch.exists()


def test_a_half_made_stage_is_not_continued_with_other_settings(tmp_path: Path, shapes: Path) -> None:
    """This holds even if the stage was not needed in between."""
    run = tmp_path / "run"
    config = write_run(run, shapes)
    dense = config.model_copy(update={"clusters": config.clusters.model_copy(update={"count": 1})})
    other = config.model_copy(update={"features": config.features.model_copy(update={"resolution": 72})})
    prepare(run, config, ["ingest"])
    prepare(run, config, ["features"], worker=WorkerShare(0, 3))
    prepare(run, dense, ["features"])
    with pytest.raises(AtollError, match="data/features is stale: resolution was 64, now 72"):
        prepare(run, other, ["features"])
    (run / "data/features/.plan.json").unlink()
    with pytest.raises(AtollError, match="data/features has files that Atoll did not write"):
        prepare(run, other, ["features"])


def without_settings(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(run).items() if name != "atoll.yaml"}


@pytest.mark.parametrize("order", [(1, 0), (3, 0, 4, 2, 1)], ids=len)
def test_several_workers_give_the_same_bytes(
    prepared: Path, tmp_path: Path, shapes: Path, order: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each makes its part of the pass; the last one does the rest. This run has no patches; test_patches.py has."""
    run = tmp_path / "run"
    write_run(run, shapes)
    for index in order:
        assert not (run / "data/shards").exists()
        assert cli.main(["prepare", str(run), "--worker", f"{index}/{len(order)}"]) == 0
        assert ("latents: this worker is done; all workers" in capsys.readouterr().out) == (index != order[-1])
    assert without_settings(run) == without_settings(prepared)


def test_two_workers_that_end_the_pass_at_the_same_moment_both_succeed(
    prepared: Path, tmp_path: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them finishes all stages, and the other one waits for it."""
    run = tmp_path / "run"
    config = write_run(run, shapes)
    original, other = Partition.merge_fine, threading.Thread(target=prepare, args=(run, config))

    def interrupted(partition: Partition) -> object:
        monkeypatch.setattr(Partition, "merge_fine", original)
        other.start()
        other.join(1)
        assert other.is_alive()
        return original(partition)

    monkeypatch.setattr(Partition, "merge_fine", interrupted)
    prepare(run, config)
    other.join()
    assert without_settings(run) == without_settings(prepared)


def test_several_workers_divide_each_stage_alone(prepared: Path, tmp_path: Path, shapes: Path) -> None:
    run = tmp_path / "run"
    config = write_run(run, shapes)
    divisible = [stage for stage in STAGES if stage.divisible]
    assert [stage.name for stage in divisible] == ["ingest", "features", "latents", "patches", "text", "shards"]
    for stage in divisible:
        if stage.name == "shards":
            prepare(run, config, ["clusters"])
        for index in () if stage.name == "patches" else (2, 0, 1):
            done = {made.name: made.done() for made in stages_of(open_preparation(run, config))}
            assert not done[stage.name]
            prepare(run, config, [stage.name], worker=WorkerShare(index, 3))
    assert without_settings(run) == without_settings(prepared)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The decoders that Pillow has opened: one for each image of a PNG."""
    from PIL import Image

    opened, original = [], Image._getdecoder

    def count(mode: str, decoder: str, *arguments: object) -> object:
        opened.append(decoder)
        return original(mode, decoder, *arguments)

    monkeypatch.setattr(Image, "_getdecoder", count)
    return opened


def test_every_image_is_decoded_once(tmp_path: Path, shapes: Path, decodings: list[object]) -> None:
    """The sample that the components of patch features are fitted to is decoded before the pass, too."""
    for run, dimensions, sample in ((tmp_path / "run", 0, 0), (tmp_path / "patches", 64, 80)):
        config = write_run(run, shapes, features={"patch_dimensions": dimensions}, data={"flip": True})
        decodings.clear()
        prepare(run, config, ["ingest", "features", "latents", "patches"])
        assert len(decodings) == 99 + sample
        assert Index.open(run).content.splits["train"] == 80
        for name in ("features", "latents"):
            assert (run / "data" / name / "manifest.json").is_file()


def test_another_autoencoder_recomputes_only_the_latents_in_one_pass(
    prepared: Path, tmp_path: Path, shapes: Path, decodings: list[object]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    vae = write_autoencoder(tmp_path / "vae")
    config = write_run(tmp_path / "settings", shapes, latents={"autoencoder": str(vae)}, data={"flip": True})
    with pytest.raises(AtollError, match="data/latents is stale: autoencoder was pixels, now"):
        prepare(run, config)
    for name in ("latents", "shards"):
        shutil.rmtree(run / "data" / name)
    before = files(run)
    decodings.clear()
    prepare(run, config)
    assert len(decodings) == 99
    after = files(run)
    assert {name: after[name] for name in before} == before
    assert "mean_mirrored" in load_file(chunk_files(run, "latents")[3])


def test_an_index_that_was_made_again_updates_what_changed(tmp_path: Path, decodings: list[object]) -> None:
    """Features and latents are kept if the deleted index is made again with the same images; else they are updated."""
    source, run = write_shapes(tmp_path / "shapes", 30), tmp_path / "run"
    config = write_run(run, source, text={"encoder": "none"})
    prepare(run, config)
    before = files(run)
    shutil.rmtree(run / "data/ingest")
    prepare(run, config)
    assert files(run) == before
    shutil.rmtree(run / "data/ingest")
    size = (source / "square-001.png").stat().st_size
    (source / "square-001.png").write_bytes(bytes(size))  # of the same size, so the fingerprint does not change
    loose = config.model_copy(update={"data": config.data.model_copy(update={"max_rejects": 0.1})})
    decodings.clear()
    prepare(run, loose)
    after = files(run)
    assert "square-001" not in pq.read_table(run / "data/ingest/images.parquet")["id"].to_pylist()
    for name in ("features", "latents"):
        first, second = (path.relative_to(run).as_posix() for path in chunk_files(run, name))
        assert [file in before for file in (first, second)] == [False, True]  # square-001 is in the first chunk
        assert after[second] == before[second]


def test_the_worker_option_is_checked() -> None:
    assert WorkerShare.parse("2/4") == WorkerShare(2, 4)
    for text in ("4/4", "x", "1", "-1/2", "1/0"):
        with pytest.raises(AtollError, match="is not i/n with i from 0 to n-1"):
            WorkerShare.parse(text)


def test_several_workers_need_a_divisible_stage(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", str(prepared), "--worker", "0/2", "--stage", "text", "clusters"]) == 2
    assert "--worker divides the stages ingest, features, latents, patches, text, shards;" in capsys.readouterr().err


def test_a_stage_names_the_missing_stage_before_it(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path / "run", shapes)
    for stage in ("latents", "clusters", "shards"):
        assert cli.main(["prepare", str(tmp_path / "run"), "--stage", stage]) == 2
        assert f"the stage {stage!r} needs the stage 'ingest' first" in capsys.readouterr().err
    prepare(tmp_path / "run", config, ["ingest"])
    for stage in ("clusters", "shards"):
        assert cli.main(["prepare", str(tmp_path / "run"), "--stage", stage]) == 2
        assert f"the stage {stage!r} needs the stage 'features' first" in capsys.readouterr().err


def test_a_dry_run_shows_the_source_and_does_nothing(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run, shapes)
    before = files(run)
    assert cli.main(["prepare", str(run), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "100 images" in shown
    assert shown.count("to do") == 6
    assert cli.main(["prepare", str(run), "--dry-run", "--json", "--text.encoder", "none"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # Neither patches nor text are needed.
    assert [(step["stage"], step["state"]) for step in plan][2:] == [
        ("latents", "to do"),
        ("clusters", "to do"),
        ("shards", "to do"),
    ]
    assert files(run) == before


def test_other_images_with_the_emoji_autoencoder_give_a_warning(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run, shapes)
    for autoencoder, warned in (("emoji", True), ("pixels", False)):
        assert cli.main(["prepare", str(run), "--dry-run", "--latents.autoencoder", autoencoder]) == 0
        assert ("atoll init --preset images" in capsys.readouterr().out) == warned
    assert latents.note(configuration.resolve(PRESETS["emoji"])) is None
    assert latents.note(configuration.resolve(PRESETS["demo"])) is None


STALE = {
    "features.resolution": ("72", "data/features is stale: resolution was 64, now 72"),
    "clusters.count": ("2", "data/clusters is stale: clusters.count was 3, now 2"),
    "latents.dtype": ("float32", "data/latents is stale: dtype was float16, now float32"),
    "text.max_tokens": ("9", "data/text is stale: max_tokens was 12, now 9"),
    "data.resolution": ("48", "data/ingest is stale: resolution was 32, now 48"),
    "latents.normalization": ("scale", "data/shards/cluster_000 is stale: normalization was per-channel, now scale"),
    "data.shard_rows": ("50", "data/shards/cluster_000 is stale: shard_rows was 20, now 50"),
}


@pytest.mark.parametrize("key", STALE)
def test_the_error_of_a_stale_stage_names_the_change(
    prepared: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, message = STALE[key]
    before = files(prepared)
    assert cli.main(["prepare", str(prepared), f"--{key}", value]) == 2
    assert message in capsys.readouterr().err
    assert files(prepared) == before


def test_changed_weights_are_noticed(tmp_path: Path, shapes: Path) -> None:
    from diffusers import AutoencoderTiny

    from atoll.encoders.pretrained import fingerprint

    run, network = tmp_path / "run", tmp_path / "network"
    blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    layers = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    AutoencoderTiny(latent_channels=4, **blocks, **layers).save_pretrained(network)
    config = write_run(run, shapes, latents={"autoencoder": str(network)})
    prepare(run, config, ["ingest", "latents"])
    weights = load_file(network / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, network / "diffusion_pytorch_model.safetensors")
    fingerprint.cache_clear()
    with pytest.raises(AtollError, match=r"data/latents is stale: weights was .*…, now .*…"):
        prepare(run, config, ["latents"])


@pytest.mark.parametrize("method", ["features", "random", "labels"])
def test_one_cluster_needs_no_features(tmp_path: Path, shapes: Path, method: str) -> None:
    run = tmp_path / "run"
    prepare(run, write_run(run, shapes, clusters={"count": 1, "method": method}, text={"encoder": "none"}))
    assert not (run / "data/features").exists()
    assert not (run / "data/text").exists()
    declared = json.loads((run / "data/shards/cluster_000/manifest.json").read_text())["content"]
    assert declared["rows"]["train"] + declared["rows"]["validation"] == 99
    assert declared["text"] is None


def test_random_clusters_are_even_and_come_with_a_warning(tmp_path: Path, shapes: Path) -> None:
    run = tmp_path / "run"
    config = write_run(run, shapes, clusters={"method": "random"})
    with pytest.warns(UserWarning, match="a router cannot learn"):
        prepare(run, config, ["ingest", "clusters"])
    coarse = pq.read_table(run / "data/clusters/assignments.parquet")["coarse"].to_numpy()
    assert np.bincount(coarse).tolist() == [33, 33, 33]


@pytest.fixture
def classes(tmp_path: Path, shapes: Path) -> Path:
    """The same images in one folder per class."""
    for image in shapes.glob("*-*.png"):
        kind, number = image.stem.split("-")
        folder = tmp_path / "classes" / (kind if kind != "circle" or int(number) % 2 else "disc")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder / image.name)
    return tmp_path / "classes"


def by_class(run: Path) -> dict[str, set[int]]:
    rows = pq.read_table(run / "data/clusters/assignments.parquet").to_pylist()
    labels = pq.read_table(run / "data/ingest/images.parquet")["label"].to_pylist()
    found: dict[str, set[int]] = {}
    for row, label in zip(rows, labels, strict=True):
        found.setdefault(label, set()).add(row["coarse"])
    return found


def test_with_as_many_classes_as_clusters_each_class_is_a_cluster(tmp_path: Path, classes: Path) -> None:
    run = tmp_path / "run"
    config = write_run(run, classes, clusters={"method": "labels", "count": 4}, text={"encoder": "none"})
    prepare(run, config, ["ingest", "features", "clusters"])
    assert not (run / "data/features").exists()
    assert by_class(run) == {"circle": {0}, "disc": {1}, "square": {2}, "triangle": {3}}


def test_more_classes_than_clusters_are_merged_by_their_features(tmp_path: Path, classes: Path) -> None:
    run = tmp_path / "run"
    prepare(run, write_run(run, classes, clusters={"method": "labels"}), ["ingest", "features", "clusters"])
    found = by_class(run)
    assert found["circle"] == found["disc"]
    assert len(found["circle"] | found["square"] | found["triangle"]) == 3


def test_fewer_classes_than_clusters_are_an_error(tmp_path: Path, classes: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(AtollError, match="there are 4 classes for 5 clusters"):
        prepare(run, write_run(run, classes, clusters={"method": "labels", "count": 5}), ["ingest", "clusters"])


def test_memory_of_clustering_is_bounded_by_sample_rows(tmp_path: Path, shapes: Path) -> None:
    """Fitting to a few rows still assigns all of them."""
    run = tmp_path / "run"
    prepare(run, write_run(run, shapes, clusters={"sample_rows": 30}), ["ingest", "features", "clusters"])
    declared = json.loads((run / "data/clusters/manifest.json").read_text())["content"]
    assert declared["num_fine"] <= 30
    assert declared["imbalance"] <= 1.25
    assert len(pq.read_table(run / "data/clusters/assignments.parquet")) == 99


@pytest.mark.slow
def test_emoji_clusters_are_even_and_far_from_random(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    prepare(run, configuration.resolve(PRESETS["emoji"]), ["ingest", "features", "clusters"])
    report = json.loads((run / "data/clusters/report.json").read_text())
    found, random = report["separation"]["clusters"], report["separation"]["random"]
    assert report["imbalance"] <= 1.25
    assert min(report["sizes"]["train"]) > 1000
    assert found["neighbors"] > 0.8 > 0.4 > random["neighbors"]
    assert found["explained"] > 20 * random["explained"]
    assert found["silhouette"] > 0.15 > 0.05 > random["silhouette"]
