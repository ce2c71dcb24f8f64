"""Networks that behave badly where sampling looks: each is refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save

from atoll.core.artifacts import Manifest
from atoll.core.manifests import EXPERT
from atoll.core.networks import read_network
from atoll.core.trust import Network
from atoll.core.untrusted import Refused
from atoll.data.dataset import Shards
from atoll.experts.density import DENSITY_FILE, Density
from atoll.experts.expert import Declaration, OpenExpert
from atoll.experts.validation import validate
from atoll.islands.admission import review
from atoll.islands.measured import difference
from atoll.islands.remote_run import RemoteRun
from atoll.nets import build
from atoll.nets.io import weights_digest
from islands.hostile_files import NAME, WEIGHTS, Offer, header, split
from islands.shared import person

JOB = "experts/001"


def claim_honestly(offer: Offer, reference: Path) -> None:
    """Declare the loss that these weights have, with the seed of the manifest."""
    manifest = Manifest("expert", offer.made_from, offer.content, {})
    declaration = Declaration.of(EXPERT.parse(manifest, "offer"))
    network = build(declaration.network)
    network.load_state_dict(offer.tensors())
    expert = OpenExpert(declaration, network.eval())
    held_out = Shards.open(reference, [1], "held-out")
    loss = validate(expert.velocity, held_out, seed=0, conditioning=expert.conditioning).mean
    offer.content["held_out_loss"] = loss


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Offer], None]:
    def apply(offer: Offer) -> None:
        tensors = offer.tensors()
        offer.files[WEIGHTS] = save({**tensors, name: change(tensors[name]).contiguous()})

    return apply


def with_density(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Offer], None]:
    def apply(offer: Offer) -> None:
        tensors = load(offer.files[DENSITY_FILE])
        offer.files[DENSITY_FILE] = save({**tensors, name: change(tensors[name]).contiguous()})

    return apply


def untrained(offer: Offer) -> None:
    torch.manual_seed(0)
    offer.files[WEIGHTS] = save(build(read_network(offer.content["network"])).state_dict())


def hardly_changed(offer: Offer) -> None:
    torch.manual_seed(1)
    state = build(read_network(offer.content["network"])).state_dict()
    offer.files[WEIGHTS] = save({name: part + 1e-4 * torch.randn(part.shape) for name, part in state.items()})


def other_text_width(offer: Offer) -> None:
    """The network builds, and all of its tensors fit, but it cannot read the captions of this run."""
    offer.content["network"]["text_width"] = 7
    offer.files["config.json"] = json.dumps(offer.content["network"]).encode()
    offer.files = {name: data for name, data in offer.files.items() if not name.startswith("ema-")}
    offer.files[WEIGHTS] = save(build(read_network(offer.content["network"])).state_dict())


def density_of_another_cluster(reference: Path) -> Callable[[Offer], None]:
    def apply(offer: Offer) -> None:
        other = load_file(reference / "experts/002/final" / DENSITY_FILE)
        offer.files[DENSITY_FILE] = save(other)

    return apply


NULL, UNTRAINED = "null condition|guided samples", "an untrained network of its kind has"
LATENTS, CAPTIONS = "not the density of the latents", "not the density of the captions"
BEHAVIOR: dict[str, tuple[Callable[[Offer], None], str]] = {
    "null 3e38": (with_tensor("null_text", lambda part: torch.full_like(part, 3e38)), NULL),
    "null -3e38": (with_tensor("null_text", lambda part: torch.full_like(part, -3e38)), NULL),
    "null of one huge value": (
        with_tensor("null_text", lambda part: part.index_fill(0, torch.tensor([0]), 3e38)),
        NULL,
    ),
    "output of other size": (with_tensor("final.linear.weight", lambda part: 30 * part), f"{UNTRAINED}|the limit is"),
    "untrained": (untrained, UNTRAINED),
    "hardly changed": (hardly_changed, UNTRAINED),
    "long directions": (with_density("directions", lambda part: 3 * part), LATENTS),
    "short directions": (with_density("directions", lambda part: part / 3), LATENTS),
    "longer directions": (with_density("directions", lambda part: 1.001 * part), LATENTS),
    "repeated direction": (with_density("directions", lambda part: part[:1].expand_as(part)), LATENTS),
    "other order": (with_density("directions", lambda part: part.flip(0)), LATENTS),
    "other mean": (with_density("mean", lambda part: part + 0.1), LATENTS),
    "no mean": (with_density("mean", torch.zeros_like), LATENTS),
    "wide": (with_density("variances", lambda part: 2 * part), LATENTS),
    "flat": (with_density("variances", torch.zeros_like), LATENTS),
    "larger rest": (with_density("rest", lambda part: 1.05 * part), LATENTS),
    "smaller rest": (with_density("rest", lambda part: 0.95 * part), LATENTS),
    "long caption directions": (with_density("caption.directions", lambda part: 2 * part), CAPTIONS),
    "other caption mean": (with_density("caption.mean", lambda part: 0 * part), CAPTIONS),
    "wide captions": (with_density("caption.variances", lambda part: 100 * part), CAPTIONS),
}


@pytest.mark.parametrize("name", BEHAVIOR)
def test_hostile_behavior_is_refused(
    name: str, opened: RemoteRun, offer: Offer, reference: Path, tmp_path: Path
) -> None:
    """The contributor declares its true loss, so that only the behavior gives it away."""
    corrupt, reason = BEHAVIOR[name]
    corrupt(offer)
    claim_honestly(offer, reference)
    with pytest.raises(Refused, match=reason):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine", measure=True)
    assert not (tmp_path / "quarantine").exists()


def test_a_network_that_cannot_read_the_data_is_refused(opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    other_text_width(offer)
    with pytest.raises(Refused, match="it cannot be evaluated on the data of this run"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine", measure=True)


def test_the_density_of_another_cluster_is_refused(
    opened: RemoteRun, offer: Offer, reference: Path, tmp_path: Path
) -> None:
    density_of_another_cluster(reference)(offer)
    with pytest.raises(Refused, match=r"counts|not the density of the latents"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine", measure=True)


def test_a_loss_that_only_the_seed_of_the_contributor_gives_is_refused(
    opened: RemoteRun, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to the loss with the admitter's seed, whatever the contributor declares."""
    content = opened.trust.current.policy.model_copy(update={"max_held_out_loss": 0.5})
    monkeypatch.setattr(RemoteRun, "policy", content)
    with pytest.raises(Refused, match=r"on the shards of this run is [\d.]+; the limit is 0.5"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine", measure=True)


def reordered(data: bytes) -> bytes:
    return save(dict(reversed(load(data).items())), {"by": "mallory"})


def repacked(data: bytes) -> bytes:
    """The same tensors in another order of the bytes."""
    head, body = split(data)
    moved, out = {}, b""
    for name in sorted(head, reverse=True):
        if name != "__metadata__":
            start, end = head[name]["data_offsets"]
            moved[name] = {**head[name], "data_offsets": [len(out), len(out) + end - start]}
            out += body[start:end]
    return header(moved, out)


@pytest.mark.parametrize("disguise", [bytes, reordered, repacked], ids=lambda disguise: disguise.__name__)
@pytest.mark.parametrize("where", ["neighbor", "router", "withdrawn"])
def test_copies_and_withdrawn_weights_are_refused(
    disguise: Callable[[bytes], bytes], where: str, opened: RemoteRun, offer: Offer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    digest = weights_digest(sorted(offer.tensors().items()))
    offer.files[WEIGHTS] = disguise(offer.files[WEIGHTS])
    reason = f"a copy of those of {where}"
    if where == "withdrawn":
        reason = "its weights were withdrawn"
        root = opened.trust.current.model_copy(update={"withdrawn": (digest,)})
        opened.trust = type(opened.trust)((*opened.trust.roots[:-1], root))
    else:
        job = {"neighbor": "experts/000"}.get(where, where)
        known = {job: Network(manifest="0" * 64, weights=digest, publisher=person("ann").public)}
        monkeypatch.setattr(RemoteRun, "networks", lambda _: known)
        reason = f"a copy of those of {job}"
    with pytest.raises(Refused, match=reason):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine", measure=True)


def test_densities_are_equal_up_to_rotations(reference: Path) -> None:
    """Directions of equal variance may be rotated, and any may change its sign."""
    tensors = load_file(reference / NAME / DENSITY_FILE)
    density = Density.from_tensors(tensors)
    flipped = Density.from_tensors({**tensors, "directions": -tensors["directions"]})
    assert difference(flipped, density) < 2e-4
    same = {**tensors, "variances": torch.ones_like(tensors["variances"])}
    rotation = torch.linalg.qr(torch.randn(len(same["variances"]), len(same["variances"])))[0]
    rotated = Density.from_tensors({**same, "directions": rotation @ tensors["directions"]})
    assert difference(rotated, Density.from_tensors(same)) < 1e-3
    assert difference(rotated, density) > 0.1


def test_the_digest_of_weights_depends_on_every_tensor(offer: Offer) -> None:
    digests = set()
    for name in ["", *list(offer.tensors())[:20]]:
        tensors = offer.tensors()
        if name:
            tensors[name] = tensors[name] + 1
        digests.add(weights_digest(sorted(tensors.items())))
    assert len(digests) == 21
