"""What leaves the machine: no object of a store has a path, a user name or a host name."""

import getpass
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from diffusers import AutoencoderKL

import atoll
from atoll import cli
from atoll.apps.share.store import Store
from atoll.apps.share.worker import public_reason
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS
from atoll.data.prepare import prepare
from atoll.encoders import text
from atoll.encoders.hub import public_name
from shapes import write_run, write_shapes
from share.shared import key_file, publishers, share
from train.conftest import merge
from train.workers import TINY

SECRET = "Sekret7"
"""Part of the name of every local folder."""
SMALL = {"default": {"name": "DiT-XS/8", "patch": 2, "width": 32, "depth": 1, "heads": 2}}

LONGER = {"total_images": 640, "lr": 3e-3}
"""Enough to be better than an untrained network, which admission demands."""


@pytest.fixture(scope="module")
def with_local_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose autoencoder and text encoder are local folders, given by an absolute and by a relative path."""
    folder = tmp_path_factory.mktemp(SECRET)
    blocks = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4, "sample_size": 32}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(**blocks, **kinds).save_pretrained(folder / f"{SECRET}-vae")
    shutil.copytree(text.folder_of("minilm"), folder / f"{SECRET}-text")
    source = write_shapes(folder / f"{SECRET}-images", 48)
    run = folder / "run"
    changes: dict[str, dict[str, object]] = {
        "data": {"val_fraction": 0.2},
        "clusters": {"count": 2},
        "latents": {"autoencoder": str(folder / f"{SECRET}-vae")},
        "text": {"encoder": f"{SECRET}-text"},
    }
    config = write_run(run, source, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # a bare name of a folder is a relative path
        prepare(run, config)
    values = merge(yaml.safe_load((run / "atoll.yaml").read_text()), merge(TINY, {"networks": SMALL, "train": LONGER}))
    (run / "atoll.yaml").write_text(yaml.safe_dump(values))
    return run


@pytest.fixture
def private(with_local_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Return the words that must not leave the machine, and give it a user and a host with such names."""
    (tmp_path / f"{SECRET}-home").mkdir()
    for name, value in {"LOGNAME": "user", "USER": "user", "HOSTNAME": "host", "HOME": "home"}.items():
        monkeypatch.setenv(name, f"{SECRET}-{value}" if name != "HOME" else str(tmp_path / f"{SECRET}-{value}"))
    host = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"{SECRET}-host")
    assert getpass.getuser() == f"{SECRET}-user"
    monkeypatch.chdir(with_local_models.parent)
    # A short host name would also be found in random bytes.
    hosts = [host] if len(host) > 5 else []
    return {word.encode() for word in (SECRET, *hosts, str(tmp_path), str(with_local_models.parent))}


def leaks(store: Store, words: set[bytes]) -> list[str]:
    """Return the objects that contain a word in their names or in their bytes."""
    found = []
    for entry in store.entries(""):
        data = entry.key.encode() + b"\n" + (store.read(entry.key, 1 << 30) or b"")
        found += [f"{entry.key}: {word!r}" for word in words if word in data]
    return found


@pytest.mark.slow
def test_no_object_of_a_store_has_a_path_or_a_name_of_the_machine(
    with_local_models: Path, tmp_path: Path, private: set[bytes]
) -> None:
    """Push, join, an interrupted attempt, admission and pull; then the owner and a reader sample."""
    run, store = tmp_path / "run", Store.open(tmp_path / "store")
    shutil.copytree(with_local_models, run, ignore=shutil.ignore_patterns("ingest", "features"))
    assert cli.main(["train", str(run), "--expert", "0"]) == 0
    fingerprint = share(run, store, publishers=publishers("ann"))
    url = f"{store.url}#sha256={fingerprint}"
    ann = ("--key", str(key_file("ann", tmp_path)), "--folder", str(tmp_path / "ann"), "--publish-every", "0")
    assert cli.main(["join", url, *ann, "--train.lr", "6e4", "--train.max_grad_norm", "6e4"]) == 2, "it diverges"
    assert b'"state": "failed"' in b"".join(store.read(entry.key) or b"" for entry in store.entries("leases"))
    assert cli.main(["join", url, *ann]) == 0
    owner = ("--key", str(key_file("owner", tmp_path)), "--folder", str(tmp_path / "owner"))
    assert leaks(store, private) == [], "of a proposed expert"
    assert cli.main(["admit", url, *owner]) == 0
    assert {entry.key.split("/")[0] for entry in store.entries("")} >= {"experts", "leases", "root", "snapshot", "data"}
    assert leaks(store, private) == []

    assert SHARDS.parse(Artifact(run, "data/shards/cluster_000").open(SHARDS), run).latents.autoencoder == "local"
    assert atoll.load(run, "expert:0").encoders.text_encoder() is not None, "the owner's settings have the folders"
    model = tmp_path / "model"
    assert cli.main(["pull", url, str(model)]) == 0
    with pytest.raises(AtollError, match=r"text.encoder of this run is a folder of its owner's machine; get a copy"):
        atoll.load(model, "expert:1").encoders.text_encoder()
    values = yaml.safe_load((model / "atoll.yaml").read_text())
    values["latents"]["autoencoder"] = configuration.load(run).latents.autoencoder
    values["text"]["encoder"] = f"./{SECRET}-text"
    (model / "atoll.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["pull", url, str(model)]) == 0, "the shared settings are the same"
    encoders = atoll.load(model, "expert:1").encoders
    assert None not in (encoders.text_encoder(), encoders.autoencoder())


@pytest.mark.slow
def test_an_export_has_no_path(with_local_models: Path, tmp_path: Path, private: set[bytes]) -> None:
    run = tmp_path / "run"
    shutil.copytree(with_local_models, run, ignore=shutil.ignore_patterns("ingest", "features"))
    assert cli.main(["train", str(run), "--expert", "0"]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "export"), "--model", "expert:0"]) == 0
    assert leaks(Store.open(tmp_path / "export"), private) == []


def test_reasons_in_leases_have_no_texts_of_other_libraries() -> None:
    error = RuntimeError("CUDA out of memory on node-17 (/home/ann/x)")
    assert public_reason(error) == "RuntimeError; the contributor has the details"


@pytest.mark.parametrize(
    "path", ["/home/ann/run", "~/run", "./run/x", "../x", "C:\\Users\\ann", "\\\\host\\share\\x", "/data/a b"]
)
def test_reasons_in_leases_have_no_paths(path: str) -> None:
    reason = public_reason(AtollError(f"{path}: no space left; delete files of '{path}' (or {path})\n{path}"))
    assert "no space left" in reason
    for part in ("ann", "run", "Users", "host", "share", "data"):
        assert part not in reason


@pytest.mark.parametrize("name", ["/models/vae", "./vae", "../vae", "~/vae", "vae", "C:\\vae", "a/b/c"])
def test_the_path_of_a_model_folder_is_not_shared(name: str) -> None:
    assert public_name(name) == "local"


@pytest.mark.parametrize("name", ["pixels", "emoji", "minilm", "none", "stabilityai/sd-vae-ft-mse", "local"])
def test_names_that_mean_the_same_everywhere_are_shared(name: str) -> None:
    assert public_name(name) == name
