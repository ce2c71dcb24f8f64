"""Bad input is refused with a clear message, whoever sends it; nothing of it becomes the server's fault."""

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.ensemble import Settings
from atoll.studio import requests
from atoll.studio.app import Studio
from atoll.studio.work import Ask, Event, Painted
from studio.conftest import http, serving

Served = tuple[str, Studio]
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"n": 10**9}, "n", "less than or equal to 16"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": "3"}, "n", "valid integer"),
    ({"n": True}, "n", "valid integer"),
    ({"steps": -5}, "steps", "greater than or equal to 1"),
    ({"steps": 10**400}, "steps", "less than or equal to 250"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
    ({"guidance_scale": float("inf")}, "guidance_scale", "finite"),
    ({"guidance_scale": -1}, "guidance_scale", "greater than or equal to 0"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 2**60}, "seed", "less than or equal to"),
    ({"prompt": "x" * 2001}, "prompt", "at most 2000 characters"),
    ({"prompt": ["a"]}, "prompt", "valid string"),
    ({"prompt": "\ud800"}, "prompt", "unicode"),
    ({"label": "circle"}, "label", "takes no labels"),
    ({"size": 4096}, "size", "8 by 8 pixels"),
    ({"size": [8, 8, 8]}, "size", "at most 2 items"),
    ({"routing": "top-0"}, "routing", "unknown rule 'top-0'"),
    ({"routing": "top2"}, "routing", "did you mean 'top-2'?"),
    ({"routing": "oracle"}, "routing", "which expert"),
    ({"routing": "threshold-nan"}, "routing", "not between 0 and 1"),
    ({"routing": "../../etc/passwd"}, "routing", "unknown rule"),
    ({"expert": 17}, "expert", "there are: 0, 1, 2"),
    ({"expert": 1, "model": "monolith"}, "expert", "none in the monolith"),
    ({"model": "../experts"}, "model", "'experts', 'monolith' or 'student'"),
    ({"preview_every": 0}, "preview_every", "greater than or equal to 1"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"prompts": "a"}, "prompts", "not permitted"),
    ({"\ud800": 1}, None, "unicode"),
]


@pytest.mark.parametrize(("wanted", "field", "why"), WRONG, ids=[f"{field} {why}"[:40] for _, field, why in WRONG])
def test_wrong_values_are_named(served: Served, wanted: dict[str, Any], field: str | None, why: str) -> None:
    url, _ = served
    body = json.dumps(wanted)
    answer = http.post(f"{url}/v1/images", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == field
    assert why in error["message"]


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
def test_what_is_no_request_is_refused(served: Served, body: bytes, status: int) -> None:
    url, _ = served
    answer = http.post(f"{url}/v1/images", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["field"] is None


def test_a_large_body_in_pieces_is_not_read(served: Served) -> None:
    url, _ = served
    pieces = (b"x" * 10_000 for _ in range(100))
    answer = http.post(f"{url}/v1/images", content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/v1/islands/..%2f..%2f..%2fetc/grid.png",
        "/v1/islands/experts/../../grid.png",
        "/v1/islands/experts/000%00/grid.png",
        "/v1/islands/experts/٠٠٠/grid.png",
        "/v1/clusters/..%2f..%2fatoll.yaml/sheet.png",
        "/v1/clusters/-1/sheet.png",
        f"/v1/clusters/{'9' * 5000}/sheet.png",
        "/v1/clusters/77/sheet.png",
        "/page/..%2fapp.py",
        "/page/../app.py",
        "/page/%00",
        "/page/" + "x" * 5000,
        "/../../etc/passwd",
        "/v1/images/..%2f",
    ],
)
def test_paths_lead_nowhere(served: Served, path: str) -> None:
    url, _ = served
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # as typed: no client tidies it up
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := raw.recv(65536):
            answer += part
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500
    assert b"root:" not in answer
    assert b"import " not in answer


def test_other_hosts_and_pages_of_others_are_turned_away(served: Served) -> None:
    url, _ = served
    for headers in ({"host": "evil.example"}, {"host": "localhost.evil.example:80"}, {"host": ""}):
        answer = http.get(f"{url}/v1/run", headers=headers)
        assert answer.status_code == 403
        assert "localhost only" in answer.json()["error"]["message"]
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        assert http.post(f"{url}/v1/images", json={}, headers={"origin": origin}).status_code == 403
    assert http.get(f"{url}/v1/run", headers={"host": "[::1]:80", "origin": "http://[::1]:80"}).status_code == 200
    form = http.post(f"{url}/v1/images", content=b'{"n": 1}', headers={"content-type": "text/plain"})
    assert form.status_code == 422


def test_a_token_is_asked_for_and_checked(served_run: Path) -> None:
    with serving(served_run, token="open sesame") as (url, _):
        assert http.get(f"{url}/health").status_code == 200
        assert http.get(url).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer open"},
            {"authorization": "open sesame"},
            {"authorization": b"\xff"},
        ):
            for path in ("/v1/run", "/v1/clusters/0/sheet.png", "/metrics"):
                answer = http.get(f"{url}{path}", headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer open sesame", "host": "studio.example"}
        assert http.get(f"{url}/v1/run", headers=right).json()["token_required"] is True


def test_a_full_queue_says_when_to_come_again(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT", 0.05)
    with serving(served_run, batch=1, queue=1) as (url, studio):
        slow = {"steps": 250, "n": 16, "stream": True}
        stream = partial(http.stream, "POST", f"{url}/v1/images", json=slow)
        with stream(), stream() as waiting:
            lines = waiting.iter_lines()
            assert next(lines) == "event: queued"
            assert json.loads(next(lines).removeprefix("data: "))["position"] == 1
            assert next(line for line in lines if line) == ": still here"
            answer = http.post(f"{url}/v1/images", json={})
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert "wait" in answer.json()["error"]["message"]
        studio.engine.close()
        answer = http.post(f"{url}/v1/images", json={})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert http.get(f"{url}/health").json()["status"] == "stopping"


def test_a_broken_engine_is_told_to_everyone(served_run: Path) -> None:
    def unreachable(event: Event) -> None:
        if isinstance(event, Painted):
            raise OSError("the listener is gone")

    with serving(served_run) as (url, studio):
        studio.engine.submit(Ask(Settings("top-1", 1)), studio.models.edition("experts"), unreachable)
        answer = http.post(f"{url}/v1/images", json={"steps": 250})
        assert answer.status_code == 503
        health = http.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the listener is gone" in health.json()["why"]
        assert "the listener is gone" in http.post(f"{url}/v1/images", json={}).json()["error"]["message"]
