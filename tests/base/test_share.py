"""A shared run on a base: everybody has the base on their own machine, and only adapters are exchanged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import atoll
from atoll.apps.share.admission import find_base, review
from atoll.apps.share.admit import admit
from atoll.apps.share.owners import push
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import Access
from atoll.apps.share.shared_settings import read_shared, shared_part
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import upload
from atoll.apps.share.worker import Worker, check_overrides, open_worker
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact, FileEntry, sha256_of
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.nets import base as bases
from base.conftest import FAMILY, Copy
from base.tiny import pipeline
from share.conftest import own_settings
from share.shared import person, publishers, remote, share
from train.conftest import merge

__all__ = ["own_settings"]
JOB, WEIGHTS = "experts/000", "diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the bases that other tests have opened: everybody finds their own."""
    for known in list(bases.FOLDERS):
        monkeypatch.delitem(bases.FOLDERS, known)


def set_base(folder: Path, base: Path) -> None:
    """Write the folder of the base into the local copy of a run."""
    values = yaml.safe_load((folder / "atoll.yaml").read_text())
    assert values["networks"]["default"]["base"] == "local"
    values["networks"]["default"]["base"] = str(base)
    (folder / "atoll.yaml").write_text(yaml.safe_dump(values))


def join(store: Store, folder: Path, fingerprint: str, base: Path | None) -> Worker:
    """Join as ann; her copy of the settings names her base."""
    folder.mkdir(exist_ok=True)
    access = Access(fingerprint, signer=person("ann"))
    if not (folder / "atoll.yaml").exists() and base is not None:
        remote(store, folder, trust=fingerprint)  # writes the settings
        set_base(folder, base)
    return open_worker(store.url, folder, access)


def test_adapters_are_shared_without_their_base(
    new_run: Copy, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = new_run(), Store.open(tmp_path / "store")
    fingerprint = share(run, store, publishers=publishers("ann"), policy={"max_parameters": 100_000})
    # No path and no file of the base is in the store; settings and shards declare it.
    objects = {entry.key: store.read(entry.key, 1 << 30) or b"" for entry in store.entries("")}
    assert not [key for key, data in objects.items() if str(base.parent).encode() in data]
    weights = sum(file.stat().st_size for file in (base / "transformer").glob("*.safetensors"))
    assert all(len(data) != weights for data in objects.values())

    # Ann needs the base, and it must be that one.
    ann, anns = tmp_path / "ann", Path(shutil.copytree(base, tmp_path / "anns base"))
    with pytest.raises(AtollError, match=r"base model that you need to have .*set networks.default.base in .*ann"):
        join(store, ann, fingerprint, None)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    pipeline(FAMILY, seed=1).transformer.save_pretrained(other / "transformer")
    with pytest.raises(AtollError, match=r"has the fingerprint .*, but the experts of this run are on local"):
        join(store, tmp_path / "eve", fingerprint, other)
    set_base(ann, anns)
    worker = join(store, ann, fingerprint, anns)
    assert worker.run(expert=0) == 1, capsys.readouterr().out
    assert "waits for admission" in capsys.readouterr().out
    assert str(tmp_path).encode() not in b"".join(store.read(entry.key, 1 << 20) or b"" for entry in store.entries(""))

    # The owner admits it against the base of the owner, and everybody can sample with their own.
    assert admit(remote(store, run, by="owner"), run) == {JOB: "admitted"}
    bob = tmp_path / "bob"
    assert pull(remote(store, bob, trust=fingerprint), bob)[JOB] == "fetched"
    with pytest.raises(AtollError, match=r"set networks\.default\.base"):
        atoll.load(bob)
    set_base(bob, base)
    made = [
        atoll.load(folder, "expert:0").generate(["a red cube"], num_inference_steps=2).latents for folder in (bob, ann)
    ]
    assert torch.equal(*made)


def test_the_owner_pushes_finished_adapters(trained_base: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_base, tmp_path / "run"))
    _, sent = push(run, Store.open(tmp_path / "store"), person("owner"))
    assert {f"{job}/final" for job in (JOB, "experts/001", "router")} <= set(sent)


def test_settings_of_others_and_overrides_name_no_folders(new_run: Copy, base: Path) -> None:
    config = configuration.load(new_run())
    shared = shared_part(config)
    assert read_shared(shared, "x").networks["default"]["base"] == "local"
    for hostile in ("../../etc", "/etc", 3, ""):
        values = merge(yaml.safe_load(shared), {"networks": {"1": {"base": hostile}}})
        with pytest.raises(AtollError, match=r"networks\.1\.base is"):
            read_shared(yaml.safe_dump(values).encode(), "x")
    check_overrides({"networks.default.lora.rank": "8"})
    for key, value in (("networks.0.base", str(base)), ("networks.0", json.dumps({"base": str(base)}))):
        with pytest.raises(AtollError, match="leases are public"):
            check_overrides({key: value})


def test_a_hostile_adapter_is_refused_at_admission(trained_base: Path, new_run: Copy, tmp_path: Path) -> None:
    run, store = new_run(), Store.open(tmp_path / "store")
    share(run, store, publishers=publishers("ann"))
    ann = remote(store, by="ann")
    folder = Path(shutil.copytree(trained_base / JOB, tmp_path / "hostile" / JOB)) / "final"
    tensors = load_file(folder / WEIGHTS)
    for value, reason in (
        (float("nan"), "not finite"),
        (0.0, "an untrained network of its kind"),
        (50.0, "is too large"),
    ):
        save_file({name: torch.full_like(own, value) for name, own in tensors.items()}, folder / WEIGHTS)
        artifact = Artifact(tmp_path / "hostile", f"{JOB}/final")
        entry = FileEntry((folder / WEIGHTS).stat().st_size, sha256_of(folder / WEIGHTS))
        manifest = artifact.open(EXPERT)
        manifest = replace(manifest, files={**manifest.files, WEIGHTS: entry})
        (folder / "manifest.json").write_bytes(manifest.to_json())

        ann.write_signature("publish", artifact.name, manifest.digest)
        upload(store, artifact, manifest, name=artifact.name)
        owner = remote(store, run, by="owner")

        find_base(owner, run)
        with pytest.raises(AtollError, match=reason):
            review(owner, JOB, manifest.digest, quarantine=tmp_path / "quarantine")
