"""Settings of a shared run: which of them are shared, and which are refused when they come from a store."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll import cli
from atoll.apps.share import owners
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import Access
from atoll.apps.share.shared_settings import SHARED, read_shared, shared_part
from atoll.apps.share.store import Store
from atoll.apps.share.worker import open_worker
from atoll.core import config
from atoll.core.config_sections import IslandSection
from atoll.core.errors import AtollError
from atoll.core.presets import PRESETS
from share.shared import person, remote, share
from train.conftest import Copy, merge

MACHINE = {
    "island": {"setup": ["touch /tmp/owned"], "sbatch": ["--partition=secret"]},
    "data": {"source": "/data/private/images", "workers": 7},
    "train": {"trackers": ["wandb"], "workers": 5},
    "latents": {"autoencoder": "/models/private-vae"},
}


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid4().hex}")


def test_settings_of_the_machine_are_not_shared(
    new_run: Copy, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(**MACHINE)
    share(run, store)
    message = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not shared"))
    for key in ("data.source", "data.workers", "latents.autoencoder", "train.trackers", "train.workers", "island"):
        assert key in message
    shared = (store.read("atoll.yaml") or b"").decode()
    for private in ("island", "touch", "secret", "private", "wandb"):
        assert private not in shared
    taken = remote(store, tmp_path / "elsewhere").config
    assert taken.island == IslandSection()
    assert taken.train.lr == config.load(run).train.lr
    assert taken.networks == config.load(run).networks


def test_a_pulled_run_keeps_the_island_of_its_machine(new_run: Copy, tmp_path: Path, store: Store) -> None:
    owner = new_run("owner", **MACHINE)
    share(owner, store)
    assert remote(store, owner).config.island.setup == ["touch /tmp/owned"], "the folder of the owner"
    folder = tmp_path / "elsewhere"
    pull(remote(store, folder), folder)
    values = yaml.safe_load((folder / "atoll.yaml").read_text())
    (folder / "atoll.yaml").write_text(yaml.safe_dump({**values, "island": {"setup": ["module load cuda"]}}))
    pull(remote(store, folder), folder)
    assert config.load(folder).island.setup == ["module load cuda"]


def test_a_shared_setting_must_not_change(new_run: Copy, tmp_path: Path, store: Store) -> None:
    share(new_run(), store)
    folder = tmp_path / "elsewhere"
    remote(store, folder)
    changed = yaml.safe_load(store.read("atoll.yaml") or b"")
    changed["train"]["lr"] = 0.5
    store.write("atoll.yaml", yaml.safe_dump(changed).encode())
    with pytest.raises(AtollError, match=r"atoll.yaml is not the one that the owners signed"):
        remote(store, folder)


@pytest.mark.hostile
def test_a_run_that_starts_from_a_local_network_is_not_pushed(new_run: Copy, store: Store) -> None:
    with pytest.raises(AtollError, match=r"train.init_from is /models/mine, a folder of this machine"):
        share(new_run(train={"init_from": "/models/mine"}), store)
    assert store.read("atoll.yaml") is None


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"train": {"init_from": "/home/victim/model"}}, "sets train.init_from, which belongs to a machine"),
    ({"train": {"init_from": None}}, "sets train.init_from, which belongs to a machine"),
    ({"train": {"trackers": ["wandb"]}}, "sets train.trackers, which belongs to a machine"),
    ({"island": {"setup": ["touch /tmp/owned"]}}, "sets 'island', which belongs to a machine"),
    ({"island": {}}, "sets 'island', which belongs to a machine"),
    ({"data": {"source": "/"}}, "sets data.source, which belongs to a machine"),
    ({"data": {"workers": 10**6}}, "sets data.workers, which belongs to a machine"),
    ({"latents": {"autoencoder": "/etc"}}, "latents.autoencoder is '/etc'; expected a name, not a path"),
    ({"latents": {"autoencoder": "../vae"}}, "expected a name, not a path"),
    ({"latents": {"autoencoder": "a/b/c"}}, "expected a name, not a path"),
    ({"text": {"encoder": "~/secret"}}, "text.encoder is '~/secret'; expected a name, not a path"),
    ({"features": {"model": ["x"]}}, "features.model is .*expected a name, not a path"),
    ({"clusters": {"count": 10**9}}, "clusters.count is 1000000000; the limit is 4096"),
    ({"train": {"total_images": 10**18}}, "train.total_images is .*the limit is"),
    ({"train": {"batch_size": 10**9}}, "train.batch_size is .*the limit is 1048576"),
    ({"train": {"ema": {f"e{n}": 1.0 for n in range(9)}}}, "train.ema has .* entries; the limit for a shared run is 8"),
    ({"networks": {"default": {"depth": 10**6}}}, "depth is 1000000; the limit is 512"),
    ({"networks": {"default": {"width": 2**20}}}, "width is 1048576; the limit is 65536"),
    ({"router": {"network": {"depth": 10**6}}}, "depth is 1000000; the limit is 512"),
    ({"train": {"align": {"weight": 10**9}}}, "weight is 1000000000; the limit"),
    ({"text": {"max_tokens": 10**9}}, "text.max_tokens is 1000000000; the limit"),
    ({"preset": "x" * 70_000}, "has 7.*bytes; the limit is 65,536"),
    ({"setup": "rm"}, "sets 'setup', which belongs to a machine"),
    ({"train": {"unknown": 1}}, "sets train.unknown, which belongs to a machine"),
]


@pytest.mark.hostile
@pytest.mark.parametrize(("hostile_settings", "message"), HOSTILE)
def test_hostile_settings_are_refused_before_anything_is_written(
    hostile_settings: dict[str, Any], message: str, new_run: Copy, tmp_path: Path, store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The owner itself is hostile: the root lists the digest of these settings."""
    run = new_run()
    values = merge(yaml.safe_load(shared_part(config.load(run))), hostile_settings)
    monkeypatch.setattr(owners, "shared_part", lambda _: yaml.safe_dump(values).encode())
    share(run, store)
    folder = tmp_path / "victim"
    access = Access(None, True, person("ann"))
    for verb in (lambda: open_worker(store.url, folder, access), lambda: remote(store, folder)):
        with pytest.raises(AtollError, match=message):
            verb()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "it contains an alias"),
        ("preset: &x hello\ntrain: {seed: *x}\n", "it contains an alias"),
        ("- 1\n", "not a mapping of settings"),
        ("1: 2\n", "sets '1', which belongs to a machine"),
        ("preset: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("\xff", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_plain_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(AtollError, match=message):
        read_shared(text.encode("latin-1"), "the store")


LOCAL = {
    "data.source", "data.image", "data.caption", "data.caption_lines", "data.label", "data.id", "data.max_rejects",
    "data.workers", "student.init_from", "train.init_from", "train.trackers", "train.workers", "island",
}  # fmt: skip
SHARED_COUNT = 86


def test_a_new_setting_is_shared_only_after_a_decision() -> None:
    """Fail when a key is added: decide whether it belongs to a machine (`LOCAL`) or to the shared run."""
    fields = config.Config.model_fields
    keys = {
        f"{name}.{key}" if name not in ("experts", "networks", "preset", "island") else name
        for name, field in fields.items()
        for key in getattr(field.annotation, "model_fields", {"": None})
    }
    shared = {
        key for key in keys if (part := key.partition("."))[0] in SHARED
        and (SHARED[part[0]] is None or part[2] in (SHARED[part[0]] or ()))
    }  # fmt: skip
    assert keys - shared == LOCAL
    assert len(shared) == SHARED_COUNT, sorted(shared)


def test_shared_settings_survive_a_round_trip(new_run: Copy) -> None:
    new = {"data": {"flip": True}, "features": {"patch_dimensions": 64}, "train": {"align": {"until": 0.3}}}
    own = config.load(new_run(**new))
    read = read_shared(shared_part(own), "the store")
    assert shared_part(read) == shared_part(own)
    assert (read.data.flip, read.train.align) == (True, own.train.align)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_settings_of_every_preset_can_be_shared(preset: str) -> None:
    settings = config.resolve(PRESETS[preset])
    assert shared_part(read_shared(shared_part(settings), "store")) == shared_part(settings)


@pytest.mark.hostile
def test_a_pulled_run_runs_no_shell_commands_of_its_owner(
    new_run: Copy, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """`launch --on slurm` of a pulled run writes scripts without the shell lines of the owner."""
    share(new_run(**MACHINE), store)
    folder = tmp_path / "pulled"
    pull(remote(store, folder), folder, shards=True)
    assert cli.main(["launch", str(folder), "--on", "slurm", "--print", "--jobs", "experts"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH" in script
    assert "touch" not in script
    assert "secret" not in script
