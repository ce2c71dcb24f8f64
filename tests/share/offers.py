"""Contributions of an expert: a valid one, and one corruption of it for each check of admission."""

import hashlib
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from atoll import flow
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.transfer import parts_of, signature_key
from atoll.core.artifacts import FileEntry, Manifest, to_json
from atoll.data.density import DENSITY_FILE
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


# Each of these corrupts one thing.


def header(tensors: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


def split(weights: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", weights[:8])
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


Corruption = Callable[[Offer], object]


def weights(change: Callable[[bytes], bytes]) -> Corruption:
    return lambda offer: offer.files.update({WEIGHTS: change(offer.files[WEIGHTS])})


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Corruption:
    return weights(lambda data: save({name: part.contiguous() for name, part in change(load(data)).items()}))


def headed(change: Callable[[dict[str, Any], list[str]], object], rest: bytes = b"") -> Corruption:
    """Change the header of the weights: the entries by name, and the names in the order of the bytes."""

    def apply(data: bytes) -> bytes:
        head, body = split(data)
        names = sorted(set(head) - {"__metadata__"}, key=lambda name: head[name]["data_offsets"])
        change(head, names)
        return header(head, body + rest)

    return weights(apply)


def overlap(head: dict[str, Any], names: list[str]) -> None:
    a, b = next((a, b) for a in names for b in names if a != b and head[a]["shape"] == head[b]["shape"])
    head[a]["data_offsets"] = head[b]["data_offsets"]


def first(state: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    """Change the first value of the first tensor."""
    next(iter(state.values())).view(-1)[0] = value
    return state


def density(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Corruption:
    """Change tensors of the density."""

    def apply(offer: Offer) -> None:
        parts = load(offer.files[DENSITY_FILE])
        offer.files[DENSITY_FILE] = save(parts | {name: change(parts[name]) for name, change in changes.items()})

    return apply


def files(**named: bytes) -> Corruption:
    return lambda offer: offer.files.update(named)


def raw(old: bytes, new: bytes) -> Corruption:
    """Change the bytes of the manifest."""
    return lambda offer: setattr(offer, "raw", lambda data: data.replace(old, new, 1))


def listed(entry: FileEntry, name: str = WEIGHTS) -> Corruption:
    return lambda offer: offer.listing.update({name: entry})


def content(**changes: Any) -> Corruption:
    return lambda offer: offer.content.update(changes)


def network(**changes: Any) -> Corruption:
    return lambda offer: offer.content["network"].update(changes)


def config(data: Callable[[dict[str, Any]], bytes]) -> Corruption:
    return lambda offer: offer.files.update({"config.json": data(offer.content["network"])})


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, ("/tmp/atoll-was-here", "w"))


def torch_file(data: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(load(data), buffer)
    return buffer.getvalue()


def zip_bomb(_: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights", bytes(50_000_000))
    return buffer.getvalue()


NOT_PLAIN, NOT_DENSITY, NAMES = "not a safetensors file", "not the density in the shards of cluster 1", "only letters"
NAN, SEED = float("nan"), torch.Generator().manual_seed(0)
HOSTILE: dict[str, tuple[Corruption, str]] = {
    # Files
    "a pickle": (weights(lambda _: pickle.dumps(Bomb())), NOT_PLAIN),
    "a torch file": (weights(torch_file), NOT_PLAIN),
    "a zip bomb": (weights(zip_bomb), NOT_PLAIN),
    "an archive": (files(**{"ema-x.tar": b"x"}), "ema-x.tar is not a file of an expert"),
    "a program": (files(**{"setup.py": b"import os"}), "setup.py is not a file of an expert"),
    "a name that climbs out": (files(**{"../../../escaped.safetensors": b"x"}), NAMES),
    "an absolute name": (files(**{"/tmp/atoll-was-here.safetensors": b"x"}), NAMES),
    "a name with backslashes": (files(**{"..\\ema-x.safetensors": b"x"}), NAMES),
    "a hidden name": (files(**{".plan.json": b"{}"}), NAMES),
    "two names in one": (files(**{"Config.json": b"{}"}), "upper and lower case"),
    "a huge header": (weights(lambda data: struct.pack("<Q", 1 << 40) + data[8:]), NOT_PLAIN),
    "a header beyond the file": (weights(lambda data: struct.pack("<Q", 10_000_000) + data[8:]), NOT_PLAIN),
    "no bytes": (weights(lambda _: b""), NOT_PLAIN),
    "overlapping tensors": (headed(overlap), NOT_PLAIN),
    "negative offsets": (headed(lambda head, names: head[names[0]].update(data_offsets=[-4, 0])), NOT_PLAIN),
    "trailing data": (headed(lambda *_: None, rest=b"#!/bin/sh\n"), NOT_PLAIN),
    "a shape of billions": (headed(lambda head, names: head[names[0]].update(shape=[1 << 40, 1 << 40])), NOT_PLAIN),
    "an unknown dtype": (headed(lambda head, names: head[names[0]].update(dtype="PICKLE")), NOT_PLAIN),
    "another dtype": (tensors(lambda state: {k: v.half() for k, v in state.items()}), "is torch.float16 .*; expected"),
    "integers": (headed(lambda head, names: head[names[0]].update(dtype="I32")), "is torch.int32 .*; expected"),
    "a wrong shape": (tensors(lambda state: {k: v.reshape(-1) for k, v in state.items()}), r"\[\d+\]; expected"),
    "a missing tensor": (tensors(lambda state: dict([*state.items()][1:])), "has no tensor"),
    "a tensor too many": (tensors(lambda state: {**state, "backdoor": torch.zeros(1)}), "tensor 'backdoor' that the"),
    "not a number": (tensors(lambda state: first(state, NAN)), "values that are not finite"),
    "an infinite EMA": (
        lambda offer: offer.files.update({"ema-short.safetensors": save(first(offer.tensors(), math.inf))}),
        "values that are not finite",
    ),
    "random weights": (
        tensors(lambda state: {k: torch.randn(v.shape, generator=SEED) for k, v in state.items()}),
        "its error at time|untrained network",
    ),
    # The digest of an honest network, for an export that nobody can compare with the manifest.
    "other signed weights": (lambda offer: setattr(offer, "signed_weights", "1" * 64), "not those that its publisher"),
    # The manifest
    "deep JSON": (config(lambda _: b"[" * 1000 + b"]" * 1000), "nested deeper than 32 levels"),
    "a deep manifest": (
        raw(b'"content": {', b'"content": {"a": ' + b'{"b":' * 5000 + b"1" + b"}" * 5000 + b","), "nested deeper than",
    ),
    "a huge manifest": (content(padding="x" * (17 << 20)), "bytes; the limit is"),
    "a repeated key": (raw(b'"format": 1', b'"format": 1,\n "format": 1'), "'format' appears twice"),
    "NaN": (raw(b'"format": 1', b'"format": NaN'), "NaN is not a number"),
    "infinity": (raw(b'"format": 1', b'"format": 1e999'), "1e999 is not a finite number"),
    "no text": (raw(b"{", b"\x80\x04{"), "not UTF-8"),
    "another format": (raw(b'"format": 1', b'"format": 2'), "format: Input should be 1"),
    "another spelling": (raw(b'"format": 1', b'"format":  1'), "is not canonical JSON"),
    "a size of text": (listed(FileEntry("1" * 5000, "0" * 64)), "size: Input should be a valid integer"),
    "a hash with a path": (listed(FileEntry(10, "../../etc/passwd")), "sha256: String should match pattern"),
    "a wrong hash": (
        lambda offer: offer.objects.update({WEIGHTS: bytes(len(offer.files[WEIGHTS]))}), "its SHA-256 differs",
    ),
    # Of a terabyte, which need not exist in the store.
    "a size beyond the network": (listed(FileEntry(1 << 40, "0" * 64)), "the policy allows"),
    "a missing object": (listed(FileEntry(9, "0" * 64), "ema-x.safetensors"), "is missing though a manifest lists it"),
    "a million layers": (network(depth=1_000_000), "depth is 1000000"),
    "a wide network": (network(width=16384, depth=64, heads=64), "parameters; the policy of the run allows"),
    "a network for huge images": (network(size=65536), "the latents are"),
    "an unknown network": (network(_class_name="os.system"), "unknown kind of network"),
    "an impossible network": (network(heads=0), "network: .* heads"),
    "an unknown field of the network": (network(on_load="import os"), "network: .* unknown field"),
    "another configuration": (
        config(lambda own: json.dumps({**own, "qk_norm": True}).encode()), "is not the network that the manifest",
    ),
    "code as configuration": (config(lambda _: b"__import__('os').system('true')"), "config.json is not plain JSON"),
    "an unknown objective": (content(objective={"schedule": "mine"}), "objective.schedule"),
    "a forbidden objective": (
        content(objective=flow.objective("ve-x0").spec.model_dump(mode="json")), "allows only the objectives",
    ),
    "a strange bridge": (content(bridge={"prediction_error": -1.0, "mode": "published"}), "bridge.mode"),
    "a bridge with a negative error": (content(bridge={"prediction_error": -1.0}), "its objective or its bridge"),
    "a bridge of other data": (content(bridge={"data_mean": [9.0, 9.0, 9.0]}), "bridge.data_mean"),
    "a network for other latents": (
        network(normalization={"scaling_factor": 0.18215, "shift_factor": 0.0}), r"normalized as z . 0.18215; this run",
    ),
    "a scale below zero": (network(normalization={"scaling_factor": -1.0}), "network: .* normalization.scaling_factor"),
    "a condition that does not exist": (content(conditioning=["text", "password"]), "conditioning.1"),
    "a condition that the data lacks": (content(conditioning=["text", "label"]), "it is conditioned on text, label"),
    "another cluster": (content(job="experts/002", clusters=[2]), "expected 'experts/001'"),
    "two clusters": (content(clusters=[1, 2]), "expected 'experts/001'"),
    "other data": (lambda offer: offer.made_from.update(data=["0" * 64]), "not trained on the shards of cluster 1"),
    "another fingerprint": (content(fingerprint="0" * 64), "its field 'fingerprint' differs from that of cluster 1"),
    "no statistics": (lambda offer: offer.content.pop("statistics"), "statistics: Field required"),
    "other statistics": (
        content(statistics={"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}), "its field 'statistics' differs",
    ),
    "a router": (lambda offer: setattr(offer, "kind", "router"), "its manifest is an artifact of kind 'router'"),
    "a density of more images": (density(count=lambda part: torch.full_like(part, 1e30)), NOT_DENSITY),
    "a density with longer directions": (density(directions=lambda part: 1.001 * part), NOT_DENSITY),
    "no density": (lambda offer: offer.files.pop(DENSITY_FILE), NOT_DENSITY),
    "no signature": (lambda offer: setattr(offer, "signer", None), "is not signed"),
    "a signature for another expert": (
        lambda offer: setattr(offer, "signed_name", "experts/000/final"), "does not match its content and slot",
    ),
    "a change after the signature": (raw(b'"images": 640', b'"images": 641'), "does not match its content and slot"),
}  # fmt: skip
"""Each corruption with the reason that the refusal must give."""
