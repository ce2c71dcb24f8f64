"""A pulled model, its exports, and the bytes that are read: checked as one against the signed snapshot."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import atoll
from atoll import cli
from atoll.apps.models.pipeline import AtollPipeline
from atoll.apps.share.owners import change_root, push
from atoll.apps.share.pull import pull
from atoll.apps.share.store import Store
from atoll.core import config, layout
from atoll.core.artifacts import Artifact, sha256_of, to_json
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, PIPELINE, ROUTER
from atoll.experts import network_folder
from atoll.nets import DiTConfig, build, own
from atoll.nets.io import tensors_of, weights_digest
from atoll.train import resolve_job, train_job
from atoll.verify.local_trust import local_objects, local_trust
from atoll.verify.signing import Statement
from atoll.verify.trust import Network, Signed, Snapshot, parse_signed
from atoll.verify.verified_files import VerifiedFiles
from share.conftest import Published
from share.shared import key_file, person, publishers, remote, share

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def whole(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A shared run with experts, router, monolith and student."""
    folder = tmp_path_factory.mktemp("whole")
    run, store = folder / "run", Store.open(folder / "store")
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        fingerprint = share(run, store, publishers=publishers("ann"))
    objects = {entry.key: store.read(entry.key, 1 << 30) or b"" for entry in store.entries("")}
    return Published(objects, fingerprint, run)


@pytest.fixture(scope="session")
def pulled_once(whole: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pulled")
    store = Store.open(folder / "store")
    whole.copy(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        verdicts = pull(remote(store, folder / "model", trust=whole.fingerprint), folder / "model")
    jobs = {f"experts/{number:03d}" for number in range(3)} | {"router", "monolith", "student"}
    assert verdicts == dict.fromkeys(jobs, "fetched")
    return folder / "model"


@pytest.fixture
def pulled(pulled_once: Path, tmp_path: Path) -> Path:
    """A copy of the pulled model."""
    shutil.copytree(pulled_once, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("model", ["experts", "expert:1", "monolith", "student"])
def test_a_pulled_model_is_complete(pulled: Path, model: str) -> None:
    assert len(atoll.load(pulled, model).sample(["a circle"], num_inference_steps=2, seed=0)) == 1


def change(file: Path) -> None:
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, file)


def rehash(artifact: Artifact) -> None:
    """Write the manifest again, as somebody would who replaces a network completely."""
    manifest = artifact.manifest()
    artifact.path("manifest.json").unlink()
    artifact.begin(ROUTER if "router" in artifact.name else EXPERT, manifest.made_from)
    artifact.commit(dict(manifest.content))


@pytest.mark.hostile
@pytest.mark.parametrize("job", ["experts/000", "router", "monolith", "student"])
@pytest.mark.parametrize("how", ["weights", "manifest", "neighbor", "no snapshot", "old snapshot"])
def test_a_changed_network_of_a_pulled_model_is_refused(pulled: Path, whole: Published, job: str, how: str) -> None:
    artifact = Artifact(pulled, f"{job}/final")
    if how in ("weights", "manifest"):
        change(artifact.path(WEIGHTS))
    if how == "manifest":
        rehash(artifact)
    if how == "neighbor":
        other = "experts/002" if job != "experts/002" else "experts/001"
        shutil.rmtree(artifact.folder)
        shutil.copytree(pulled / other / "final", artifact.folder)
    if how == "no snapshot":
        shutil.rmtree(pulled / "snapshot")
    if how == "old snapshot":
        for file in (pulled / "snapshot").iterdir():
            value = json.loads(file.read_bytes())
            value["signed"]["networks"][job]["manifest"] = "0" * 64
            file.write_text(json.dumps(value))
    model = "experts" if job in ("router", "experts/000") else job
    reason = "SHA-256 differs" if how == "weights" else "signed snapshot|is an artifact of kind"
    if how == "weights" and job != "router":
        # Weights of experts are checked when they are read; everything else before the model is returned.
        references = atoll.load(pulled, model).ensemble.references
        with pytest.raises(AtollError, match=reason):
            references[0].open()
        return
    with pytest.raises(AtollError, match=reason):
        atoll.load(pulled, model)


@pytest.mark.hostile
def test_weights_that_change_after_the_check_are_refused(pulled: Path) -> None:
    """Somebody replaces the file between opening the model and reading the weights."""
    sampler = atoll.load(pulled, "experts")
    change(pulled / "experts/001/final" / WEIGHTS)
    with pytest.raises(AtollError, match="SHA-256 differs"):
        sampler.ensemble.references[1].open()


@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "cluster.safetensors"])
def test_verified_files_return_only_the_bytes_of_the_manifest(pulled: Path, file: str) -> None:
    artifact = Artifact(pulled, "experts/001/final")
    files = VerifiedFiles(artifact, artifact.open(EXPERT))
    data = artifact.path(file).read_bytes()
    assert files.read(file) == data
    if file.endswith(".safetensors"):
        read, expected = tensors_of(files.read(file)), load_file(artifact.path(file))
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
    for other in (data + b"x", data[:-1], b"", bytes([data[0] ^ 1]) + data[1:], bytes(len(data))):
        artifact.path(file).write_bytes(other)
        with pytest.raises(AtollError, match="SHA-256 differs"):
            files.read(file)
    for unlisted in ("manifest.json", "../x", "x"):
        with pytest.raises(AtollError, match="has no file"):
            files.read(unlisted)


@pytest.mark.hostile
def test_an_expert_that_the_cache_reloads_is_checked_again(pulled: Path) -> None:
    sampler = atoll.load(pulled, max_loaded_experts=1)
    cache = sampler.ensemble.cache
    cache.get(0)
    cache.get(1)
    change(pulled / "experts/000/final" / WEIGHTS)
    with pytest.raises(AtollError, match="SHA-256 differs"):
        cache.get(0)
    assert cache.get(2) is not None


@pytest.mark.hostile
def test_teachers_of_a_student_are_checked(pulled: Path, whole: Published) -> None:
    """A student is distilled only from experts of the snapshot."""
    shutil.copytree(whole.run / "data", pulled / "data")
    shutil.rmtree(pulled / "student")
    shutil.rmtree(pulled / "experts/001/final")
    shutil.copytree(pulled / "experts/002/final", pulled / "experts/001/final")
    with pytest.raises(AtollError, match=r"experts/001/final differs from that of, or was withdrawn from, the signed"):
        train_job(resolve_job(pulled, config.load(pulled), "student"))
    assert not (pulled / "student/final").exists()


@pytest.mark.hostile
def test_a_refused_router_does_not_stay_on_disk(whole: Published, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    whole.copy(store)
    weights = max(store.entries("router/final/sha256"), key=lambda entry: entry.size)
    store.write(weights.key, bytes(weights.size))
    folder = tmp_path / "model"
    verdicts = pull(remote(store, folder, trust=whole.fingerprint), folder)
    assert verdicts["router"].startswith("refused: ")
    assert not (folder / "router").exists()
    assert not list((folder / ".quarantine").rglob("*.safetensors"))
    with pytest.raises(AtollError, match="router"):
        atoll.load(folder).sample(["a circle"], num_inference_steps=2)
    assert len(atoll.load(folder, routing="nearest").sample(["a circle"], num_inference_steps=2, seed=0)) == 1


def test_own_networks_that_are_not_published_need_no_signature(whole: Published, tmp_path: Path) -> None:
    run = tmp_path / "owner"
    shutil.copytree(whole.run, run)
    shutil.rmtree(run / "snapshot")
    assert atoll.load(run) is not None
    (run / "router/metrics.jsonl").unlink()
    with pytest.raises(AtollError, match="is not part of the signed snapshot"):
        atoll.load(run)


# Exports


@pytest.fixture(scope="session")
def export_once(pulled_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed-export") / "model"
    assert cli.main(["export", str(pulled_once), str(folder)]) == 0
    return folder


def test_an_export_carries_root_and_snapshot(
    export_once: Path, whole: Published, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trust", str(export_once)]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["trust", str(whole.run)]) == 0
    assert shown == capsys.readouterr().out
    (file,) = (export_once / "snapshot").iterdir()
    content = parse_signed(Snapshot, file.read_bytes(), "it").content
    declared = json.loads((export_once / "expert_1/declaration.json").read_text())
    assert content.networks["experts/001"].manifest == declared["manifest"]
    assert len(list((export_once / "root").iterdir())) == 2
    listed = json.loads((export_once / "manifest.json").read_text())["files"]
    assert f"snapshot/{file.name}" in listed
    assert len(atoll.load(export_once).sample(["a circle"], num_inference_steps=2, seed=0)) == 1


def declare(**fields: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "expert_1/declaration.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return apply


def declare_manifest(folder: Path) -> None:
    """Another manifest in the export, with the declaration that fits it."""
    file = folder / "expert_1/manifest.json"
    value = json.loads(file.read_text())
    value["content"]["validation_loss"] = 0.0
    file.write_bytes(to_json(value))
    declare(validation_loss=0.0, manifest=sha256_of(file))(folder)


def exchange_experts(folder: Path) -> None:
    """Both are experts of the snapshot; each declares to be the other."""
    for name in (WEIGHTS, "null.safetensors"):
        one, other = folder / "expert_0" / name, folder / "expert_2" / name
        if one.exists() and other.exists():
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)


def withdraw_from_snapshot(folder: Path) -> None:
    for file in (folder / "snapshot").iterdir():
        value = json.loads(file.read_bytes())
        del value["signed"]["networks"]["experts/001"]
        file.write_bytes(to_json(value))


def sign_by_another_run(folder: Path) -> None:
    """A snapshot that somebody else signed."""
    for file in (folder / "snapshot").iterdir():
        content = parse_signed(Snapshot, file.read_bytes(), "it").content
        file.write_bytes(Signed(content, person("mallory").sign(content.statement())).to_json())


def edit_index(folder: Path, **changes: list[str | None] | None) -> None:
    file = folder / "model_index.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def remove_expert(folder: Path) -> None:
    shutil.rmtree(folder / "expert_2")
    edit_index(folder, expert_2=None)


def double_expert(folder: Path) -> None:
    shutil.rmtree(folder / "expert_2")
    shutil.copytree(folder / "expert_1", folder / "expert_2")


def remove_router(folder: Path) -> None:
    shutil.rmtree(folder / "router")
    edit_index(folder, router=[None, None])


def zero_encoder(folder: Path) -> None:
    file = next((folder / "text_encoder").glob("*.safetensors"))
    tensors = {name: torch.zeros_like(part) for name, part in load_file(file).items()}
    file.unlink()  # a link to the export of all tests
    save_file(tensors, file, {"format": "pt"})


def other_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer/tokenizer_config.json"
    text = file.read_text()
    file.unlink()
    file.write_text(text + " ")


EXPORTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (lambda folder: change(folder / "expert_1" / WEIGHTS), "the weights of experts/001 is not"),
    "router": (lambda folder: change(folder / "router" / WEIGHTS), "the weights of router is not"),
    "density": (lambda folder: change(folder / "expert_1/cluster.safetensors"), "the density of experts/001 is not"),
    "no density": (lambda folder: (folder / "expert_1/cluster.safetensors").unlink(), "the density of experts/001"),
    "digest": (declare(manifest="0" * 64), "the declaration of experts/001 is not"),
    "statistics": (declare(clusters=[0]), "the declaration of experts/001 is not"),
    "bridge": (declare(bridge={"prediction_error": 9.0}), "the declaration of experts/001 is not"),
    "conditioning": (declare(conditioning=[]), "the declaration of experts/001 is not"),
    "job": (declare(job="experts/002"), "the manifest of experts/002 is not"),
    "unknown job": (declare(job="experts/007"), "does not list experts/007"),
    "manifest": (declare_manifest, "the manifest of experts/001 is not"),
    "no manifest": (lambda folder: (folder / "expert_1/manifest.json").unlink(), "the manifest of experts/001 is not"),
    "exchanged": (exchange_experts, "the weights of experts/00[02] is not"),
    "snapshot": (withdraw_from_snapshot, "does not list experts/00"),
    "no snapshot": (lambda folder: shutil.rmtree(folder / "snapshot"), "does not list experts/00"),
    "snapshot of another": (sign_by_another_run, "does not list experts/00"),
    "removed": (remove_expert, "does not have exactly the networks of the signed snapshot"),
    "doubled": (double_expert, "does not have exactly the networks of the signed snapshot"),
    "no router": (remove_router, "does not have exactly the networks of the signed snapshot"),
    "text encoder": (zero_encoder, "text_encoder .* has the fingerprint"),
    "tokenizer": (other_vocabulary, "is not the tokenizer of the signed networks"),
}


def load_all(folder: Path) -> None:
    sampler = atoll.load(folder)
    for reference in sampler.ensemble.references:
        reference.open()


def recommit_export(folder: Path) -> None:
    """Write the list of hashes of an export again."""
    artifact = Artifact(folder.parent, folder.name)
    manifest = artifact.manifest()
    artifact.path("manifest.json").unlink()
    artifact.begin(PIPELINE, manifest.made_from)
    artifact.commit(dict(manifest.content), exclude=["README.md"])


def copy_or_link(source: str, target: str) -> None:
    """Copy a file; link the encoders, which are large and which no test changes."""
    (os.link if "text_encoder" in source or "tokenizer" in source else shutil.copy)(source, target)


@pytest.mark.hostile
@pytest.mark.parametrize(
    "opener", [load_all, pytest.param(AtollPipeline.from_pretrained, marks=pytest.mark.slow)], ids=["load", "diffusers"]
)
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_with_another_network_than_its_snapshot_is_refused(
    name: str, opener: Callable[[Path], object], export_once: Path, tmp_path: Path
) -> None:
    """Somebody changes an export and writes its list of hashes again."""
    folder = tmp_path / "model"
    shutil.copytree(export_once, folder, copy_function=copy_or_link)
    attack, reason = EXPORTS[name]
    attack(folder)
    recommit_export(folder)
    with pytest.raises(AtollError, match=reason):
        opener(folder)


@pytest.mark.hostile
def test_an_export_with_a_router_of_an_admitter_is_refused(whole: Published, export_once: Path, tmp_path: Path) -> None:
    """Eve may admit. Her snapshot names the owner as the publisher of her own router."""
    run, folder = tmp_path / "owner", tmp_path / "model"
    shutil.copytree(whole.run, run)
    change_root(run, person("owner"), admitters={"eve": person("eve").public})
    shutil.copytree(export_once, folder, copy_function=copy_or_link)
    shutil.rmtree(folder / "root")
    shutil.copytree(run / "root", folder / "root", ignore=shutil.ignore_patterns("*.txt"))
    trust = local_trust(folder)
    (file,) = (folder / "snapshot").iterdir()
    content = parse_signed(Snapshot, file.read_bytes(), "it").content
    change(folder / "router" / WEIGHTS)
    weights = weights_digest(sorted(load_file(folder / "router" / WEIGHTS).items()))
    mine = content.networks["router"].signature.model_copy(update={"weights": weights})
    networks = content.networks | {"router": content.networks["router"].model_copy(update={"signature": mine})}
    later = content.model_copy(update={"root": trust.current.version, "version": 1, "networks": networks})
    signed = Signed(later, person("eve").sign(later.statement()))
    file.unlink()
    (folder / layout.snapshot(*later.order)).write_bytes(signed.to_json())
    recommit_export(folder)
    assert trust.newest_snapshot(local_objects(folder, "snapshot")) == signed, "the snapshot itself is valid"
    with pytest.raises(AtollError, match="does not list router"):
        atoll.load(folder)


DECLARATIONS: dict[str, tuple[str, Callable[[dict], object]]] = {
    "a billion layers": ("depth is 1000000000; the limit is", lambda values: values["network"].update(depth=10**9)),
    "too many layers": ("depth is 100000; the limit is", lambda values: values["network"].update(depth=10**5)),
    "huge images": ("size is 1048576; the limit is", lambda values: values["network"].update(size=2**20)),
    "a million labels": ("bytes; the limit is", lambda values: values.update(labels=[f"l{n}" for n in range(10**6)])),
    "deep": ("nested deeper than", lambda values: values.update(labels=json.loads("[" * 40 + "]" * 40))),
}


@pytest.mark.hostile
@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_hostile_declaration_is_refused(name: str, export_once: Path, tmp_path: Path) -> None:
    """Before a network is built from it. The export claims no origin."""
    folder, (reason, change_it) = tmp_path / "model", DECLARATIONS[name]
    shutil.copytree(export_once, folder, copy_function=copy_or_link, ignore=shutil.ignore_patterns("root", "snapshot"))
    for file in (folder / "expert_1/declaration.json", folder / "expert_1/config.json"):
        values = json.loads(file.read_text())
        change_it(values if "network" in values else {"network": values})
        file.write_text(json.dumps(values))
    recommit_export(folder)
    with pytest.raises(AtollError, match=reason):
        atoll.load(folder)


def test_a_converted_network_is_compared_with_the_signed_weights(whole: Published, tmp_path: Path) -> None:
    """A network in the layout of a diffusers class is converted back: its digest is the signed one."""
    config = DiTConfig(32, 2, 2, size=16, text_width=12, text_projection="mlp")
    network = build(config)
    with torch.no_grad():
        for part in network.parameters():
            part.normal_()
    exact = network_folder.diffusers_layout(network)
    assert exact is not None
    digest = weights_digest(sorted(network.state_dict().items()))
    content = Artifact(whole.run, "experts/000/final").read(EXPERT).model_copy(update={"network": config})
    network_folder.write(tmp_path / "expert_0", network, content, density=None)
    opened = network_folder.NetworkFolder.open(tmp_path / "expert_0")
    assert opened.stored_class == "PixArtTransformer2DModel"
    statement = Statement(run="0" * 64, role="publish", slot="", version=1, digest="0" * 64, weights=digest)
    signed = Network(manifest="0" * 64, signature=person("ann").sign(statement))
    read = replace(opened, signed=signed).network()
    assert all(torch.equal(part, read.state_dict()[name]) for name, part in network.state_dict().items())
    for file in (WEIGHTS, "null.safetensors"):
        before = (tmp_path / "expert_0" / file).read_bytes()
        change(tmp_path / "expert_0" / file)
        with pytest.raises(AtollError, match="the weights of experts/000 is not the one of the signed snapshot"):
            replace(opened, signed=signed).network()
        (tmp_path / "expert_0" / file).write_bytes(before)


def test_an_export_of_networks_that_are_not_published_carries_no_snapshot(whole: Published, tmp_path: Path) -> None:
    run = tmp_path / "owner"
    shutil.copytree(whole.run, run)
    shutil.rmtree(run / "snapshot")
    assert cli.main(["export", str(run), str(tmp_path / "export")]) == 0
    assert not (tmp_path / "export/root").exists()
    assert atoll.load(tmp_path / "export") is not None


# Changes of the root on the command line


def test_an_owner_lists_rotates_and_withdraws_on_the_command_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(tmp_path / "store")
    (run / "root/store.txt").unlink()
    owner = ("--key", str(key_file("owner", tmp_path)))

    def trust(*words: str, key: tuple[str, ...] = owner) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main(["trust", str(run), *words, *key])
        output = capsys.readouterr()
        return code, output.out + output.err

    dan, gil = person("dan").public, person("gil").public
    assert trust("add", "publisher", "dan", dan, "--experts", "1", "2")[0] == 0
    assert trust("set", "max_validation_loss", "0.9")[0] == 0
    assert trust("set", "objectives", "[ddpm]")[0] == 0
    assert trust("add", "admitter", "gil", gil)[0] == 0
    assert trust("rotate", "dan", person("dan2").public)[0] == 0
    assert trust("withdraw", "key", "gil")[0] == 0
    assert trust("withdraw", "network", "experts/000")[0] == 0
    for wrong, reason in (
        (("add", "publisher", "x"), "expected: atoll trust RUN invite"),
        (("add", "king", "x", dan), "expected: atoll trust RUN invite"),
        (("add", "admitter", "x", "zz"), "admitters.x"),
        (("rotate", "nobody", dan), "unknown name 'nobody'"),
        (("set", "max_bytes", "0"), "max_bytes"),
        (("set", "run", "x"), "with a field of"),
        (("set", "objectives", "[mine]"), "unknown objective"),
        (("set", "networks", "[a"), "is not a value of networks"),
        (("set", "threshold", "3"), "with a field of"),
        (("withdraw", "key", "owner"), "owners"),
        (("withdraw", "nothing"), "withdraw network JOB|DIGEST"),
        (("renew", "--push"), "was not pushed from this folder yet"),
    ):
        code, output = trust(*wrong)
        assert (code, reason in output) == (2, True), (wrong, output)
    code, output = trust("renew", key=("--key", str(key_file("ann", tmp_path))))
    assert (code, "is not that of an owner" in output) == (2, True)
    push(run, store, person("owner"))
    code, output = trust()
    assert "publisher    dan  " + person("dan2").public + "  experts 1, 2" in output
    assert f"withdrawn    {gil}" in output
    assert cli.main(["trust", str(store.url), "--json"]) == 0
    root = json.loads(capsys.readouterr().out)
    assert root["policy"]["max_validation_loss"] == 0.9
    assert root["version"] == 9
    assert "gil" not in root["admitters"]
    assert remote(store).networks() == {}


def test_an_owner_invites_with_one_command(
    published: Published, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It adds the key, publishes the version, and prints the line that the contributor needs."""
    store = Store.open(tmp_path / "store")
    owner = ("--key", str(key_file("owner", tmp_path)))
    assert cli.main(["push", str(run), store.url, *owner]) == 0
    capsys.readouterr()
    assert cli.main(["trust", str(run), "invite", "dan", person("dan").public, "--experts", "1", *owner]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"send this line to dan: atoll join '{store.url}#sha256={published.fingerprint}@3'"
    dan = ("--key", str(key_file("dan", tmp_path)), "--folder", str(tmp_path / "dan"))
    assert cli.main(["join", line.split("'")[1], "--expert", "1", *dan]) == 0
    assert cli.main(["trust", str(run), "set", "max_bytes", "5000000", "--push", *owner]) == 0
    assert remote(store).policy.max_bytes == 5_000_000
    assert cli.main(["push", str(run), *owner]) == 0, "the URL is that of the last push"
    assert cli.main(["trust", str(run)]) == 0
    assert f"fingerprint  {published.fingerprint}   (never changes" in capsys.readouterr().out


def test_two_owners_change_a_run(run: Path, tmp_path: Path) -> None:
    """Each signs alone. The second gets the first one's version with pull."""
    other, store = tmp_path / "dan", Store.open(tmp_path / "store")
    change_root(run, person("owner"), owners={"owner": person("owner").public, "dan": person("dan").public})
    push(run, store, person("owner"))
    pull(remote(store, other), other, shards=True)
    change_root(other, person("dan"), policy={"max_bytes": 5})
    push(other, store, person("dan"))
    assert remote(store).policy.max_bytes == 5
    change_root(run, person("owner"), policy={"max_bytes": 6})
    with pytest.raises(AtollError, match=r"has a version 4 of the root that .* lacks"):
        push(run, store, person("owner"))


# The origin on the model card, and no code outside Atoll


def test_the_card_names_who_trained_and_signed_each_network(published: Published, tmp_path: Path) -> None:
    atoll.export(published.run, tmp_path / "out", model="expert:0")
    section = (tmp_path / "out/README.md").read_text().split("## Contributors")[1].split("##")[0]
    assert f"| experts/000 | owner | {person('owner').public} |" in section


def test_a_shared_run_imports_no_class_whatever_its_settings_say(published: Published) -> None:
    choice = config.resolve({"networks": {"default": {"class": "own_networks:ConvExpert"}}})
    with pytest.raises(atoll.AtollError, match="is a shared run, and own_networks:ConvExpert is code outside Atoll"):
        own.allow(published.run, choice)
    assert "own_networks:ConvExpert" not in own._allowed
