"""Routing: the syntax, and the weights against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.ensemble.routing import RoutingState, parse


def weights(text: str, p: list[list[float]], t: float | list[float] = 0.5, **options: object) -> Tensor:
    times = torch.tensor(t, dtype=torch.float32).reshape(-1)
    routing, table = parse(text), torch.tensor(p, dtype=torch.float32)
    draw = options.pop("draw", None)
    kept = {"router": table, "nearest": table, "given": table}
    return routing.weights(kept, times, RoutingState(**options), draw=None if draw is None else torch.tensor(draw))


def by_hand(text: str, p: list[float]) -> list[float]:
    """The chosen experts' probabilities, renormalized, in plain Python."""
    order = sorted(range(len(p)), key=lambda k: -p[k])
    name, _, value = text.partition("-")
    if name == "full":
        chosen = set(order)
    elif name == "top":
        chosen = set(order[: int(value)])
    elif name == "threshold":
        chosen = {k for k in order if p[k] >= float(value)} | {order[0]}
    else:
        chosen, mass = set(), 0.0
        for k in order:
            if mass >= float(value):
                break
            chosen.add(k)
            mass += p[k]
    kept = [p[k] if k in chosen else 0.0 for k in range(len(p))]
    return [w / sum(kept) for w in kept]


RULES = ["full", "top-1", "top-2", "top-3", "top-9", "threshold-0.25", "nucleus-0.7", "nucleus-0.95"]


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True), st.sampled_from(RULES))
@settings(max_examples=150, deadline=None)
def test_rules_choose_what_a_plain_loop_chooses(parts: list[int], rule: str) -> None:
    p = [part / sum(parts) for part in parts]
    for edge in (0.25, 0.7, 0.95):  # at an edge rounding decides, and both results are right
        sums = [sum(sorted(p, reverse=True)[:i]) for i in range(len(p))]
        if any(abs(value - edge) < 1e-5 for value in (*p, *sums)):
            return
    torch.testing.assert_close(weights(rule, [p])[0], torch.tensor(by_hand(rule, p)), atol=2e-6, rtol=1e-5)


def test_each_image_has_its_weights_and_rules_change_over_time() -> None:
    p = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]
    got = weights("top-2@0.6,full@0.3,top-1", p, t=[0.6, 0.31, 0.1])
    expected = torch.tensor([[0.625, 0.375, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(got, expected)


def test_sample_one_follows_the_probabilities() -> None:
    p, count = [0.2, 0.5, 0.3], 4000
    draws = RoutingState(seed=3).draw(parse("sample-1"), count)
    chosen = parse("sample-1").weights(
        {"router": torch.tensor([p] * count)}, torch.tensor([0.5]), RoutingState(), draw=draws
    )
    assert torch.equal(chosen.sum(1), torch.ones(count))
    torch.testing.assert_close(chosen.mean(0), torch.tensor(p), atol=0.03, rtol=0)


def test_a_drawn_expert_is_kept_for_all_rows_of_an_image() -> None:
    """It depends neither on later probabilities nor on those with the null condition, the second half of the rows."""
    p, count, t = [0.2, 0.5, 0.3], 4000, torch.tensor([0.5])
    state, routing = RoutingState(seed=3), parse("drawn")
    conditioned, null = torch.tensor([p] * count), torch.tensor([[0.0, 0.0, 1.0]] * count)
    assert routing.final_weights(routing.rules[0], state) is None
    first = routing.weights({"router": torch.cat([conditioned, null])}, t, state, draw=state.draw(routing, count))
    assert torch.equal(first[:count], first[count:])
    assert torch.equal(first[:count].sum(1), torch.ones(count))
    torch.testing.assert_close(first[:count].mean(0), torch.tensor(p), atol=0.03, rtol=0)
    assert torch.equal(first[:count], routing.final_weights(routing.rules[0], state))
    later = routing.weights({"router": null}, t, state, draw=torch.rand(count))
    assert torch.equal(later, first[:count])


def test_once_keeps_the_most_probable_expert_of_the_first_step() -> None:
    state, routing, draw = RoutingState(), parse("once"), torch.tensor([0.99, 0.99])
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.1, 0.9], [0.1, 0.9]])  # two images, then both with the null condition
    first = routing.weights({"router": p}, torch.tensor([1.0]), state, draw=draw)
    assert first.tolist() == [[1, 0], [0, 1]] * 2
    assert routing.final_weights(routing.rules[0], state).tolist() == [[1, 0], [0, 1]]
    assert routing.weights({"router": p.flip(1)}, torch.tensor([0.5]), state, draw=draw).tolist() == first.tolist()


def test_each_image_draws_at_its_time() -> None:
    state, routing = RoutingState(), parse("top-1@0.5,drawn")
    p, draw = torch.tensor([[0.6, 0.4]] * 3), torch.tensor([0.9, 0.9, 0.1])
    first = routing.weights({"router": p}, torch.tensor([0.7, 0.4, 0.4]), state, draw=draw)
    assert first.argmax(1).tolist() == [0, 1, 0]
    assert state.drawn is not None
    assert state.drawn.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert routing.final_weights(routing.rules[1], state) is None
    second = routing.weights({"router": p.flip(1)}, torch.tensor([0.3]), state, draw=torch.tensor([0.5, 0.0, 0.9]))
    assert second.argmax(1).tolist() == [1, 1, 0]
    assert routing.final_weights(routing.rules[1], state) is not None
    before = parse("drawn@0.5,top-1")
    assert before.final_weights(before.rules[0], state) is None  # the router is needed for the rule that follows


def test_draws_are_functions_of_seed_position_and_step() -> None:
    state, anew, once = RoutingState(seed=1, first=5), parse("sample-1"), parse("full@0.6,drawn")
    assert torch.equal(state.draw(anew, 3), RoutingState(seed=1, first=4).draw(anew, 4)[1:])
    first = state.draw(anew, 3)
    assert torch.equal(first, state.draw(once, 3))
    state.evaluations = 1
    assert not torch.equal(first, state.draw(anew, 3))
    assert torch.equal(first, state.draw(once, 3)), "drawn uses one number at every step"
    assert not torch.equal(first, RoutingState(seed=2, first=5).draw(anew, 3))


def test_sources_with_and_without_the_null_condition_can_be_combined_over_time() -> None:
    """An unconditioned router has one row for each image, densities with captions have two."""
    routing, state = parse("top-1@0.6,nearest"), RoutingState()
    first = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    p = {"router": first, "nearest": torch.cat([first, first.flip(1)])}
    assert routing.weights(p, torch.tensor([0.9]), state, draw=None).argmax(1).tolist() == [0, 1]
    later = routing.weights(p, torch.tensor([0.5]), state, draw=None)
    assert later.argmax(1).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top2", "did you mean 'top-2'?"),
        ("top-0", "unknown rule 'top-0'"),
        ("top-2-equal", "did you mean 'top-2'?"),
        ("nuclues-0.9", "did you mean 'nucleus-0.9'?"),
        ("threshold-2", "2 is not between 0 and 1"),
        ("threshold-x", "'x' is not a number"),
        ("top-2,top-1", "needs its smallest time"),
        ("top-2@0.3,full@0.6,top-1", "times must decrease"),
        ("nearest:oracle", "unknown rule 'oracle'"),
        ("", "unknown rule ''"),
    ],
)
def test_an_invalid_routing_is_an_error_with_a_suggestion(text: str, says: str) -> None:
    with pytest.raises(AtollError, match="routing") as error:
        parse(text)
    assert says in str(error.value)
    assert "known: full, top-K" in str(error.value)
