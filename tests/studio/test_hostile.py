"""Invalid and hostile requests get a clear error message and never cause a server error."""

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.apps.studio import requests
from atoll.apps.studio.app import Studio
from atoll.apps.studio.engine import Event, GenerationRequest, ImageDone
from atoll.ensemble import SampleSettings
from studio.conftest import http, serving

Served = tuple[str, Studio]
TOKEN = "open sesame, or so"
INVALID: list[tuple[dict[str, Any], str | None, str]] = [
    ({"num_images": 10**9}, "num_images", "less than or equal to 16"),
    ({"num_images": 0}, "num_images", "greater than or equal to 1"),
    ({"num_images": "3"}, "num_images", "valid integer"),
    ({"num_images": True}, "num_images", "valid integer"),
    ({"steps": -5}, "steps", "greater than or equal to 1"),
    ({"steps": 10**400}, "steps", "less than or equal to 250"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
    ({"guidance_scale": float("inf")}, "guidance_scale", "finite"),
    ({"guidance_scale": -1}, "guidance_scale", "greater than or equal to 0"),
    ({"guidance": "autoguidance"}, "guidance", "train.weak_share"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 2**60}, "seed", "less than or equal to"),
    ({"prompt": "x" * 2001}, "prompt", "at most 2000 characters"),
    ({"prompt": ["a"]}, "prompt", "valid string"),
    ({"prompt": "\ud800"}, "prompt", "unicode"),
    ({"label": "circle"}, "label", "takes no labels"),
    ({"width": 4096, "height": 4096}, "width", "images of 8x8 pixels"),
    ({"width": 8}, "height", "both width and height"),
    ({"height": 8}, "width", "both width and height"),
    ({"width": 8, "height": 0}, "height", "greater than or equal to 1"),
    ({"width": [8, 8], "height": 8}, "width", "valid integer"),
    ({"routing": "top-0"}, "routing", "unknown rule 'top-0'"),
    ({"routing": "top2"}, "routing", "did you mean 'top-2'?"),
    ({"routing": "oracle"}, "routing", "choose an expert"),
    ({"routing": "threshold-nan"}, "routing", "not between 0 and 1"),
    ({"routing": "../../etc/passwd"}, "routing", "unknown rule"),
    ({"expert": 17}, "expert", "available experts: 0, 1, 2"),
    ({"expert": 1, "model": "monolith"}, "expert", "none in the monolith"),
    ({"model": "../experts"}, "model", "'experts', 'students', 'monolith', 'student' or 'merged'"),
    ({"preview_every": 0}, "preview_every", "greater than or equal to 1"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"prompts": "a"}, "prompts", "not permitted"),
    ({"\ud800": 1}, None, "unicode"),
]


@pytest.mark.parametrize(
    ("values", "field", "message"), INVALID, ids=[f"{field} {message}"[:40] for _, field, message in INVALID]
)
def test_the_error_names_the_invalid_field(
    served: Served, values: dict[str, Any], field: str | None, message: str
) -> None:
    url, _ = served
    response = http.post(f"{url}/v1/images", content=json.dumps(values), headers={"content-type": "application/json"})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 422),
        (b"null", 422),
        (b"[]", 422),
        (b"\xff\xff", 400),
        (b"[" * 60_000, 400),
        (b'{"prompt": "' + b"x" * 1_000_000 + b'"}', 413),
    ],
)
def test_an_invalid_body_is_rejected(served: Served, body: bytes, status: int) -> None:
    url, _ = served
    response = http.post(f"{url}/v1/images", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert response.json()["error"]["param"] is None


def test_a_large_chunked_body_is_rejected(served: Served) -> None:
    url, _ = served
    chunks = (b"x" * 10_000 for _ in range(100))
    response = http.post(f"{url}/v1/images", content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/v1/islands/..%2f..%2f..%2fetc/grid.png",
        "/v1/islands/experts/../../grid.png",
        "/v1/islands/experts/000%00/grid.png",
        "/v1/islands/experts/٠٠٠/grid.png",
        "/v1/clusters/..%2f..%2fatoll.yaml/contact_sheet.png",
        "/v1/clusters/-1/contact_sheet.png",
        f"/v1/clusters/{'9' * 5000}/contact_sheet.png",
        "/v1/clusters/77/contact_sheet.png",
        "/page/..%2fapp.py",
        "/page/../app.py",
        "/page/%00",
        "/page/" + "x" * 5000,
        "/../../etc/passwd",
        "/v1/images/..%2f",
    ],
)
def test_path_traversal_is_rejected(served: Served, path: str) -> None:
    url, _ = served
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # a raw socket: an HTTP client would normalize the path
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        response = b""
        while part := raw.recv(65536):
            response += part
    status = int(response.split(b" ", 2)[1])
    assert 400 <= status < 500
    assert b"root:" not in response
    assert b"import " not in response


def test_requests_for_other_hosts_and_from_other_sites_are_rejected(served: Served) -> None:
    url, _ = served
    for headers in ({"host": "evil.example"}, {"host": "localhost.evil.example:80"}, {"host": ""}):
        response = http.get(f"{url}/v1/run", headers=headers)
        assert response.status_code == 403
        assert "localhost only" in response.json()["error"]["message"]
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        assert http.post(f"{url}/v1/images", json={}, headers={"origin": origin}).status_code == 403
    assert http.get(f"{url}/v1/run", headers={"host": "[::1]:80", "origin": "http://[::1]:80"}).status_code == 200
    form = http.post(f"{url}/v1/images", content=b'{"num_images": 1}', headers={"content-type": "text/plain"})
    assert form.status_code == 422


def test_a_token_is_required_and_checked(served_run: Path) -> None:
    with serving(served_run, token=TOKEN) as (url, _):
        assert http.get(f"{url}/health").status_code == 200
        assert http.get(url).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer open"},
            {"authorization": TOKEN},
            {"authorization": b"\xff"},
        ):
            for path in ("/v1/run", "/v1/clusters/0/contact_sheet.png", "/metrics"):
                response = http.get(f"{url}{path}", headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
        right = {"authorization": f"Bearer {TOKEN}", "host": "studio.example"}
        assert http.get(f"{url}/v1/run", headers=right).json()["token_required"] is True


@pytest.mark.usefixtures("held")
def test_a_full_queue_returns_retry_after(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT_SECONDS", 0.05)
    with serving(served_run, batch_size=1, queue=1) as (url, studio):
        slow = {"steps": 250, "num_images": 16, "stream": True}
        stream = partial(http.stream, "POST", f"{url}/v1/images", json=slow)
        with stream(), stream() as waiting:
            lines = waiting.iter_lines()
            assert next(lines) == "event: queued"
            assert json.loads(next(lines).removeprefix("data: "))["position"] == 1
            assert next(line for line in lines if line) == ": keep-alive"
            response = http.post(f"{url}/v1/images", json={})
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert "wait" in response.json()["error"]["message"]
        studio.engine.close()
        response = http.post(f"{url}/v1/images", json={})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert http.get(f"{url}/health").json()["status"] == "stopping"


def test_a_failed_engine_is_reported_to_all_clients(served_run: Path) -> None:
    def failing_post(event: Event) -> None:
        if isinstance(event, ImageDone):
            raise OSError("the client is gone")

    with serving(served_run) as (url, studio):
        studio.engine.submit(GenerationRequest(SampleSettings(steps=1)), studio.models.get("experts"), failing_post)
        response = http.post(f"{url}/v1/images", json={"steps": 250})
        assert response.status_code == 503
        health = http.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the client is gone" in health.json()["reason"]
        assert "the client is gone" in http.post(f"{url}/v1/images", json={}).json()["error"]["message"]
