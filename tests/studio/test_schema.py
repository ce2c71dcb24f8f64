"""Schemathesis generates requests from the OpenAPI description: none of them may cause a server error."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from atoll.apps.studio.app import Studio
from atoll.apps.studio.schemas import MAX_IMAGES, MAX_STEPS
from waiting import HOUR

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def cheaper(body: Any) -> Any:
    """Return the same request with at most two images and steps, where their number is valid."""
    if isinstance(body, dict):
        for key, maximum, reduced in (("steps", MAX_STEPS, 2), ("num_images", MAX_IMAGES, 2)):
            if isinstance(body.get(key), int) and reduced < body[key] <= maximum:
                body = {**body, key: reduced}
    return body


def explore(url: str, examples: int) -> set[str]:
    """Send this many valid and invalid requests to every route; return the routes.

    Responses must match the description. A valid request may still be rejected: which experts and routings exist
    depends on the run, not on the description.
    """
    routes = set()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in MODES if operation.body or operation.path_parameters else MODES[:1]:

            @settings(max_examples=examples, deadline=None, database=None, derandomize=True,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                case.body = cheaper(case.body)
                response = case.call(timeout=HOUR)
                assert response.status_code < 500, (case.as_curl_command(), response.text)
                case.validate_response(response, excluded_checks=[positive_data_acceptance])

            send()
        routes.add(operation.path)
    return routes


@pytest.mark.parametrize("examples", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_causes_a_server_error(served: tuple[str, Studio], examples: int) -> None:
    url, studio = served
    assert {"/v1/images", "/v1/images/{id}", "/v1/islands/{job}/grid.png", "/metrics"} <= explore(url, examples)
    assert studio.engine.failure is None
