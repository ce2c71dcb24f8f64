"""Continuous batching: pictures are those of `ensemble.generate`, whatever the company; nobody waits for long."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import AtollError
from atoll.ensemble import Settings
from atoll.nets import DiT
from atoll.studio.engine import Engine
from atoll.studio.registry import Edition, Models, Opening
from atoll.studio.schemas import RefusalError
from atoll.studio.work import CANCELLED, DONE, REFUSED, UNAVAILABLE, Ask, Ended, Event, Painted, Queued, Stepped, Ticket
from ensemble.runs import write_run

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
# Latents are float32 and a batch of another size multiplies matrices in another order, so pictures of eight bits may
# differ by one, and weights by the tolerance below.
PIXELS, WEIGHTS = 1, 1e-3


class Desk:
    """An engine whose steps are made one by one, and what it posts."""

    def __init__(self, run: Path, batch: int = 8, queue: int = 4) -> None:
        self.models = Models(str(run), Opening(batch=batch))
        self.models.look()
        self.engine = Engine(batch, queue)
        self.events: dict[Ticket, list[Event]] = {}

    def ask(self, model: str = "experts", **what: Any) -> Ticket:
        settings = {key: what.pop(key) for key in ("routing", "steps", "guidance_scale", "seed") if key in what}
        ask = Ask(Settings(**{"routing": "top-1", "steps": 4, **settings}), stream=True, **what)
        posted: list[Event] = []
        ticket = self.engine.submit(ask, self.models.edition(model), posted.append)
        self.events[ticket] = posted
        return ticket

    @torch.no_grad()
    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.turn()

    def finish(self) -> None:
        while not self.engine.idle:
            self.turn()

    def pictures(self, ticket: Ticket) -> np.ndarray:
        painted = sorted((event for event in self.events[ticket] if isinstance(event, Painted)), key=lambda e: e.index)
        return np.stack([np.asarray(event.image, np.int16) for event in painted])

    def end(self, ticket: Ticket) -> Ended:
        ends = [event for event in self.events[ticket] if isinstance(event, Ended)]
        assert len(ends) == 1
        assert self.events[ticket][-1] is ends[0]
        return ends[0]


@pytest.fixture(scope="module")
def label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("labels") / "run", conditioning=("label",))


def assert_same(desk: Desk, ticket: Ticket, model: str = "experts") -> None:
    """What the engine made is what `generate` makes of the same settings, with the same routing."""
    ask, settings = ticket.ask, ticket.ask.settings
    own = atoll.load(desk.models.source, model).generate(
        None if ask.prompt is None else [ask.prompt], None if ask.label is None else [ask.label], ask.n, trace=True,
        clusters=None if ask.cluster is None else [ask.cluster], steps=settings.steps, seed=settings.seed,
        routing=settings.routing, guidance_scale=settings.guidance_scale,
    )  # fmt: skip
    expected = np.stack([np.asarray(image, np.int16) for image in own.images])
    made = desk.pictures(ticket)
    assert np.abs(made - expected).max() <= PIXELS, settings
    assert np.ptp(expected) > 50  # pictures with something in them
    weights = torch.tensor([picture.weights for picture in ticket.pictures]).transpose(0, 1)
    assert own.trace is not None
    assert torch.allclose(weights, own.trace.weights, atol=WEIGHTS), settings
    steps = [event for event in desk.events[ticket] if isinstance(event, Stepped)]
    assert [event.step for event in steps] == list(range(1, settings.steps + 1))
    assert torch.allclose(torch.tensor([event.t for event in steps]), own.trace.t)


def test_every_routing_gives_the_pictures_of_generate_in_mixed_company(served_run: Path) -> None:
    """Requests that differ in everything join while others are under way, in more samples than places."""
    desk = Desk(served_run, batch=7)
    tickets = []
    for number, routing in enumerate(ROUTINGS):
        guidance = (1.0, 4.0, 2.5)[number % 3]
        prompt = (None, "a red circle", "a square")[(number + 1) % 3]
        steps = 3 + number % 4
        tickets.append(
            desk.ask(
                prompt=prompt, n=1 + number % 3, routing=routing, guidance_scale=guidance, steps=steps, seed=number
            )
        )
        desk.turn(number % 3)
    tickets.append(desk.ask(prompt="a square", cluster=2, routing="oracle", n=2))
    tickets.append(desk.ask(prompt="a square", cluster=0, routing="oracle", steps=3))
    dense = desk.ask("monolith", prompt="a triangle", n=2, seed=5)
    desk.finish()
    for ticket in tickets:
        assert_same(desk, ticket)
    assert_same(desk, dense, "monolith")


def test_classes_and_nothing_at_all(label_run: Path) -> None:
    desk = Desk(label_run)
    tickets = [desk.ask(label="square", n=2), desk.ask(seed=3), desk.ask(label=0, guidance_scale=2.0)]
    desk.finish()
    for ticket in tickets:
        assert_same(desk, ticket)


def rows_of(model: Any) -> list[int]:
    """Rows that the experts' networks see from now on."""
    seen: list[int] = []
    for number in range(len(model.references)):
        network = model.cache.get(number).expert.network
        network.register_forward_pre_hook(lambda _module, given: seen.append(len(given[0])))
    return seen


def test_only_guided_samples_run_a_null_half(served_run: Path) -> None:
    desk = Desk(served_run)
    seen = rows_of(desk.models.edition("experts").ensemble)
    desk.ask(prompt="a circle", guidance_scale=1.0, n=3)
    desk.ask(prompt=None, guidance_scale=4.0, n=2)
    desk.turn()
    assert sum(seen) == 5
    desk.ask(prompt="a square", guidance_scale=3.0, n=2)
    seen.clear()
    desk.turn()
    assert sum(seen) == 5 + 2 * 2


def test_a_request_of_many_does_not_hold_back_one_of_one(served_run: Path) -> None:
    """With the batch full of one request, the next joins at once; and all pictures of a request move on together."""
    desk = Desk(served_run, batch=4)
    many = desk.ask(prompt="a circle", n=8, steps=6)
    desk.turn(2)
    one = desk.ask(prompt="a square", steps=5)
    desk.turn(5)
    assert desk.end(one).status == DONE
    assert max(picture.step for picture in many.pictures) - min(picture.step for picture in many.pictures) <= 1
    desk.finish()
    assert_same(desk, many)
    assert_same(desk, one)


def test_requests_beyond_the_batch_wait_in_order_and_beyond_the_queue_are_refused(served_run: Path) -> None:
    desk = Desk(served_run, batch=2, queue=2)
    first, second = (desk.ask(steps=3 + number) for number in range(2))
    third, fourth = (desk.ask(steps=1) for _ in range(2))
    assert [desk.events[ticket] for ticket in (first, second, third, fourth)] == [
        [Queued(position)] for position in (0, 0, 1, 2)
    ]
    desk.turn()
    with pytest.raises(RefusalError, match="4 requests") as refused:
        desk.ask()
    assert refused.value.status == 429
    assert refused.value.retry_after is not None
    assert 1 <= refused.value.retry_after <= 60
    desk.turn(2)
    assert desk.end(first).status == DONE
    desk.turn()
    assert desk.end(third).status == DONE
    assert Queued(1) in desk.events[fourth]
    desk.finish()


def test_a_cancelled_request_leaves_at_the_next_step(served_run: Path) -> None:
    desk = Desk(served_run, batch=2)
    kept, dropped = desk.ask(prompt="a circle", seed=1), desk.ask(prompt="a square", steps=200)
    waiting = desk.ask(prompt="a triangle", steps=2)
    desk.turn()
    assert desk.engine.cancel(dropped.id)
    desk.turn()
    assert desk.end(dropped).status == CANCELLED
    assert dropped.pictures[0].step == 1
    assert waiting.pictures[0].step == 1  # it has the place
    assert not desk.engine.cancel(dropped.id)
    desk.finish()
    assert_same(desk, kept)


def test_a_request_that_fails_fails_alone(served_run: Path, label_run: Path) -> None:
    desk = Desk(label_run)
    good, bad = desk.ask(label="circle"), desk.ask(label="hexagon")
    desk.finish()
    assert desk.end(bad) == Ended(REFUSED, desk.end(bad).message)
    assert "unknown class 'hexagon'" in desk.end(bad).message
    assert_same(desk, good)
    desk = Desk(served_run)
    good, bad = (desk.ask(prompt="a circle", cluster=cluster, routing="oracle") for cluster in (1, 9))
    desk.finish()
    assert "no expert of cluster 9" in desk.end(bad).message
    assert_same(desk, good)


def test_an_engine_that_breaks_says_so_and_nobody_waits_for_it(served_run: Path) -> None:
    desk = Desk(served_run)

    def unreachable(event: Event) -> None:
        if isinstance(event, Painted):
            raise OSError("the listener is gone")

    waiting = desk.ask(steps=3)
    desk.engine.submit(Ask(Settings("top-1", 1)), desk.models.edition("experts"), unreachable)
    desk.engine.start()
    desk.engine.join(30)
    assert "the listener is gone" in (desk.engine.failure or "")
    assert desk.end(waiting).status == UNAVAILABLE
    with pytest.raises(RefusalError, match="the listener is gone"):
        desk.ask()


def test_conditions_are_prepared_once_and_bounded(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(served_run, batch=3)
    prepared: list[int] = []
    real = DiT.prepare

    def counted(self: DiT, condition: Any) -> Any:
        made = real(self, condition)
        prepared.append(len(made.keys_values[0][0]))
        return made

    monkeypatch.setattr(DiT, "prepare", counted)
    for number in range(9):
        desk.ask(prompt=f"a circle of {number}", cluster=1, routing="oracle", steps=3, guidance_scale=4.0)
        desk.turn(1 + number % 2)
    desk.finish()
    # All three places and the null condition at first, then each new prompt by itself.
    assert prepared == [4] + [1] * 8
    resident = desk.models.edition("experts").ensemble.cache.get(1)
    assert resident._prepared is not None
    assert len(resident._prepared.keys_values[0][0]) == 4
    again = desk.ask(prompt="a circle of 8", cluster=1, routing="oracle")
    desk.finish()
    assert len(prepared) == 9
    assert_same(desk, again)


def test_previews_are_what_the_picture_will_be(served_run: Path) -> None:
    desk = Desk(served_run)
    ticket = desk.ask(prompt="a circle", n=2, steps=5, preview_every=2)
    desk.finish()
    shown = {event.step: event.previews for event in desk.events[ticket] if isinstance(event, Stepped)}
    assert [step for step, previews in shown.items() if previews] == [2, 4]
    assert all(len(previews or []) in (0, 2) for previews in shown.values())
    final = desk.pictures(ticket).astype(float)
    distance = [
        np.abs(np.stack([np.asarray(image, float) for image in shown[step] or []]) - final).mean() for step in (2, 4)
    ]
    assert distance[1] < distance[0]


def test_what_training_finishes_later_is_used_without_a_restart(served_run: Path, tmp_path: Path) -> None:
    """A request keeps the model that it began with; the next has the new expert."""
    run = tmp_path / "run"
    shutil.copytree(served_run, run, ignore=shutil.ignore_patterns("data", "student"))
    (run / "experts/002").rename(tmp_path / "not yet")
    desk = Desk(run)
    before = desk.ask(prompt="a circle", routing="full")
    desk.turn(2)
    (tmp_path / "not yet").rename(run / "experts/002")
    desk.models.look()
    after = desk.ask(prompt="a circle", routing="full")
    desk.finish()
    assert [len(ticket.pictures[0].weights[0]) for ticket in (before, after)] == [2, 3]
    assert_same(desk, after)
    assert np.abs(desk.pictures(before) - desk.pictures(after)).max() > PIXELS
    edition = desk.models.edition("experts")
    desk.models.look()
    assert desk.models.edition("experts") is edition
    with pytest.raises(RefusalError, match="the model student is not finished"):
        desk.models.edition("student")


def test_a_model_that_could_not_be_opened_is_tried_again(
    served_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one whose signature comes after its weights, or that found no memory. It is told of once."""

    def unsigned(self: Models, model: str) -> Edition:
        raise AtollError(f"{model} is not signed")

    models = Models(str(served_run), Opening(batch=8))
    with monkeypatch.context() as patch:
        patch.setattr(Models, "_open", unsigned)
        models.look()
        models.look()
    assert capsys.readouterr().err.count("the model monolith cannot be opened: monolith is not signed") == 1
    with pytest.raises(RefusalError, match="monolith is not signed"):
        models.edition("monolith")
    models.look()
    assert models.edition("monolith").model == "monolith"
    assert not models.trouble
