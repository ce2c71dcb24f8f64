"""Checkpoints: everything that resuming needs, through torch.distributed.checkpoint, in safetensors and JSON.

A checkpoint is an artifact `JOB/checkpoints/SAMPLES` of weights, averages and optimizer state. Every process writes its
own part and any number of processes can read it. Its manifest, written last, holds the hash of every file, so the
newest good checkpoint is the newest one that verifies. Randomness is a function of position: it has no state to save.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import CHECKPOINT, CheckpointContent
from atoll.train.distributed import DistContext
from atoll.train.ema import EMA

FILE_BYTES = 64 << 20
"""Of one file, roughly: a file is put together in memory before it is written, so small ones keep the pause small."""


@dataclass(frozen=True)
class TrainState:
    """What training changes."""

    network: nn.Module
    ema: EMA
    optimizer: torch.optim.Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, as the very tensors that training works on. The step count follows from the position."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.ema.parameters.items():
            tensors[f"network.{name}"] = parameter.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{key}.{name}"] = self._moments(parameter)[key]
        for average, weights in self.ema.weights.items():
            tensors |= {f"average.{average}.{name}": weight for name, weight in weights.items()}
        return tensors

    def at_step(self, step: int) -> None:
        """Tell the optimizer how many steps it has made."""
        for parameter in self.ema.parameters.values():
            self._moments(parameter)["step"].fill_(step)

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of one parameter, made before the first step if need be."""
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one job."""

    run: Path
    job: str
    made_from: Mapping[str, Any]
    context: DistContext
    keep_last: int = 2

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.run / layout.checkpoints(self.job)

    def save(self, state: TrainState, images: int, seconds: float) -> Artifact:
        """Write a checkpoint; all processes take part, and it counts once the first has committed it."""
        artifact = self._artifact(images)

        def begin() -> None:
            shutil.rmtree(artifact.folder, ignore_errors=True)
            artifact.begin(CHECKPOINT, self.made_from)

        def commit() -> None:
            artifact.commit(CheckpointContent(images=images, seconds=seconds))
            self._delete_old()

        self.context.on_main(begin)
        tensors = state.tensors()
        writer = HuggingFaceStorageWriter(str(artifact.folder), files_of(tensors), save_distributed=True)
        with _quiet():
            save(tensors, storage_writer=writer, process_group=self.context.control, no_dist=self.context.size == 1)
        self.context.barrier()
        self.context.on_main(commit)
        return artifact

    def load_newest(self, state: TrainState) -> tuple[int, float]:
        """Fill the state from the newest good checkpoint; return the images seen and the seconds trained."""
        images = self.context.on_main(self._newest_valid)
        if images == 0:
            return 0, 0.0
        artifact = self._artifact(images)
        tensors = state.tensors()
        with _quiet():
            reader = HuggingFaceStorageReader(str(artifact.folder))
            load(tensors, storage_reader=reader, process_group=self.context.control, no_dist=self.context.size == 1)
        return images, artifact.read(CHECKPOINT).seconds

    def newest(self) -> str:
        """The name of the newest committed checkpoint, for messages."""
        committed = [images for images in self._all() if self._artifact(images).manifest()]
        return str(self._artifact(max(committed)).folder) if committed else "none"

    def clear(self) -> None:
        """Remove them all, once the job's result is committed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _newest_valid(self) -> int:
        for images in sorted(self._all(), reverse=True):
            artifact = self._artifact(images)
            try:
                if artifact.manifest() is None:
                    continue
                artifact.open(CHECKPOINT, verify=True)
            except AtollError as error:
                aside = artifact.folder.with_name(f"{artifact.folder.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                artifact.folder.rename(aside)
                print(f"{artifact.folder} is damaged, moved to {aside.name} and passed over: {error}", flush=True)
                continue
            artifact.check(CHECKPOINT, self.made_from)
            return images
        return 0

    def _all(self) -> Iterator[int]:
        if self.folder.is_dir():
            yield from (int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _artifact(self, images: int) -> Artifact:
        return Artifact(self.run, layout.checkpoint(self.job, images))

    def _delete_old(self) -> None:
        committed = sorted(images for images in self._all() if self._artifact(images).manifest())
        for images in set(self._all()) - set(committed):  # left by jobs that were killed while saving
            if images < committed[-1]:
                shutil.rmtree(self._artifact(images).folder)
        for images in committed[: -self.keep_last]:
            # The manifest goes first: what is half removed must not look whole.
            self._artifact(images).path(MANIFEST_FILE).unlink()
            shutil.rmtree(self._artifact(images).folder)


def files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes to."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE_BYTES
        size += tensor.numel() * tensor.element_size()
    return files


def _quiet() -> AbstractContextManager[object]:
    """torch warns that it assumes a single process when it is told that there is one."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
