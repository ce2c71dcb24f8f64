"""Checkpoints of others: measured before a worker trains them further and signs the result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.apps.share import worker as join
from atoll.apps.share.checkpoint_publisher import CheckpointPublisher
from atoll.apps.share.remote_run import Access
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker, open_worker
from atoll.core.artifacts import Artifact
from atoll.core.manifests import CHECKPOINT
from share.shared import person, publishers, share
from train.conftest import Copy

BIAS = "network.final.linear.bias"
DOCTORED: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "finished": dict,
    "tint": lambda tensors: tensors[BIAS].add_(3),
    "scaled": lambda tensors: tensors["network.final.linear.weight"].mul_(30),
    "null condition": lambda tensors: tensors["network.null_text"].fill_(3e38),
    "not a number": lambda tensors: tensors[BIAS].fill_(torch.nan),
    "another shape": lambda tensors: tensors.update({BIAS: torch.zeros(3)}),
    "a tensor is missing": lambda tensors: tensors.pop(BIAS),
}
"""What mallory does to the weights of a checkpoint that she publishes; one claims to have seen all images."""


def stopped(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Let mallory train to her first checkpoint, change it, publish it, and release the lease."""
    on_checkpoint = CheckpointPublisher.on_checkpoint

    def publish(self: CheckpointPublisher, checkpoint: Artifact) -> None:
        if name is not None:
            rewrite(checkpoint, DOCTORED[name], **({"images": 640} if name == "finished" else {}))
        on_checkpoint(self, checkpoint)
        self.stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointPublisher, "on_checkpoint", publish)
        assert worker(store, folder, "mallory").run(expert=1) == 0


def rewrite(checkpoint: Artifact, doctor: Callable[..., object], **claims: int) -> None:
    manifest = checkpoint.manifest()
    (name,) = manifest.files
    with safe_open(checkpoint.path(name), "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    doctor(tensors)
    checkpoint.path("manifest.json").unlink()
    save_file(tensors, checkpoint.path(name), metadata)
    checkpoint.begin(CHECKPOINT, manifest.made_from)
    checkpoint.commit({**manifest.content, **claims})


def worker(store: Store, folder: Path, who: str) -> Worker:
    return open_worker(store.url, folder / who, Access(None, True, person(who)), publish_every=0.0)


@pytest.mark.parametrize("name", [None, *DOCTORED])
def test_a_doctored_checkpoint_is_not_resumed(
    name: str | None, new_run: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann begins anew; an honest checkpoint of the same images is resumed."""
    store = Store.open(f"memory://{tmp_path.name}")
    share(new_run(), store, publishers=publishers("ann", "mallory"))
    stopped(store, tmp_path, monkeypatch, name)
    ann = worker(store, tmp_path, "ann")
    capsys.readouterr()
    opened: list[Any] = []

    def end(spec: object, publisher: object) -> None:
        del publisher
        opened.append(spec)
        raise join.Requeue

    monkeypatch.setattr(join, "train_job", end)
    ann.run(expert=1)
    output = capsys.readouterr().out
    folders = list((tmp_path / "ann/experts/001/checkpoints").glob("[0-9]*"))
    if name is None:
        assert "experts/001: resuming from" in output
        assert len(folders) == 1
    else:
        reason = "it leaves nothing to train" if name == "finished" else ""
        assert f"the published checkpoint and its settings are ignored: {reason}" in output
        assert folders == []
    assert opened
