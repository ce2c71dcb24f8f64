"""Schemathesis makes requests out of the OpenAPI description: none of them may be answered with the server's fault."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from atoll.studio.app import Studio
from atoll.studio.schemas import PICTURES, STEPS

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def cheaper(body: Any) -> Any:
    """The same request for fewer pictures and steps, where it asks for a possible number of them."""
    if isinstance(body, dict):
        for key, most, enough in (("steps", STEPS, 2), ("n", PICTURES, 2)):
            if isinstance(body.get(key), int) and enough < body[key] <= most:
                body = {**body, key: enough}
    return body


def explore(url: str, examples: int) -> set[str]:
    """Try every route with so many requests that fit the description and as many that do not; the routes.

    Answers must be as described. That what fits is accepted is not asked: which experts and routings there are is a
    matter of the run, not of the description.
    """
    tried = set()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in MODES if operation.body or operation.path_parameters else MODES[:1]:

            @settings(max_examples=examples, deadline=None, database=None, derandomize=True,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def attempt(case: schemathesis.Case) -> None:
                case.body = cheaper(case.body)
                answer = case.call(timeout=60)
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                case.validate_response(answer, excluded_checks=[positive_data_acceptance])

            attempt()
        tried.add(operation.path)
    return tried


@pytest.mark.parametrize("examples", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_is_the_servers_fault(served: tuple[str, Studio], examples: int) -> None:
    url, studio = served
    assert {"/v1/images", "/v1/images/{id}", "/v1/islands/{job}/grid.png", "/metrics"} <= explore(url, examples)
    assert studio.engine.failure is None
