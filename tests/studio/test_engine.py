"""Continuous batching: images equal those of `Sampler.generate` in any batch, and no request blocks the others."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll import flow
from atoll.apps.studio.engine import (
    CANCELLED,
    DONE,
    INVALID,
    UNAVAILABLE,
    Engine,
    Event,
    GenerationRequest,
    ImageDone,
    Queued,
    RequestEnded,
    RequestState,
    StepDone,
)
from atoll.apps.studio.registry import LoadedModel, ModelRegistry
from atoll.apps.studio.requests import check_request
from atoll.apps.studio.schemas import ApiError, ImagesRequest
from atoll.core.errors import AtollError
from atoll.core.options import QuantizedLoadOptions
from atoll.ensemble import Sampler, SampleSettings
from atoll.nets import DiT
from ensemble.runs import SMALL, SPACE, declared_by, fitted, write_network, write_run
from ensemble.test_autoguidance import with_weak
from waiting import HOUR

ROUTINGS = (
    "top-1",
    "top-2",
    "full",
    "threshold-0.2",
    "nucleus-0.9",
    "drawn",
    "top-2@0.6,drawn",
    "sample-1",
    "nearest:top-2",
    "top-2@0.6,top-1",
)
# Latents are float32, and a batch of another size sums matrix products in another order. Images of eight bits may
# differ by one, and weights by this tolerance.
PIXELS, WEIGHTS = 1, 1e-3


SETTINGS = ("routing", "steps", "guidance", "guidance_scale", "seed")


class ManualEngine:
    """An engine whose steps the test runs one by one, and the events that it posts."""

    def __init__(self, run: Path, batch_size: int = 8, queue: int = 4) -> None:
        self.models = ModelRegistry(str(run), QuantizedLoadOptions(), batch_size=batch_size)
        self.models.scan()
        self.engine = Engine(batch_size, queue)
        self.events: dict[RequestState, list[Event]] = {}

    def submit(self, model: str = "experts", **values: Any) -> RequestState:
        settings = {key: values.pop(key) for key in SETTINGS if key in values}
        generation = GenerationRequest(
            SampleSettings(**{"routing": "top-1", "steps": 4, **settings}), stream=True, **values
        )
        posted: list[Event] = []
        request = self.engine.submit(generation, self.models.get(model), posted.append)
        self.events[request] = posted
        return request

    @torch.no_grad()
    def run_steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.run_step()

    def finish(self) -> None:
        while not self.engine.idle:
            self.run_steps()

    def images(self, request: RequestState) -> np.ndarray:
        done = sorted((event for event in self.events[request] if isinstance(event, ImageDone)), key=lambda e: e.index)
        return np.stack([np.asarray(event.image, np.int16) for event in done])

    def end(self, request: RequestState) -> RequestEnded:
        ends = [event for event in self.events[request] if isinstance(event, RequestEnded)]
        assert len(ends) == 1
        assert self.events[request][-1] is ends[0]
        return ends[0]


@pytest.fixture(scope="module")
def label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("labels") / "run", conditioning=("label",))


def assert_equals_generate(engine: ManualEngine, request: RequestState, model: str = "experts") -> None:
    """Assert that the engine's images and weights equal those of `generate` with the same settings."""
    generation, settings = request.generation, request.generation.settings
    offline = atoll.load(engine.models.source, model).generate(
        generation.prompt, label=generation.label, cluster=generation.cluster, num_images=generation.num_images,
        num_inference_steps=settings.steps, seed=settings.seed, routing=settings.routing,
        guidance_scale=settings.guidance_scale, trace=True,
    )  # fmt: skip
    expected = np.stack([np.asarray(image, np.int16) for image in offline.images])
    assert np.abs(engine.images(request) - expected).max() <= PIXELS, settings
    assert np.ptp(expected) > 50  # the images are not constant
    weights = torch.tensor([image.weights for image in request.images]).transpose(0, 1)
    assert offline.trace is not None
    assert torch.allclose(weights, offline.trace.weights, atol=WEIGHTS), settings
    steps = [event for event in engine.events[request] if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, settings.steps + 1))
    assert torch.allclose(torch.tensor([event.t for event in steps]), offline.trace.t)


def test_every_routing_gives_the_images_of_generate_in_mixed_batches(served_run: Path) -> None:
    """Requests with different settings join while others run, with more images than fit into the batch."""
    engine = ManualEngine(served_run, batch_size=7)
    requests = []
    for number, routing in enumerate(ROUTINGS):
        guidance_scale = (1.0, 4.0, 2.5)[number % 3]
        prompt = (None, "a red circle", "a square")[(number + 1) % 3]
        steps = 3 + number % 4
        requests.append(
            engine.submit(
                prompt=prompt,
                num_images=1 + number % 3,
                routing=routing,
                guidance_scale=guidance_scale,
                steps=steps,
                seed=number,
            )
        )
        engine.run_steps(number % 3)
    requests.append(engine.submit(prompt="a square", cluster=2, routing="oracle", num_images=2))
    requests.append(engine.submit(prompt="a square", cluster=0, routing="oracle", steps=3))
    dense = engine.submit("monolith", prompt="a triangle", num_images=2, seed=5)
    engine.finish()
    for request in requests:
        assert_equals_generate(engine, request)
    assert_equals_generate(engine, dense, "monolith")


def test_labels_and_unconditional_requests(label_run: Path) -> None:
    engine = ManualEngine(label_run)
    requests = [
        engine.submit(label="square", num_images=2),
        engine.submit(seed=3),
        engine.submit(label=0, guidance_scale=2.0),
    ]
    engine.finish()
    for request in requests:
        assert_equals_generate(engine, request)


def record_batch_sizes(model: Any) -> list[int]:
    """Return a list that collects the batch sizes of the experts' forward passes from now on."""
    seen: list[int] = []
    for number in range(len(model.references)):
        network = model.cache.get(number).expert.network
        network.register_forward_pre_hook(lambda _module, given: seen.append(len(given[0])))
    return seen


def test_only_guided_images_run_the_unconditional_pass(served_run: Path) -> None:
    engine = ManualEngine(served_run)
    seen = record_batch_sizes(engine.models.get("experts").ensemble)
    engine.submit(prompt="a circle", guidance_scale=1.0, num_images=3)
    engine.submit(prompt=None, guidance_scale=4.0, num_images=2)
    engine.run_steps()
    assert sum(seen) == 5
    engine.submit(prompt="a square", guidance_scale=3.0, num_images=2)
    seen.clear()
    engine.run_steps()
    assert sum(seen) == 5 + 2 * 2


def test_autoguidance_guides_images_without_a_prompt_too(served_run: Path) -> None:
    """Requests with both kinds of guidance run at the same time."""
    engine = ManualEngine(served_run)
    model = engine.models.get("experts")
    model.sampler.ensemble = with_weak(model.sampler)
    auto = {"guidance": "autoguidance", "guidance_scale": 3.0, "num_images": 2}
    requests = [
        engine.submit(**auto),
        engine.submit(prompt="a square", guidance_scale=3.0),
        engine.submit(num_images=1),
    ]
    engine.finish()
    offline = Sampler(with_weak(model.sampler), model.sampler.encoders)
    expected = offline.sample(num_inference_steps=4, **auto)
    assert (
        np.abs(engine.images(requests[0]) - np.stack([np.asarray(one, np.int16) for one in expected])).max() <= PIXELS
    )
    assert np.abs(engine.images(requests[0])[:1] - engine.images(requests[2])).max() > PIXELS


def test_a_large_request_does_not_delay_a_small_one(served_run: Path) -> None:
    """A new request joins at once although one request fills the batch; its images stay within one step."""
    engine = ManualEngine(served_run, batch_size=4)
    many = engine.submit(prompt="a circle", num_images=8, steps=6)
    engine.run_steps(2)
    one = engine.submit(prompt="a square", steps=5)
    engine.run_steps(5)
    assert engine.end(one).status == DONE
    assert max(image.step for image in many.images) - min(image.step for image in many.images) <= 1
    engine.finish()
    assert_equals_generate(engine, many)
    assert_equals_generate(engine, one)


def test_requests_beyond_the_batch_wait_in_order_and_beyond_the_queue_are_rejected(served_run: Path) -> None:
    engine = ManualEngine(served_run, batch_size=2, queue=2)
    first, second = (engine.submit(steps=3 + number) for number in range(2))
    third, fourth = (engine.submit(steps=1) for _ in range(2))
    assert [engine.events[request] for request in (first, second, third, fourth)] == [
        [Queued(position)] for position in (0, 0, 1, 2)
    ]
    engine.run_steps()
    with pytest.raises(ApiError, match="4 requests") as rejected:
        engine.submit()
    assert rejected.value.status == 429
    assert rejected.value.retry_after is not None
    assert 1 <= rejected.value.retry_after <= 60
    engine.run_steps(2)
    assert engine.end(first).status == DONE
    engine.run_steps()
    assert engine.end(third).status == DONE
    assert Queued(1) in engine.events[fourth]
    engine.finish()


def test_a_cancelled_request_leaves_at_the_next_step(served_run: Path) -> None:
    engine = ManualEngine(served_run, batch_size=2)
    kept, dropped = engine.submit(prompt="a circle", seed=1), engine.submit(prompt="a square", steps=200)
    waiting = engine.submit(prompt="a triangle", steps=2)
    engine.run_steps()
    assert engine.engine.cancel(dropped.id)
    engine.run_steps()
    assert engine.end(dropped).status == CANCELLED
    assert dropped.images[0].step == 1
    assert waiting.images[0].step == 1  # it takes the free place in the batch
    assert not engine.engine.cancel(dropped.id)
    engine.finish()
    assert_equals_generate(engine, kept)


def test_a_failing_request_does_not_affect_others(served_run: Path, label_run: Path) -> None:
    engine = ManualEngine(label_run)
    good, bad = engine.submit(label="circle"), engine.submit(label="hexagon")
    engine.finish()
    assert engine.end(bad) == RequestEnded(INVALID, engine.end(bad).message)
    assert "unknown class 'hexagon'" in engine.end(bad).message
    assert_equals_generate(engine, good)
    engine = ManualEngine(served_run)
    good, bad = (engine.submit(prompt="a circle", cluster=cluster, routing="oracle") for cluster in (1, 9))
    engine.finish()
    assert "no expert of cluster 9" in engine.end(bad).message
    assert_equals_generate(engine, good)


def test_a_failed_engine_ends_all_requests_with_an_error(served_run: Path) -> None:
    engine = ManualEngine(served_run)

    def failing_post(event: Event) -> None:
        if isinstance(event, ImageDone):
            raise OSError("the client is gone")

    waiting = engine.submit(steps=3)
    engine.engine.submit(GenerationRequest(SampleSettings(steps=1)), engine.models.get("experts"), failing_post)
    engine.engine.start()
    engine.engine.join(HOUR)
    assert "the client is gone" in (engine.engine.failure or "")
    assert engine.end(waiting).status == UNAVAILABLE
    with pytest.raises(ApiError, match="the client is gone"):
        engine.submit()


def test_conditions_are_prepared_once_and_bounded(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ManualEngine(served_run, batch_size=3)
    prepared: list[int] = []
    real = DiT.prepare

    def counted(self: DiT, condition: Any) -> Any:
        result = real(self, condition)
        prepared.append(len(result.keys_values[0][0]))
        return result

    monkeypatch.setattr(DiT, "prepare", counted)
    for number in range(9):
        engine.submit(prompt=f"a circle of {number}", cluster=1, routing="oracle", steps=3, guidance_scale=4.0)
        engine.run_steps(1 + number % 2)
    engine.finish()
    # First all three slots and the null condition, then each new prompt alone.
    assert prepared == [4] + [1] * 8
    loaded = engine.models.get("experts").ensemble.cache.get(1)
    assert loaded._prepared is not None
    assert len(loaded._prepared.keys_values[0][0]) == 4
    repeated = engine.submit(prompt="a circle of 8", cluster=1, routing="oracle")
    engine.finish()
    assert len(prepared) == 9
    assert_equals_generate(engine, repeated)


def test_previews_approach_the_final_image(served_run: Path) -> None:
    engine = ManualEngine(served_run)
    request = engine.submit(prompt="a circle", num_images=2, steps=5, preview_every=2)
    engine.finish()
    shown = {event.step: event.previews for event in engine.events[request] if isinstance(event, StepDone)}
    assert [step for step, previews in shown.items() if previews] == [2, 4]
    assert all(len(previews or []) in (0, 2) for previews in shown.values())
    final = engine.images(request).astype(float)
    distance = [
        np.abs(np.stack([np.asarray(image, float) for image in shown[step] or []]) - final).mean() for step in (2, 4)
    ]
    assert distance[1] < distance[0]


def test_an_expert_trained_later_is_used_without_a_restart(served_run: Path, tmp_path: Path) -> None:
    """A request keeps the model that it started with; the next request uses the new expert."""
    run = tmp_path / "run"
    shutil.copytree(served_run, run, ignore=shutil.ignore_patterns("data", "student"))
    (run / "experts/002").rename(tmp_path / "not yet")
    engine = ManualEngine(run)
    before = engine.submit(prompt="a circle", routing="full")
    engine.run_steps(2)
    (tmp_path / "not yet").rename(run / "experts/002")
    engine.models.scan()
    after = engine.submit(prompt="a circle", routing="full")
    engine.finish()
    assert [len(request.images[0].weights[0]) for request in (before, after)] == [2, 3]
    assert_equals_generate(engine, after)
    assert np.abs(engine.images(before) - engine.images(after)).max() > PIXELS
    model = engine.models.get("experts")
    engine.models.scan()
    assert engine.models.get("experts") is model
    with pytest.raises(ApiError, match="the model student is not trained"):
        engine.models.get("student")


def test_loading_a_model_is_tried_again_after_an_error(
    served_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error may be temporary, as a signature that is written after the weights. It is printed once."""

    def unsigned(self: ModelRegistry, name: str) -> LoadedModel:
        raise AtollError(f"{name} is not signed")

    models = ModelRegistry(str(served_run), QuantizedLoadOptions(), batch_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "_load", unsigned)
        models.scan()
        models.scan()
    assert capsys.readouterr().err.count("cannot load the model monolith: monolith is not signed") == 1
    with pytest.raises(ApiError, match="monolith is not signed"):
        models.get("monolith")
    models.scan()
    assert models.get("monolith").name == "monolith"
    assert not models.load_errors


def test_few_step_students_are_served_in_their_own_steps(served_run: Path, tmp_path: Path) -> None:
    """Whatever the request asks for, the images are those of `generate`, of one student in its two steps."""
    run = tmp_path / "run"
    shutil.copytree(served_run, run, ignore=shutil.ignore_patterns("data", "student", "monolith"))
    for number in range(3):
        job = f"students/{number:03d}"
        declared = declared_by(job, [number], fitted(SMALL, ["text"]), ["text"], SPACE)
        declared |= {"objective": flow.Objective().spec, "bridge": {}, "steps": 2}
        write_network(run, job, declared, seed=40 + number)
    engine = ManualEngine(run)
    assert list(engine.models.loaded()) == ["experts", "students"]
    asked = ImagesRequest(prompt="a circle", model="students", steps=30, guidance_scale=5.0, routing="nearest", seed=1)
    generation, _ = check_request(asked, engine.models)
    assert (generation.settings.steps, generation.settings.guidance_scale) == (2, 1.0)
    chosen = {key: getattr(generation.settings, key) for key in ("steps", "guidance_scale", "routing", "seed")}
    request = engine.submit("students", prompt="a circle", num_images=2, **chosen)
    engine.finish()
    assert_equals_generate(engine, request, "students")
