"""Hostile manifests: invalid JSON, enormous networks, false origins and signatures."""

import json
from collections.abc import Callable

import torch
from safetensors.torch import load, save

from atoll import flow
from atoll.core.artifacts import FileEntry
from share.hostile_files import WEIGHTS, Offer


def deep_json(offer: Offer) -> None:
    offer.files["config.json"] = b"[" * 1000 + b"]" * 1000


def deep_manifest(offer: Offer) -> None:
    deep = b'{"b":' * 5000 + b"1" + b"}" * 5000
    offer.raw = lambda data: data.replace(b'"content": {', b'"content": {"a": ' + deep + b",", 1)


def huge_manifest(offer: Offer) -> None:
    offer.content["padding"] = "x" * (17 << 20)


def repeated_key(offer: Offer) -> None:
    offer.raw = lambda data: data.replace(b'"format": 1', b'"format": 1,\n "format": 1', 1)


def nan_constant(offer: Offer) -> None:
    offer.raw = lambda data: data.replace(b'"format": 1', b'"format": NaN', 1)


def infinite_number(offer: Offer) -> None:
    offer.raw = lambda data: data.replace(b'"format": 1', b'"format": 1e999', 1)


def not_json(offer: Offer) -> None:
    offer.raw = lambda data: b"\x80\x04" + data


def other_format(offer: Offer) -> None:
    offer.raw = lambda data: data.replace(b'"format": 1', b'"format": 2', 1)


def other_spelling(offer: Offer) -> None:
    offer.raw = lambda data: json.dumps(json.loads(data)).encode()


def size_of_text(offer: Offer) -> None:
    offer.listing[WEIGHTS] = FileEntry("1" * 5000, "0" * 64)  # type: ignore[arg-type]


def hash_with_a_path(offer: Offer) -> None:
    offer.listing[WEIGHTS] = FileEntry(10, "../../../../etc/passwd")


def wrong_hash(offer: Offer) -> None:
    offer.objects[WEIGHTS] = bytes(len(offer.files[WEIGHTS]))


def size_beyond_the_network(offer: Offer) -> None:
    """A file of a terabyte, which need not exist in the store."""
    offer.listing[WEIGHTS] = FileEntry(1 << 40, "0" * 64)


def missing_object(offer: Offer) -> None:
    offer.listing["ema-short.safetensors"] = FileEntry(100, "0" * 64)


def network_of_a_million_layers(offer: Offer) -> None:
    offer.content["network"]["depth"] = 1_000_000


def network_too_wide(offer: Offer) -> None:
    offer.content["network"] |= {"width": 16384, "depth": 64, "heads": 64}


def network_for_huge_images(offer: Offer) -> None:
    offer.content["network"]["size"] = 65536


def unknown_network(offer: Offer) -> None:
    offer.content["network"]["_class_name"] = "os.system"


def impossible_network(offer: Offer) -> None:
    offer.content["network"]["heads"] = 0


def unknown_network_field(offer: Offer) -> None:
    offer.content["network"]["on_load"] = "import os"


def other_config(offer: Offer) -> None:
    offer.files["config.json"] = json.dumps({**offer.content["network"], "qk_norm": True}).encode()


def config_as_code(offer: Offer) -> None:
    offer.files["config.json"] = b"__import__('os').system('true')"


def unknown_objective(offer: Offer) -> None:
    offer.content["objective"] = {"schedule": "mine"}


def forbidden_objective(offer: Offer) -> None:
    offer.content["objective"] = flow.objective("ve-x0").spec.model_dump(mode="json")


def strange_bridge(offer: Offer) -> None:
    offer.content["bridge"] = {"prediction_error": -1.0, "mode": "published"}


def bridge_of_other_data(offer: Offer) -> None:
    offer.content["bridge"] = {"prediction_error": 0.1, "data_mean": [9.0, 9.0, 9.0]}


def moments_of_other_data(offer: Offer) -> None:
    offer.content["statistics"] |= {"data_mean": [9.0, 9.0, 9.0], "data_std": [1.0, 1.0, 1.0]}


def network_for_other_latents(offer: Offer) -> None:
    offer.content["network"]["normalization"] = {"scaling_factor": 0.18215, "shift_factor": 0.0}


def scale_below_zero(offer: Offer) -> None:
    offer.content["network"]["normalization"] = {"scaling_factor": -1.0}


def conditioned_on_what_is_not_there(offer: Offer) -> None:
    offer.content["conditioning"] = ["text", "password"]


def wrong_cluster(offer: Offer) -> None:
    offer.content |= {"job": "experts/002", "clusters": [2]}


def two_clusters(offer: Offer) -> None:
    offer.content["clusters"] = [1, 2]


def other_data(offer: Offer) -> None:
    offer.made_from["data"] = ["0" * 64]


def other_fingerprint(offer: Offer) -> None:
    offer.content["fingerprint"] = "0" * 64


def no_statistics(offer: Offer) -> None:
    offer.content.pop("statistics")


def other_statistics(offer: Offer) -> None:
    offer.content["statistics"] = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}


def a_router(offer: Offer) -> None:
    offer.kind = "router"


def inflated_density_count(offer: Offer) -> None:
    tensors = load(offer.files["cluster.safetensors"])
    offer.files["cluster.safetensors"] = save({**tensors, "count": torch.tensor(1e30)})


def inflated_caption_count(offer: Offer) -> None:
    tensors = load(offer.files["cluster.safetensors"])
    offer.files["cluster.safetensors"] = save({**tensors, "caption.count": torch.tensor(1e30)})


def invented_classes(offer: Offer) -> None:
    tensors = load(offer.files["cluster.safetensors"])
    offer.files["cluster.safetensors"] = save({**tensors, "classes": torch.ones(3)})


def longer_directions(offer: Offer) -> None:
    tensors = load(offer.files["cluster.safetensors"])
    offer.files["cluster.safetensors"] = save({**tensors, "directions": 1.001 * tensors["directions"]})


def without_density(offer: Offer) -> None:
    del offer.files["cluster.safetensors"]


def without_captions(offer: Offer) -> None:
    tensors = load(offer.files["cluster.safetensors"])
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("caption.")}
    offer.files["cluster.safetensors"] = save(kept)


def unsigned(offer: Offer) -> None:
    offer.signer = None


def signed_for_another_expert(offer: Offer) -> None:
    offer.signed_name = "experts/000/final"


def signed_before_it_was_changed(offer: Offer) -> None:
    offer.raw = lambda data: data.replace(b'"images": 640', b'"images": 641')


CLAIMS: dict[Callable[[Offer], None], str] = {
    deep_json: "nested deeper than 32 levels",
    deep_manifest: "nested deeper than 32 levels",
    huge_manifest: "bytes; the limit is",
    repeated_key: "'format' appears twice",
    nan_constant: "NaN is not a number",
    infinite_number: "1e999 is not a finite number",
    not_json: "not UTF-8",
    other_format: "format: Input should be 1",
    other_spelling: "is not canonical JSON",
    size_of_text: "size: Input should be a valid integer",
    hash_with_a_path: "sha256: String should match pattern",
    wrong_hash: "its SHA-256 differs",
    size_beyond_the_network: "the policy allows",
    missing_object: "is missing though a manifest lists it",
    network_of_a_million_layers: "depth is 1000000",
    network_too_wide: "parameters; the policy of the run allows",
    network_for_huge_images: "the latents are",
    unknown_network: "unknown kind of network",
    impossible_network: "network: .* heads",
    unknown_network_field: "network: .* unknown field",
    other_config: "is not the network that the manifest declares",
    config_as_code: "config.json is not plain JSON",
    unknown_objective: "objective.schedule",
    forbidden_objective: "the policy of the run allows only the objectives",
    strange_bridge: "bridge.mode",
    bridge_of_other_data: "bridge.data_mean",
    moments_of_other_data: "its field 'statistics' differs from that of cluster 1",
    network_for_other_latents: r"its network is for latents normalized as z . 0.18215; this run normalizes",
    scale_below_zero: "network: .* normalization.scaling_factor",
    conditioned_on_what_is_not_there: "conditioning.1",
    wrong_cluster: "expected 'experts/001'",
    two_clusters: "expected 'experts/001'",
    other_data: "not trained on the shards of cluster 1",
    other_fingerprint: "its field 'fingerprint' differs from that of cluster 1",
    no_statistics: "statistics: Field required",
    other_statistics: "its field 'statistics' differs from that of cluster 1",
    a_router: "its manifest is an artifact of kind 'router'",
    inflated_density_count: "not the density in the shards of cluster 1",
    inflated_caption_count: "not the density in the shards of cluster 1",
    invented_classes: "not the density in the shards of cluster 1",
    longer_directions: "not the density in the shards of cluster 1",
    without_captions: "not the density in the shards of cluster 1",
    without_density: "not the density in the shards of cluster 1",
    unsigned: "is not signed",
    signed_for_another_expert: "does not match its content and slot",
    signed_before_it_was_changed: "does not match its content and slot",
}
"""Each corruption with the reason that the refusal must give."""
