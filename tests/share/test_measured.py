"""Networks that behave badly where sampling looks: each is refused with a reason."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from atoll import flow
from atoll.apps.share.admission import review
from atoll.apps.share.admit import admit
from atoll.apps.share.measured import _Shared, check_expert, check_measured, figures
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact, ArtifactKind
from atoll.core.manifests import EXPERT, SHARDS
from atoll.core.networks import read_network
from atoll.data.dataset import Shards
from atoll.experts.expert import DeviceOptions, OpenExpert, open_expert
from atoll.experts.run import expert_of_run
from atoll.experts.validation import TIME_BINS
from atoll.nets import Condition, PreparedCondition, build
from atoll.nets.io import weights_digest
from atoll.train import resolve_job, train_job
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused
from share.conftest import TRAINED, Published
from share.offers import NAME, WEIGHTS, Offer, header, split
from share.shared import acquire, network_by, remote
from train.conftest import merge

JOB = "experts/001"


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Offer], None]:
    def apply(offer: Offer) -> None:
        tensors = offer.tensors()
        offer.files[WEIGHTS] = save({**tensors, name: change(tensors[name]).contiguous()})

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


NULL, UNTRAINED = "null condition|guided samples", "no better than an untrained network of its kind"
TINT = "that all images share"
BEHAVIOR: dict[str, tuple[Callable[[Offer], None], str]] = {
    "null 3e38": (with_tensor("null_text", lambda part: torch.full_like(part, 3e38)), NULL),
    # After 80 steps the network hardly uses its text: 25 changes little here, unlike in `learned`.
    "null 100": (with_tensor("null_text", lambda part: torch.full_like(part, 100.0)), NULL),
    "output of other size": (
        with_tensor("final.linear.weight", lambda part: 30 * part),
        f"{UNTRAINED}|is too large|larger than the data demands",
    ),
    "tint of 0.3": (with_tensor("final.linear.bias", lambda part: part + 0.3), TINT),
    "tint of 0.6": (with_tensor("final.linear.bias", lambda part: part + 0.6), f"{TINT}|at time 1 with"),
    "not a number": (with_tensor("final.linear.bias", lambda part: part / 0), "not finite"),
    "untrained": (untrained, UNTRAINED),
    "hardly changed": (hardly_changed, UNTRAINED),
}


@pytest.mark.parametrize("name", BEHAVIOR)
def test_hostile_behavior_is_refused(name: str, opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    """The refusal says what is wrong, and has no number that a cheater could aim at."""
    corrupt, reason = BEHAVIOR[name]
    corrupt(offer)
    with pytest.raises(Refused, match=reason) as refused:
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")
    assert not (tmp_path / "quarantine").exists()
    assert not re.search(
        r"\d", re.sub(r"at times? [\d.]+( to [\d.]+)?|experts/\d+|times from [\d.]+ to [\d.]+", "", str(refused.value))
    )


def test_a_network_that_cannot_read_the_data_is_refused(opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    other_text_width(offer)
    with pytest.raises(Refused, match="it cannot be evaluated on the data of this run"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")


def test_a_loss_that_only_the_seed_of_the_contributor_gives_is_refused(
    opened: RemoteRun, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to the loss with the admitter's seed, whatever the contributor declares."""
    content = opened.trust.current.policy.model_copy(update={"max_validation_loss": 0.5})
    monkeypatch.setattr(RemoteRun, "policy", content)
    with pytest.raises(Refused, match=r"the policy allows a validation loss of 0.5, and it has a larger one"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")


# Outputs that are wrong only where somebody looks


@dataclass(frozen=True, eq=False)
class Poisoned(OpenExpert):
    """An expert that a function changes: it gets the output, the time, and whether the condition is null."""

    poison: Callable[[Tensor, Tensor, bool], Tensor] = lambda v, _t, _null: v

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        v = super().velocity(x, t, condition)
        null = isinstance(condition, Condition) and condition.dropped is not None and bool(condition.dropped.all())
        return self.poison(v, t.view(-1, 1, 1, 1), null)


def noise_like(v: Tensor) -> Tensor:
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(len(v)))


def at(start: float, end: float, size: float = 2.0) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Add noise at some times."""
    return lambda v, t, _: v + size * noise_like(v) * ((t >= start) & (t <= end))


def board(x: Tensor) -> Tensor:
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in x.shape[2:]), indexing="ij")
    return 1 - 2.0 * ((rows + columns) % 2)


POISONS: dict[str, tuple[Callable[[Tensor, Tensor, bool], Tensor], str]] = {
    "the start": (at(0.99, 1), "at time 1 |at times from 0.9 to 1.0"),
    "exactly the start": (at(1, 1), "at time 1 "),
    "the end": (at(0, 0.1), "at times from 0.0 to 0.1"),
    "the first half of the end": (at(0, 0.05), "at times from 0.0 to 0.1|at time 0.0"),
    "the middle": (at(0.45, 0.55), "at times from 0.[45]"),
    "a bin": (at(0.7, 0.8, 1.5), "at times from 0.7 to 0.8"),
    "the other direction at the end": (lambda v, t, _: torch.where(t < 0.1, -v, v), "at times from 0.0 to 0.1"),
    "infinite at the start": (lambda v, t, _: torch.where(t == 1, torch.inf, v), "at time 1 "),
    "not a number at the end": (lambda v, t, _: torch.where(t < 0.1, torch.nan, v), "at times from 0.0 to 0.1 "),
    "null": (lambda v, _, null: v + noise_like(v) if null else v, "with the null condition"),
    "null at the start": (lambda v, t, null: v + 2 * noise_like(v) * (null and t == 1), "at time 1 with the null"),
    "null at the end": (lambda v, t, null: v + 2 * null * (t < 0.1), "to 0.1 with the null condition"),
    "null of the other sign": (lambda v, _, null: -v if null else v, "with the null condition"),
    "null that is not a number": (lambda v, _, null: v + torch.nan if null else v, "with the null condition"),
    "condition of the other sign": (lambda v, _, null: v if null else -v, "with its condition"),
    "a checkerboard at the end": (lambda v, t, _: v + 8 * board(v) * (t < 0.1), "at times? (from )?0.0"),
    "large outputs": (lambda v, _t, _n: 8 * v, "an untrained network|too large|larger than the data|all images share"),
    "constant": (lambda v, _t, _n: v + 1, "an untrained network|too large|larger than the data|all images share"),
}


def opened_expert(run: Path, number: int) -> tuple[OpenExpert, Shards]:
    images = Shards.open(run, [number], "train")
    return open_expert(expert_of_run(run, f"experts/{number:03d}"), images.statistics, DeviceOptions()), images


def refusals(expert: OpenExpert, images: Shards, seed: int = 0) -> str:
    """Return all reasons to refuse an expert, except for errors that all images share.

    The networks of closed form below are for Gaussian data of mean zero, and the images have another mean.
    """
    found = [figure.what for figure in figures(expert, images, seed=seed) if not figure.value <= figure.limit]
    return "; ".join(reason for reason in found if TINT not in reason)


@pytest.mark.parametrize("name", POISONS)
def test_outputs_that_are_wrong_in_one_place_are_refused(name: str, reference: Path) -> None:
    expert, images = opened_expert(reference, 1)
    poison, reason = POISONS[name]
    poisoned = Poisoned(expert.declaration, expert.network, expert.dtype, expert.rescaling, poison)
    with pytest.raises(Refused, match=reason):
        check_expert(poisoned, images)


def test_guided_samples_are_checked_in_every_size(sized_run: Path) -> None:
    """The size of which the cluster has the fewest images; a mean over all images could hide it."""
    expert, images = opened_expert(sized_run, 0)
    rare = min(images.image_counts(), key=lambda size: images.image_counts()[size])

    def poison(v: Tensor, _t: Tensor, _null: bool) -> Tensor:
        return v + 1000 if v.shape[2:] == (rare.height, rare.width) else v

    poisoned = Poisoned(expert.declaration, expert.network, expert.dtype, expert.rescaling, poison)
    for one, passes in ((expert, True), (poisoned, False)):
        found = [figure for figure in figures(one, images, seed=0) if "guided" in figure.what]
        assert len(found) == len(images.image_counts())
        assert all(figure.value <= figure.limit for figure in found) is passes


@pytest.mark.parametrize("number", range(3))
def test_honest_experts_pass_with_any_seed(number: int, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were trained for 80 steps."""
    expert, images = opened_expert(reference, number)
    for seed in range(4):
        monkeypatch.setattr("atoll.apps.share.measured.secrets.randbelow", lambda _, seed=seed: 10_007 * seed)
        check_expert(expert, images)


@pytest.fixture(scope="module")
def learned(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a velocity expert and an x0 expert after 200 steps, which use their captions."""
    run = tmp_path_factory.mktemp("learned") / "run"
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    changes = {"experts": {"default": "flow-matching", 1: "x0"}, "train": {"lr": 3e-3, "total_images": 1600}}
    values = merge(merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TRAINED), changes)
    (run / "atoll.yaml").write_text(yaml.safe_dump(values))
    for number in (0, 1):
        train_job(resolve_job(run, config.load(run), "expert", expert=number))
    return run


PLANTED: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "nothing": ("null_text", lambda part: part, ""),
    "null condition of 25": ("null_text", lambda part: torch.full_like(part, 25.0), "with the null condition"),
    "null condition of -25": ("null_text", lambda part: torch.full_like(part, -25.0), "with the null condition"),
    "tint of 0.3": ("final.linear.bias", lambda part: part + 0.3, TINT),
    "tint of 0.6": ("final.linear.bias", lambda part: part + 0.6, TINT),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("number", [0, 1], ids=["velocity", "x0"])
def test_cheats_in_the_weights_of_a_trained_expert_are_refused(number: int, name: str, learned: Path) -> None:
    expert, images = opened_expert(learned, number)
    tensor, change, reason = PLANTED[name]
    state = expert.network.state_dict()
    expert.network.load_state_dict({**state, tensor: change(state[tensor])})
    for seed in range(3):
        found = [figure.what for figure in figures(expert, images, seed=seed) if not figure.value <= figure.limit]
        if reason:
            assert [what for what in found if reason in what]
        else:
            assert found == []


def test_only_networks_of_the_same_prediction_are_compared(learned: Path, reference: Path) -> None:
    """The others learn at another speed: an honest DDPM expert can be worse than a velocity expert of other data."""
    for run, count in ((learned, 0), (reference, 1)):
        (expert, images), (other, _) = opened_expert(run, 0), opened_expert(run, 1)
        found = [figure for figure in figures(expert, images, [other], seed=0) if "its own cluster" in figure.what]
        assert len(found) == count
        assert all(figure.value <= figure.limit for figure in found)


@pytest.mark.parametrize("numbers", [range(40), range(0, 80, 2), range(23)], ids=["all", "even", "few"])
def test_errors_that_all_images_share_are_found_whichever_images_are_measured(numbers: range) -> None:
    """Images that are evenly spread over a cluster may all have even numbers."""
    shared, noise = _Shared(), torch.randn(80, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(TIME_BINS):
        for batch in torch.tensor(numbers).split(7):
            shared.add(noise[batch] / 10 + torch.tensor([0.1, 0.3, 0.0]).view(3, 1, 1), batch)
    expected = (0.0, 0.0) if numbers == range(23) else (0.3, math.sqrt(0.1 / 3))
    assert shared.sizes() == pytest.approx(expected, abs=0.01)


class Perfect(nn.Module):
    """The best velocity field for Gaussian data of mean zero and variance one, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, timestep: Tensor, _: object) -> Tensor:
        t = (timestep / 1000).view(-1, 1, 1, 1)
        return self.factor * x * (2 * t - 1) / (t**2 + (1 - t) ** 2)


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (1.0, True), (1.4, True), (1.9, False), (3.0, False)])
def test_outputs_of_the_wrong_size_are_refused(factor: float, passes: bool, reference: Path) -> None:
    """A mean square error alone would accept a good expert whose outputs are almost doubled."""
    expert, images = opened_expert(reference, 1)
    scaled = OpenExpert(expert.declaration, Perfect(factor), expert.dtype, expert.rescaling)
    assert (
        bool(re.search("larger than the data|an untrained network|too large", refusals(scaled, images))) is not passes
    )


class Denoiser(nn.Module):
    """The best x0 network for Gaussian data of mean zero and variance one, with an error; below a time it cheats."""

    def __init__(self, error: float, cheat: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.error, self.cheat = error, cheat

    def forward(self, x: Tensor, timestep: Tensor, _: object) -> Tensor:
        t = (timestep / 1000).view(-1, 1, 1, 1)
        x0 = x * (1 - t) / (t**2 + (1 - t) ** 2) + self.error * torch.sin(5 * x)
        return x0 if self.cheat is None else torch.where(t < 0.045, self.cheat(x0), x0)


def checkerboard(x0: Tensor) -> Tensor:
    return 0.6 * x0 + 0.6 * board(x0)


X0_EXPERTS = {
    "exact": (Denoiser(0.0), True),
    "with an error at all times": (Denoiser(0.5), True),
    "a checkerboard at the end": (Denoiser(0.0, checkerboard), False),
    "a checkerboard at the end of an expert with errors": (Denoiser(0.1, checkerboard), False),
    "a tint at the end": (Denoiser(0.1, lambda x0: x0 + 0.6), False),
    "nothing at the end": (Denoiser(0.1, torch.zeros_like), False),
}


@pytest.mark.parametrize("name", X0_EXPERTS)
def test_x0_experts_are_judged_at_their_last_steps(name: str, reference: Path) -> None:
    """An untrained x0 network has an error as large as the data there, which would allow anything."""
    expert, images = opened_expert(reference, 1)
    declaration = replace(expert.declaration, bridge=flow.objective("x0").bridge())
    network, passes = X0_EXPERTS[name]
    for seed in range(4):
        found = refusals(OpenExpert(declaration, network, expert.dtype, expert.rescaling), images, 10_007 * seed)
        assert bool(re.search(r"at time 0\.0|at times from 0\.0", found)) is not passes


@pytest.mark.parametrize("count", [1, 2])
def test_clusters_with_few_validation_images_are_measured(
    count: int, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest experts pass on one image, whichever it is, and others are refused."""
    poison = POISONS["null at the start"][0]
    for number in range(3):
        expert, images = opened_expert(reference, number)
        monkeypatch.setattr(Shards, "cluster_ranges", lambda _, number=number: {0: range(number, number + count)})
        check_expert(expert, images)
        poisoned = Poisoned(expert.declaration, expert.network, expert.dtype, expert.rescaling, poison)
        with pytest.raises(Refused, match="at time 1"):
            check_expert(poisoned, images)
        monkeypatch.undo()


def test_without_validation_images_the_training_images_serve(reference: Path, offer: Offer, tmp_path: Path) -> None:
    shards, expert = Artifact(tmp_path, "data/shards/cluster_001"), Artifact(tmp_path, NAME)
    for artifact in (shards, expert):
        shutil.copytree(reference / artifact.name, artifact.folder)
    for file in shards.folder.glob("validation-*"):
        file.unlink()
    recommit(shards, SHARDS)
    check_measured(expert, expert.open(EXPERT), [shards], policy=Policy())
    with pytest.raises(Refused, match=r"allows a validation loss of 9\.0, and there are no validation images"):
        check_measured(expert, expert.open(EXPERT), [shards], policy=Policy(max_validation_loss=9))
    untrained(offer)
    expert.path(WEIGHTS).write_bytes(offer.files[WEIGHTS])
    recommit(expert, EXPERT)
    with pytest.raises(Refused, match=UNTRAINED):
        check_measured(expert, expert.open(EXPERT), [shards], policy=Policy())


def recommit(artifact: Artifact, kind: ArtifactKind[Any]) -> None:
    """Write the manifest again, for the files that are there."""
    manifest = artifact.manifest()
    artifact.path("manifest.json").unlink()
    artifact.begin(kind, manifest.made_from)
    artifact.commit(dict(manifest.content))


# Copies, and experts of other clusters


def noisy(amount: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Add noise, relative to the standard deviation of each tensor."""
    generator = torch.Generator().manual_seed(0)

    def apply(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: part + amount * part.std(correction=0) * torch.randn(part.shape, generator=generator)
            for name, part in state.items()
        }

    return apply


@pytest.mark.hostile
@pytest.mark.parametrize("amount", [0.0, 1e-3, 1e-2, 5e-2])
def test_admit_refuses_the_expert_of_another_cluster(
    amount: float, published: Published, published_store: Store, offer: Offer, tmp_path: Path
) -> None:
    """Ann copies the published expert 0, with some noise or none, and proposes it as her expert 1."""
    store = published_store
    copied = noisy(amount)(load_file(published.run / "experts/000/final" / WEIGHTS))
    offer.files[WEIGHTS] = save({name: part.contiguous() for name, part in copied.items()})
    propose(remote(store, by="ann"), offer)
    verdict = admit(remote(store, by="owner"), tmp_path / "check")[JOB]
    refused = "no better than (experts/000|an untrained)|all images share|is too large"
    assert re.search(refused if amount else "a copy of", verdict)
    assert JOB not in remote(store).networks()


@pytest.mark.parametrize("amount", [0.0, 1e-3, 1e-2, 5e-2])
def test_the_expert_of_another_cluster_is_no_better_than_itself(amount: float, reference: Path) -> None:
    """Also where it does well on the data, as on clusters that are much alike."""
    (copied, _), (other, _), (_, images) = (opened_expert(reference, number) for number in (0, 0, 1))
    copied.network.load_state_dict(noisy(amount)(copied.network.state_dict()))
    reason = f"on images of its own cluster it is no better than {other.declaration.name}"
    found = {figure.what: figure for figure in figures(copied, images, [other], seed=0)}
    assert found[reason].value > found[reason].limit


@pytest.mark.parametrize("damaged", [False, True])
def test_honest_experts_are_admitted_beside_others(
    damaged: bool, published_store: Store, offer: Offer, tmp_path: Path
) -> None:
    """They started from the same weights. A damaged network in the store stops nobody."""
    store = published_store
    if damaged:
        weights = max(store.entries("experts/000/final/sha256"), key=lambda entry: entry.size)
        store.write(weights.key, bytes(weights.size))
    propose(remote(store, by="ann"), offer)
    assert admit(remote(store, by="owner"), tmp_path / "check") == {JOB: "admitted"}
    network = remote(store).networks()[JOB]
    assert network.error is not None


def propose(ann: RemoteRun, offer: Offer) -> None:
    lease = acquire(ann.store, JOB, 3600, authority=ann)
    lease.end("proposed", manifest=offer.put(ann))


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
        known = {job: network_by(opened, job, weights=digest)}
        monkeypatch.setattr(RemoteRun, "networks", lambda _: known)
        reason = f"a copy of those of {job}"
    with pytest.raises(Refused, match=reason):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")


def test_the_digest_of_weights_depends_on_every_tensor(offer: Offer) -> None:
    digests = set()
    for name in ["", *list(offer.tensors())[:20]]:
        tensors = offer.tensors()
        if name:
            tensors[name] = tensors[name] + 1
        digests.add(weights_digest(sorted(tensors.items())))
    assert len(digests) == 21
