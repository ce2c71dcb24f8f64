"""`atoll export --push`: huggingface_hub uploads to a server that speaks its protocol, and reads it back."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file

import atoll
from atoll.apps.models.publish import publish
from atoll.core import layout
from atoll.core.artifacts import Artifact, sha256_of
from atoll.core.errors import AtollError
from atoll.core.manifests import PIPELINE, PipelineContent
from models import hub_server
from models.hub_server import TOKEN, Hub

METRICS = {
    "frechet": 123.456,
    "kid": {"value": 0.0874, "standard_error": 0.001},
    "protocol": {"num_images": 8, "reference": {"source": "train"}},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server.running() as found:
        yield found


def run(hub: Hub, cwd: Path, *command: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody with a token of this hub. Xet, the hub's other protocol, needs its own servers."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cwd / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0",
    }  # fmt: skip
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def atoll_verb(hub: Hub, cwd: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    return run(hub, cwd, sys.executable, "-m", "atoll.cli", *words, token=token)


@pytest.mark.slow
def test_an_export_is_published_and_opened_by_its_name(conditioned_run: Path, tmp_path: Path, hub: Hub) -> None:
    source = tmp_path / "run"
    shutil.copytree(conditioned_run, source)
    (source / layout.EVALUATION).mkdir(exist_ok=True)
    models = [{"model": "experts", "label": "experts top-1", "metrics": {"inception": METRICS}}]
    (source / layout.LATEST_EVALUATION).write_text(json.dumps({"models": models}))
    words = ("export", str(source), "out", "--license", "cc-by-sa-4.0", "--push", "ann/shapes")
    done = atoll_verb(hub, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["ann/shapes"]
    assert f"uploaded, {hub.url}/ann/shapes/commit/{repository.sha}" in done.stdout
    assert repository.private, "its owner decides when others see it"

    # Every file of the folder, byte for byte; weights went through LFS
    folder = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*")}
    files = {name: path for name, path in folder.items() if path.is_file()}
    assert set(repository.files) == set(files)
    for name, path in files.items():
        assert hashlib.sha256(repository.files[name]).hexdigest() == sha256_of(path), name
    assert sha256_of(files["expert_0/diffusion_pytorch_model.safetensors"]) in hub.objects
    assert len(repository.commits) == 1
    assert repository.commits[0].startswith("Export of Atoll, ")

    # The card: license and metrics in its front matter, as the hub reads them
    card = ModelCard(repository.files["README.md"].decode())
    assert card.data.license == "cc-by-sa-4.0"
    assert card.data.eval_results is not None
    assert {(result.metric_type, result.metric_value) for result in card.data.eval_results} == {
        ("fid", 123.46), ("kid", 0.0874)
    }  # fmt: skip
    assert card.data.eval_results[0].dataset_name == "made up, train images"

    # Whoever may read it gets the images of the run.
    code = (
        "import sys, torch, atoll; from safetensors.torch import save_file; torch.set_num_threads(1)\n"
        "made = atoll.sample('ann/shapes', labels=['circle', 'square'], steps=2, seed=3)\n"
        "save_file({'latents': made.latents}, 'latents.safetensors')"
    )
    other = tmp_path / "other"
    other.mkdir()
    opened = run(hub, other, sys.executable, "-c", code)
    assert opened.returncode == 0, opened.stderr
    expected = atoll.sample(conditioned_run, labels=["circle", "square"], steps=2, seed=3).latents
    assert torch.equal(load_file(other / "latents.safetensors")["latents"], expected)

    # Again, with an edited card: only the card is uploaded.
    (tmp_path / "out/README.md").write_text((tmp_path / "out/README.md").read_text() + "\nA remark.\n")
    (tmp_path / "out/notes.txt").write_text("of nobody's business")
    before = len([line for line in hub.requests if line.startswith("PUT /lfs/")])
    again = atoll_verb(hub, tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert repository.files["README.md"].endswith(b"\nA remark.\n")
    assert "notes.txt" not in repository.files, "only files of the export"
    assert len([line for line in hub.requests if line.startswith("PUT /lfs/")]) == before


@pytest.mark.parametrize(
    ("name", "token", "reason"),
    [("ann/shapes", "hf_wrong", "401"), ("eve/shapes", TOKEN, "403"), ("not a name", TOKEN, "alphanumeric")],
)
def test_a_push_that_is_not_allowed_is_an_error_with_the_reason(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, token: str, reason: str
) -> None:
    artifact = Artifact(tmp_path, "out")
    artifact.begin(PIPELINE, {})
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(AtollError, match=f"out is complete, but was not uploaded to {name}: .*{reason}"):
        publish(artifact.folder, name, artifact.commit(PipelineContent(experts=1)))
    assert not hub.repositories
