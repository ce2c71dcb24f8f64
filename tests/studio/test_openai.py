"""OpenAI's images API: the same files as the studio's own API, and errors that OpenAI's clients understand."""

import base64
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.apps.studio import openai_api
from atoll.apps.studio.app import Studio
from studio.browser import studio_of
from studio.conftest import http, serving

ROOT = Path(__file__).parents[2]
Served = tuple[str, Studio]


def generate(url: str, **body: Any) -> httpx.Response:
    return http.post(f"{url}/v1/images/generations", json={"prompt": "a circle", "num_inference_steps": 3, **body})


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"n": 2, "size": "8x8", "guidance_scale": 3.0}, {"num_images": 2, "guidance_scale": 3.0}),
        ({"model": "experts", "size": "auto", "routing": "top-2"}, {"routing": "top-2"}),
        ({"model": "expert:2", "response_format": "b64_json"}, {"expert": 2}),
        ({"model": "student", "prompt": " "}, {"model": "student", "prompt": None}),
    ],
)
def test_images_are_the_files_of_the_own_api(served: Served, given: dict[str, Any], own: dict[str, Any]) -> None:
    url, _ = served
    body = {"prompt": "a circle", "steps": 3, "seed": 5, **own}
    expected = [image["png"] for image in http.post(f"{url}/v1/images", json=body).json()["images"]]
    response = generate(url, seed=5, **given).json()
    assert [image["b64_json"] for image in response["data"]] == expected
    assert response["size"] == "8x8"


def test_addresses_need_no_token_and_the_oldest_images_leave(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a token of a test"
    with serving(served_run, token) as (url, _), httpx.Client(headers={"authorization": f"Bearer {token}"}) as signed:
        body = {"prompt": "a circle", "num_inference_steps": 3, "n": 2, "seed": 1}
        files = signed.post(f"{url}/v1/images/generations", json=body).json()["data"]
        address = signed.post(f"{url}/v1/images/generations", json={**body, "response_format": "url"}).json()["data"]
        found = [http.get(image["url"]) for image in address]
        assert [base64.b64encode(one.content).decode() for one in found] == [one["b64_json"] for one in files]
        assert {one.headers["content-type"] for one in found} == {"image/png"}
        assert http.get(address[0]["url"] + "x").status_code == 404
        # Room for one file only.
        monkeypatch.setattr(openai_api, "MAX_STORED_BYTES", len(found[0].content))
        again = signed.post(f"{url}/v1/images/generations", json={**body, "response_format": "url"}).json()["data"]
        codes = [http.get(image["url"]).status_code for image in (*address, *again)]
        assert codes == [404, 404, 404, 200]


def test_without_a_seed_every_request_gives_another_image(served: Served) -> None:
    first, second = (generate(served[0]).json()["data"][0]["b64_json"] for _ in range(2))
    assert first != second


def test_models_are_the_ensemble_its_experts_and_the_dense_networks(served: Served) -> None:
    url, studio = served
    listed = http.get(f"{url}/v1/models").json()
    ids = ["experts", "expert:0", "expert:1", "expert:2", "monolith", "student"]
    assert [one["id"] for one in listed["data"]] == ids
    assert {one["owned_by"] for one in listed["data"]} == {studio.models.name}
    assert http.get(f"{url}/v1/models/expert%3A1").json() == listed["data"][2]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "dall-e-3"}, 404, "model", "model_not_found"),
        ({"model": "expert:7"}, 404, "model", "model_not_found"),
        ({"n": 17}, 400, "n", None),
        ({"size": "9x9"}, 400, "size", None),
        ({"size": "big"}, 400, "size", None),
        ({"quality": "hd"}, 400, "quality", None),
        ({"routing": "best"}, 400, "routing", None),
        ({"label": "circle"}, 400, "label", None),
        ({"prompt": None}, 400, "prompt", None),
    ],
)
def test_errors_have_the_form_of_openai(
    served: Served, body: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    response = generate(served[0], **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]


def test_thirty_two_requests_at_once_share_the_engine(served_run: Path) -> None:
    with serving(served_run, queue=32) as (url, studio), ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda seed: generate(url, seed=seed), range(32)))
        assert [response.status_code for response in together] == [200] * 32
        assert studio.engine.metrics.requests.labels("done")._value.get() == 32


@pytest.mark.slow
def test_the_clients_of_openai_and_litellm(served_run: Path, tmp_path: Path) -> None:
    """The clients run in an environment of their own and check everything themselves: see openai_clients.py."""
    made = subprocess.run(
        ["bash", "scripts/clients_environment.sh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"OPENAI'S CLIENT AND LITELLM ARE NOT TESTED: they cannot be installed: {made.stderr[-300:]}")
    (tmp_path / "run").symlink_to(served_run)
    with studio_of(tmp_path / "run", "--queue", "32") as server:
        command = [ROOT / ".venv-clients/bin/python", Path(__file__).with_name("openai_clients.py")]
        done = subprocess.run(
            [*command, server.url, server.token], capture_output=True, text=True, check=False, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
