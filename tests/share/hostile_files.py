"""Hostile files: weights that are not safetensors, names outside the folder, false headers."""

import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.transfer import parts_of, signature_key
from atoll.core.artifacts import FileEntry, Manifest, to_json
from atoll.nets.io import weights_digest
from share.shared import person

NAME = "experts/001/final"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass
class Offer:
    """A contribution before it is written: its files by name, and the content of its manifest."""

    files: dict[str, bytes]
    kind: str
    made_from: dict[str, Any]
    content: dict[str, Any]
    listing: dict[str, FileEntry] = field(default_factory=dict)
    """Entries of the manifest that differ from the files."""
    raw: Callable[[bytes], bytes] = lambda data: data
    """Changes the bytes of the manifest at the end."""
    signer: str | None = "ann"
    signed_name: str = NAME
    signed_weights: str | None = None
    """Another digest of the weights than the true one."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Objects in the store that differ from the files."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return load(self.files[WEIGHTS])

    def _weights(self) -> str:
        try:
            return weights_digest(sorted(self.tensors().items()))
        except SafetensorError:
            return "0" * 64

    def put(self, remote: RemoteRun) -> str:
        """Write everything into a store without following the protocol; return the digest of the manifest."""
        store = remote.store
        entries = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in self.files.items()}
        manifest = Manifest(self.kind, self.made_from, self.content, {**entries, **self.listing})
        for name, data in self.files.items():
            for part in parts_of(NAME, entries[name]):
                store.write(part.key, self.objects.get(name, data))
        data = self.raw(manifest.to_json())
        digest = hashlib.sha256(data).hexdigest()
        store.write(f"{NAME}/manifests/{digest}.json", data)
        if self.signer is not None:
            weights = self.signed_weights or self._weights()
            statement = remote.trust.statement("publish", self.signed_name, manifest.digest, weights=weights)
            signature = person(self.signer).sign(statement)
            store.write(signature_key(NAME, digest), to_json(signature.model_dump()))
        return digest


# Each function below corrupts one thing.


def header(tensors: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode() if isinstance(tensors, dict) else tensors
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def split(weights: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", weights[:8])
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def reheaded(offer: Offer, change: Callable[[dict[str, Any], list[str]], None], rest: bytes = b"") -> None:
    head, data = split(offer.files[WEIGHTS])
    change(head, sorted(name for name in head if name != "__metadata__"))
    offer.files[WEIGHTS] = header(head, data + rest)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, ("/tmp/atoll-was-here", "w"))


def renamed_pickle(offer: Offer) -> None:
    offer.files[WEIGHTS] = pickle.dumps(Bomb())


def torch_file_renamed(offer: Offer) -> None:
    buffer = io.BytesIO()
    torch.save(offer.tensors(), buffer)
    offer.files[WEIGHTS] = buffer.getvalue()


def zip_bomb(offer: Offer) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights", bytes(50_000_000))
    offer.files[WEIGHTS] = buffer.getvalue()


def tar_that_climbs_out(offer: Offer) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../../../tmp/atoll-was-here"))
    offer.files["ema-x.tar"] = buffer.getvalue()


def name_that_climbs_out(offer: Offer) -> None:
    offer.files["../../../escaped.safetensors"] = save({})


def absolute_name(offer: Offer) -> None:
    offer.files["/tmp/atoll-was-here.safetensors"] = save({})


def backslash_name(offer: Offer) -> None:
    offer.files["..\\ema-x.safetensors"] = save({})


def hidden_name(offer: Offer) -> None:
    offer.files[".plan.json"] = b"{}"


def two_names_in_one(offer: Offer) -> None:
    offer.files["Config.json"] = offer.files["config.json"]


def extra_file(offer: Offer) -> None:
    offer.files["setup.py"] = b"import os"


def huge_header(offer: Offer) -> None:
    offer.files[WEIGHTS] = struct.pack("<Q", 1 << 40) + offer.files[WEIGHTS][8:]


def header_longer_than_the_file(offer: Offer) -> None:
    offer.files[WEIGHTS] = struct.pack("<Q", 10_000_000) + offer.files[WEIGHTS][8:]


def empty_weights(offer: Offer) -> None:
    offer.files[WEIGHTS] = b""


def overlapping_tensors(offer: Offer) -> None:
    def change(head: dict[str, Any], names: list[str]) -> None:
        a, b = next((a, b) for a in names for b in names if a != b and head[a]["shape"] == head[b]["shape"])
        head[a]["data_offsets"] = head[b]["data_offsets"]

    reheaded(offer, change)


def offsets_out_of_the_file(offer: Offer) -> None:
    def change(head: dict[str, Any], names: list[str]) -> None:
        last = max(names, key=lambda name: head[name]["data_offsets"][1])
        start, end = head[last]["data_offsets"]
        head[last]["data_offsets"] = [start + (1 << 30), end + (1 << 30)]

    reheaded(offer, change)


def negative_offsets(offer: Offer) -> None:
    reheaded(offer, lambda head, names: head[names[0]].update(data_offsets=[-4, 0]))


def trailing_data(offer: Offer) -> None:
    reheaded(offer, lambda *_: None, rest=b"#!/bin/sh\n")


def shape_of_billions(offer: Offer) -> None:
    reheaded(offer, lambda head, names: head[names[0]].update(shape=[1 << 40, 1 << 40]))


def unknown_dtype(offer: Offer) -> None:
    reheaded(offer, lambda head, names: head[names[0]].update(dtype="PICKLE"))


def other_dtype(offer: Offer) -> None:
    offer.files[WEIGHTS] = save({name: tensor.half() for name, tensor in offer.tensors().items()})


def integers_for_weights(offer: Offer) -> None:
    """The size of the tensor stays the same; its bits are integers."""
    reheaded(offer, lambda head, names: head[names[0]].update(dtype="I32"))


def wrong_shape(offer: Offer) -> None:
    tensors = offer.tensors()
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    offer.files[WEIGHTS] = save({**tensors, name: tensors[name].T.contiguous().reshape(-1)})


def tensor_missing(offer: Offer) -> None:
    tensors = offer.tensors()
    tensors.pop(sorted(tensors)[0])
    offer.files[WEIGHTS] = save(tensors)


def tensor_too_many(offer: Offer) -> None:
    offer.files[WEIGHTS] = save({**offer.tensors(), "backdoor": torch.zeros(1)})


def not_a_number(offer: Offer) -> None:
    tensors = offer.tensors()
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    offer.files[WEIGHTS] = save(tensors)


def infinite_ema(offer: Offer) -> None:
    offer.files["ema-short.safetensors"] = save({name: t / 0 for name, t in list(offer.tensors().items())[:1]})


def random_weights(offer: Offer) -> None:
    rng = torch.Generator().manual_seed(0)
    offer.files[WEIGHTS] = save({k: torch.randn(v.shape, generator=rng) for k, v in offer.tensors().items()})


def other_signed_weights(offer: Offer) -> None:
    """The digest of an honest network, for an export that nobody can compare with the manifest."""
    offer.signed_weights = "1" * 64


FILES: dict[Callable[[Offer], None], str] = {
    renamed_pickle: "not a safetensors file",
    torch_file_renamed: "not a safetensors file",
    zip_bomb: "not a safetensors file",
    tar_that_climbs_out: "ema-x.tar is not a file of an expert",
    name_that_climbs_out: "only letters, digits",
    absolute_name: "only letters, digits",
    backslash_name: "only letters, digits",
    hidden_name: "only letters, digits",
    two_names_in_one: "upper and lower case",
    extra_file: "setup.py is not a file of an expert",
    huge_header: "not a safetensors file",
    header_longer_than_the_file: "not a safetensors file",
    empty_weights: "not a safetensors file",
    overlapping_tensors: "not a safetensors file",
    offsets_out_of_the_file: "not a safetensors file",
    negative_offsets: "not a safetensors file",
    trailing_data: "not a safetensors file",
    shape_of_billions: "not a safetensors file",
    unknown_dtype: "not a safetensors file",
    other_dtype: "is torch.float16 .*; expected torch.float32",
    integers_for_weights: "is torch.int32 .*; expected torch.float32",
    wrong_shape: r"is torch.float32 \[\d+\]; expected",
    tensor_missing: "has no tensor",
    tensor_too_many: "has a tensor 'backdoor' that the declared network lacks",
    not_a_number: "values that are not finite",
    infinite_ema: "values that are not finite",
    random_weights: "its error at time|untrained network",
    other_signed_weights: "its weights are not those that its publisher signed",
}
"""Each corruption with the reason that the refusal must give."""
