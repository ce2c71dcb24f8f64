"""Fixtures: stores of every kind, and runs to share."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT
from atoll.train import resolve_job, train_job
from share.ceph import ceph, missing_requirement
from share.offers import NAME, Offer
from share.servers import CREDENTIALS, moto, new_bucket
from share.shared import POLICY, person, publishers, remote, share
from train.conftest import Copy, copier, merge
from train.workers import TINY

TRAINED = merge(TINY, {"train": {"lr": 6e-3, "total_images": 640, "save_every": 128}})
"""80 steps with a higher learning rate: the experts learn the mean of their data, which admission demands."""


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Copy:
    """Return a function that copies the prepared run: `new_run("name", train={"lr": 1})`."""
    return copier(prepared, tmp_path, TRAINED)


@pytest.fixture(autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a configuration folder of its own: the key, and the runs that the user has seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.delenv("ATOLL_KEY", raising=False)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a running S3 server; the environment has its credentials."""
    os.environ.update(CREDENTIALS)
    with moto() as address:
        yield address


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the environment has the address of the server, as it would for a user."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    return new_bucket(s3)


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """The address of Ceph's S3 gateway."""
    if reason := missing_requirement():
        pytest.skip(reason)
    os.environ.update(CREDENTIALS)
    with ceph() as address:
        yield address


@pytest.fixture
def ceph_bucket(gateway: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in Ceph."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway)
    return new_bucket(gateway)


ONE_CLUSTER = [pytest.mark.slow, pytest.mark.xdist_group("ceph")]
"""Run all tests of Ceph in one worker (`--dist loadgroup`): two clusters at once start too slowly on two cores."""


@pytest.fixture(params=["file", "memory", "s3", pytest.param("ceph", marks=ONE_CLUSTER)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, of every kind."""
    if request.param in ("s3", "ceph"):
        url: str = request.getfixturevalue("bucket" if request.param == "s3" else "ceph_bucket")
        return url
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid4().hex}"


@pytest.fixture
def store(store_url: str) -> Store:
    return Store.open(store_url)


@pytest.fixture(scope="session")
def pushed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of a shared run without networks, in which ann may publish every expert."""
    folder = tmp_path_factory.mktemp("pushed")
    run, store = folder / "run", Store.open(folder / "store")
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TRAINED)
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        share(run, store, publishers=publishers("ann"), policy=POLICY)
    return {entry.key: store.read(entry.key, 1 << 30) or b"" for entry in store.entries("")}


@dataclass(frozen=True)
class Published:
    """A shared run with a finished expert: its objects, its fingerprint and the folder of the owner."""

    objects: dict[str, bytes]
    fingerprint: str
    run: Path

    def copy(self, store: Store) -> None:
        """Write the objects into a store."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda pair: store.write(*pair), self.objects.items()))


@pytest.fixture(scope="session")
def published(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A shared run with expert 0, in which ann may publish all experts and bob only expert 2, and eve admits."""
    folder = tmp_path_factory.mktemp("published")
    run, store = folder / "run", Store.open(folder / "store")
    shutil.copytree(reference, run, ignore=lambda _, names: {"001", "002"} & set(names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        who = publishers("ann") | publishers("bob", experts=(2,))
        fingerprint = share(run, store, publishers=who, admitters={"eve": person("eve").public}, policy=POLICY)
    objects = {entry.key: store.read(entry.key, 1 << 30) or b"" for entry in store.entries("")}
    return Published(objects, fingerprint, run)


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, published: Published) -> Store:
    """A store on files or on an S3 server, with that run."""
    url = str(tmp_path / "store") if request.param == "file" else request.getfixturevalue("bucket")
    store = Store.open(url)
    published.copy(store)
    return store


@pytest.fixture
def published_store(published: Published, tmp_path: Path) -> Store:
    """A store on files with that run."""
    store = Store.open(tmp_path / "store")
    published.copy(store)
    return store


@pytest.fixture
def run(published: Published, tmp_path: Path) -> Path:
    """A copy of the folder of its owner."""
    shutil.copytree(published.run, tmp_path / "owner")
    return tmp_path / "owner"


@pytest.fixture
def shared(pushed: dict[str, bytes]) -> Store:
    """A store with that run."""
    store = Store.open(f"memory://{uuid4().hex}")
    for name, data in pushed.items():
        store.write(name, data)
    return store


@pytest.fixture(scope="session")
def reference(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its three experts trained on one machine, without a store. Tests must not change it."""
    run = tmp_path_factory.mktemp("reference") / "run"
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TRAINED)
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for expert in range(3):
        train_job(resolve_job(run, config.load(run), "expert", expert=expert))
    return run


@pytest.fixture
def opened(shared: Store) -> RemoteRun:
    """The shared run, as its owner opens it."""
    return remote(shared, by="owner")


@pytest.fixture
def offer(reference: Path) -> Offer:
    """A valid contribution."""
    artifact = Artifact(reference, NAME)
    manifest = artifact.open(EXPERT)
    files = {name: artifact.path(name).read_bytes() for name in manifest.files}
    plain = json.loads(manifest.to_json())
    return Offer(files, "expert", plain["made_from"], plain["content"])
