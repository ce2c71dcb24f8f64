"""Hostile adapters and folders are refused with a reason, before memory is spent on them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from atoll import cli
from atoll.apps.share.admission import Contribution, check_declaration, check_files
from atoll.core.artifacts import Artifact, FileEntry, Manifest, to_json
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS
from atoll.encoders.base_pipeline import BaseName, open_base
from atoll.nets import base as bases
from atoll.nets import load_network
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused, strict_manifest
from base.conftest import FAMILY
from base.tiny import pipeline
from train.conftest import merge

JOB, CONFIG, WEIGHTS = "experts/000", "config.json", "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(trained_base: Path, tmp_path: Path) -> Path:
    """A copy of an expert's files."""
    return Path(shutil.copytree(trained_base / JOB / "final", tmp_path / JOB / "final"))


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def cut(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = (tensor[:2] if ".lora_A." in name else tensor[:, :2]).contiguous()


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another rank": (lambda folder: change_tensors(folder, cut), r"lora_A\.weight has shape \(2, "),
    "extra tensor": (
        lambda folder: change_tensors(folder, lambda own: own.update(backdoor=torch.zeros(1))), "unexpected backdoor"
    ),
    "large rank": (lambda folder: change_config(folder, lora={"rank": 1024, "alpha": 1.0}), "expected"),
    "rank bomb": (lambda folder: change_config(folder, lora={"rank": 10**6, "alpha": 1.0}), "rank.*1024, got 1000000"),
    "another base": (lambda folder: change_config(folder, weights="0" * 64), "is not here; get it, and set"),
    "not a network": (lambda folder: change_config(folder, network_class="DiffusionPipeline"), "has no network"),
    "unknown field": (lambda folder: change_config(folder, code="import os"), "code"),
}  # fmt: skip


@pytest.mark.parametrize("attack", FOLDERS)
def test_a_hostile_folder_is_refused_before_memory_is_spent(
    attack: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = FOLDERS[attack]
    load_network(folder)
    change(folder)

    def only_on_meta(*arguments: Any) -> Any:
        assert torch.get_default_device().type == "meta"
        return inject(*arguments)

    inject = bases._inject
    monkeypatch.setattr(bases, "_inject", only_on_meta)
    with pytest.raises(AtollError, match=reason):
        load_network(folder)


def contribution(run: Path, folder: Path, policy: Policy, **claims: Any) -> Contribution:
    """Offer the files in a folder, with other claims about the network."""
    made = Artifact(run, f"{JOB}/final").open(EXPERT)
    network = {**made.content["network"], **claims}
    files = {
        file.name: FileEntry(file.stat().st_size, made.files[file.name].sha256)
        for file in folder.iterdir()
        if file.name in made.files
    }
    manifest = Manifest(made.kind, made.made_from, {**made.content, "network": network}, files, made.version)
    return Contribution(JOB, manifest, (Artifact(run, "data/shards/cluster_000").open(SHARDS),), policy)


def review(run: Path, folder: Path, policy: Policy | None = None, **claims: Any) -> None:
    offered = contribution(run, folder, policy or Policy(), **claims)
    check_declaration(offered)
    check_files(offered, Artifact(folder.parents[2], f"{JOB}/final"))


def test_the_policy_counts_the_adapter(trained_base: Path, folder: Path) -> None:
    review(trained_base, folder)
    count = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS).values())
    review(trained_base, folder, Policy(max_parameters=count))
    with pytest.raises(Refused, match=f"has {count:,} parameters; the policy of the run allows {count - 1:,}"):
        review(trained_base, folder, Policy(max_parameters=count - 1))


LORA = {"rank": 4, "alpha": 4.0, "targets": "auto", "dropout": 0.0}
CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "rank bomb": ({"lora": {**LORA, "rank": 10**6}}, "rank is 1000000; the limit"),
    "another rank": ({"lora": {**LORA, "rank": 2}}, "config.json is not the network that the manifest declares"),
    "other targets": ({"lora": {**LORA, "targets": ["nothing"]}}, "cannot be built: lora.targets"),
    "another base": ({"weights": "0" * 64}, "not the one that the data of this run was prepared for"),
    "another class": ({"network_class": "AutoencoderKL"}, "not the one that the data of this run"),
    "another trace": ({"trace": {}}, "not the one that the data of this run"),
    "a network of its own": ({"_class_name": "DiT"}, "not the one that the data of this run"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_hostile_declaration_is_refused(claim: str, trained_base: Path, folder: Path) -> None:
    claims, reason = CLAIMS[claim]
    with pytest.raises(Refused, match=reason):
        review(trained_base, folder, **claims)


def test_values_that_are_not_finite_are_refused(trained_base: Path, folder: Path) -> None:
    change_tensors(folder, lambda own: next(iter(own.values())).fill_(float("nan")))
    with pytest.raises(Refused, match="values that are not finite"):
        review(trained_base, folder)


def test_a_name_that_leaves_the_folder_is_refused(trained_base: Path, base: Path, tmp_path: Path) -> None:
    manifest = Artifact(trained_base, f"{JOB}/final").open(EXPERT)
    entry = manifest.files[WEIGHTS]
    with pytest.raises(Refused, match="only letters, digits"):
        strict_manifest(replace(manifest, files={"../../adapter.safetensors": entry}).to_json(), "the manifest")
    index = json.loads((base / "model_index.json").read_text())
    index["transformer/../../outside"] = index.pop("transformer")
    (tmp_path / "model_index.json").write_bytes(to_json(index))
    with pytest.raises(AtollError, match="lists a component 'transformer/"):
        BaseName.parse(f"base:{tmp_path}").slot  # noqa: B018


def test_code_in_the_folder_of_a_base_is_not_executed(base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "base"))
    trap = f"open({str(tmp_path / 'executed')!r}, 'w')"
    for place in (copy / "evil.py", copy / "transformer" / "evil.py"):
        place.write_text(trap)
    index = json.loads((copy / "model_index.json").read_text())
    for changes in ({"_class_name": ["evil", "Evil"]}, {"transformer": ["evil", "Evil"]}):
        (copy / "model_index.json").write_bytes(to_json({**index, **changes}))
        with pytest.raises((AtollError, ValueError)):
            open_base.__wrapped__(f"base:{copy}")
    assert not (tmp_path / "executed").exists()


def test_a_missing_base_says_how_to_get_it(
    trained_base: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained_base, tmp_path / "run"))
    values = yaml.safe_load((run / "atoll.yaml").read_text())
    (run / "atoll.yaml").write_text(
        yaml.safe_dump(merge(values, {"networks": {"default": {"base": str(tmp_path / "gone")}}}))
    )
    for command in (["sample", str(run), "a red cube"], ["train", str(run), "--expert", "0"]):
        assert cli.main(command) == 2
        assert "gone' is not a folder" in capsys.readouterr().err

    # Another network of the same class is not that base. Forget the bases that other tests have opened.
    shutil.copytree(base, tmp_path / "gone")
    pipeline(FAMILY, seed=1).transformer.save_pretrained(tmp_path / "gone" / "transformer")
    monkeypatch.setattr(bases, "_open", {})
    for known in list(bases.FOLDERS):
        monkeypatch.delitem(bases.FOLDERS, known)
    assert cli.main(["sample", str(run), "a red cube"]) == 2
    assert "is not here; get it, and set networks.default.base" in capsys.readouterr().err
    assert cli.main(["train", str(run), "--expert", "0"]) == 2
    assert "is not the base that the data was prepared for" in capsys.readouterr().err
