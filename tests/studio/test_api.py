"""The HTTP API over real connections: images, streams, cancellation, run information, and a run in training."""

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from PIL import Image

import atoll
from atoll import cli
from atoll.apps.models.export import export
from atoll.apps.studio.app import Studio
from atoll.apps.studio.registry import DefaultSettings, evaluated_settings
from atoll.ensemble.saving import COLORS
from studio.conftest import held_loading, http, serving
from train.conftest import merge
from train.workers import TINY
from waiting import HOUR, wait_for

Served = tuple[str, Studio]


def read_events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found, name = [], ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((name, json.loads(line.removeprefix("data: "))))
    return found


def decoded(png: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(png)))


def test_images_equal_those_of_the_command_line_and_contain_their_settings(served: Served, served_run: Path) -> None:
    url, _ = served
    body = {"prompt": "a circle", "num_images": 3, "steps": 4, "guidance_scale": 3.0, "routing": "top-2", "seed": 7}
    response = http.post(f"{url}/v1/images", json=body).json()
    expected = atoll.load(served_run).generate(
        ["a circle"], num_images=3, num_inference_steps=4, guidance_scale=3.0, routing="top-2", seed=7, trace=True
    )
    assert len(response["images"]) == 3
    for number, generated in enumerate(response["images"]):
        image = decoded(generated["png"])
        assert np.abs(np.asarray(image, int) - np.asarray(expected.images[number], int)).max() <= 1
        assert json.loads(image.info["atoll"]) == generated["settings"]
        metadata = expected.metadata(number)
        assert {key: generated["settings"][key] for key in metadata} == json.loads(json.dumps(metadata))
    weights = np.array(response["weights"])
    assert expected.trace is not None
    assert np.allclose(weights, expected.trace.weights.transpose(0, 1), atol=1e-3)
    assert response["times"] == [1.0, 0.75, 0.5, 0.25]
    assert response["experts"] == [0, 1, 2]


def test_a_stream_has_every_step_and_the_same_images(served: Served) -> None:
    url, _ = served
    body = {"prompt": "a square", "num_images": 2, "steps": 5, "seed": 3, "expert": 1}
    plain = http.post(f"{url}/v1/images", json=body).json()
    body |= {"stream": True, "preview_every": 2}
    with http.stream("POST", f"{url}/v1/images", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = read_events(response)
    assert [name for name, _ in events] == ["queued", *["step"] * 5, "image", "image", "done"]
    assert len({values["id"] for _, values in events}) == 1
    assert events[0][1]["experts"] == [0, 1, 2]
    steps = [values for name, values in events if name == "step"]
    assert [len(step.get("previews", [])) for step in steps] == [0, 2, 0, 2, 0]
    assert all(step["weights"] == [[0, 1, 0]] * 2 and step["steps"] == 5 for step in steps)
    assert decoded(steps[1]["previews"][0]).size == decoded(plain["images"][0]["png"]).size
    streamed = {values["index"]: values["png"] for name, values in events if name == "image"}
    for number, other in enumerate(plain["images"]):
        difference = np.asarray(decoded(streamed[number]), int) - np.asarray(decoded(other["png"]), int)
        assert np.abs(difference).max() <= 1


@pytest.mark.usefixtures("held")
def test_requests_are_cancelled_by_delete_and_by_disconnecting(served: Served) -> None:
    url, studio = served
    engine, body = studio.engine, {"steps": 250, "num_images": 4, "stream": True}
    cancelled = engine.metrics.requests.labels("cancelled")
    before = cancelled._value.get()
    with http.stream("POST", f"{url}/v1/images", json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if line == "event: step")
        id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert http.delete(f"{url}/v1/images/{id}").status_code == 204
        assert "event: cancelled" in list(lines)
    assert http.delete(f"{url}/v1/images/{id}").status_code == 404
    with http.stream("POST", f"{url}/v1/images", json=body) as response:
        next(line for line in response.iter_lines() if line == "event: step")
        assert not engine.idle
    wait_for(lambda: engine.idle)
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{url}/v1/images", json={"steps": 250}, timeout=httpx.Timeout(HOUR, read=0.05))
    wait_for(lambda: cancelled._value.get() == before + 3)
    assert engine.idle


def test_the_run_is_described(served: Served, served_run: Path) -> None:
    url, _ = served
    run = http.get(f"{url}/v1/run").json()
    assert (run["name"], run["size"], run["models"]) == ("run", [8, 8], ["experts", "monolith", "student"])
    assert run["conditioning"] == {"text": True, "labels": []}
    assert [(expert["number"], expert["name"]) for expert in run["experts"]] == [
        (k, f"experts/00{k}") for k in range(3)
    ]
    assert (run["missing"], run["router"], run["nearest"]) == ([], True, True)
    assert {"top-1", "nearest", "drawn", "sample-1"} <= set(run["routings"])
    assert run["defaults"] == {"routing": "top-1", "steps": 25, "guidance_scale": 4.0, "num_images": 1}
    assert len(run["examples"]) == 12
    assert len({example.split()[1] for example in run["examples"]}) == 3  # some of every cluster
    experts = http.get(f"{url}/v1/experts").json()["experts"]
    assert [expert["objective"] for expert in experts] == ["velocity", "epsilon", "v_prediction"]
    assert experts[1]["schedule"] == "cosine"
    assert experts[1]["parameters"] > experts[0]["parameters"]
    clusters = http.get(f"{url}/v1/clusters").json()["clusters"]
    assert sum(cluster["images"] for cluster in clusters) == sum(expert["images"] for expert in experts)
    assert sum(cluster["share"] for cluster in clusters) == pytest.approx(1)
    sheet = http.get(url + clusters[2]["contact_sheet"])
    assert sheet.content == (served_run / "data/clusters/cluster_002.png").read_bytes()
    assert sheet.headers["content-type"] == "image/png"
    jobs = http.get(f"{url}/v1/islands").json()["jobs"]
    assert {job["job"]: job["state"] for job in jobs}["experts/001"] == "done"
    assert run["experts"][1]["color"] == COLORS[1]


def test_the_default_settings_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    assert evaluated_settings(tmp_path) == DefaultSettings(25, 4.0)
    (tmp_path / "evaluation").mkdir()
    protocols = [{"steps": 1000, "guidance_scale": 2.0}, {"steps": 50, "guidance_scale": 1.5}]
    models = [{}, {"metrics": {"inception": {"protocol": protocols[0]}, "other": {"protocol": protocols[1]}}}]
    (tmp_path / "evaluation/latest.json").write_text(json.dumps({"models": models}))
    assert evaluated_settings(tmp_path) == DefaultSettings(50, 1.5)


def test_metrics_count_images_and_steps(served_run: Path) -> None:
    with serving(served_run) as (url, _):
        assert http.post(f"{url}/v1/images", json={"num_images": 2, "steps": 3, "prompt": "x"}).status_code == 200
        wait_for(
            lambda: "atoll_denoising_steps_total 6.0" in http.get(f"{url}/metrics").text
        )  # counted after the response
        text = http.get(f"{url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['atoll_images_total{model="experts"}'] == "2.0"
    assert values['atoll_requests_total{outcome="done"}'] == "1.0"
    assert values["atoll_denoising_steps_total"] == "6.0"
    shares = [float(value) for key, value in values.items() if key.startswith("atoll_expert_images_total")]
    assert sum(shares) == pytest.approx(2, abs=1e-4)


def test_the_page_has_no_external_links_and_the_api_is_described(served: Served) -> None:
    url, _ = served
    page = http.get(url)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "http" not in page.text
    assert http.get(f"{url}/docs").status_code == 404
    described = http.get(f"{url}/openapi.json").json()
    assert set(described["paths"]) >= {"/v1/images", "/v1/run", "/v1/experts", "/v1/clusters", "/health", "/metrics"}


def test_an_export_can_be_served(served_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    export(served_run, folder)
    with serving(folder) as (url, _):
        run = http.get(f"{url}/v1/run").json()
        assert (run["models"], run["size"], run["examples"]) == (["experts"], [8, 8], [])
        assert http.get(f"{url}/v1/clusters").json()["reason"]
        assert http.get(f"{url}/v1/islands").json()["jobs"] == []
        experts = http.get(f"{url}/v1/experts").json()["experts"]
        assert [expert["objective"] for expert in experts] == ["velocity", "epsilon", "v_prediction"]
        assert http.post(f"{url}/v1/images", json={"prompt": "a circle", "steps": 2}).status_code == 200


def test_a_trained_run_is_not_missing_while_it_loads(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.apps.studio.registry.evaluated_settings", lambda _: DefaultSettings(7, 1.5))
    with held_loading(monkeypatch) as released, serving(served_run, ready=False) as (url, studio):
        wait_for(lambda: studio.models.loading is not None)
        run = http.get(f"{url}/v1/run").json()
        assert (run["models"], run["missing"]) == ([], [])
        assert run["loading"] == {"model": "experts", "networks": 4, "position": 1, "total": 3}
        assert run["defaults"]["steps"] == 7, "the page fills its form while models are being loaded"
        released.set()
        wait_for(studio.models.first_scan_done.is_set)
        run = http.get(f"{url}/v1/run").json()
        assert (run["models"], run["loading"]) == (["experts", "monolith", "student"], None)


def test_a_model_that_cannot_be_loaded_is_not_missing(served_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    (run / "experts/001/final/config.json").unlink()
    with serving(run) as (url, _):
        found = http.get(f"{url}/v1/run").json()
        assert (found["models"], found["missing"]) == (["monolith", "student"], [])
        assert "config.json is missing" in found["load_errors"]["experts"]


def test_a_run_in_training_lists_its_jobs_and_serves_trained_experts(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared / "data", run / "data")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    values["train"] |= {"sample_every": 80, "sample_count": 4}
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with serving(run) as (url, studio):
        empty = http.get(f"{url}/v1/run").json()
        assert (empty["models"], empty["size"], empty["missing"]) == ([], None, [f"experts/00{k}" for k in range(3)])
        rejected = http.post(f"{url}/v1/images", json={"prompt": "a circle"})
        assert rejected.status_code == 409
        assert "not trained" in rejected.json()["error"]["message"]
        assert http.get(f"{url}/v1/islands/experts/001/grid.png").status_code == 404
        assert cli.main(["train", str(run), "--expert", "1"]) == 0
        with (run / "experts/001/metrics.jsonl").open("a") as metrics:
            metrics.write('{"images": 168, "loss": NaN, "images_per_second": 1.0}\n{"images": 17')
        job = {job["job"]: job for job in http.get(f"{url}/v1/islands").json()["jobs"]}["experts/001"]
        assert job["state"] == "done"
        assert job["loss"][-1][0] == job["images"] == 160
        grid = http.get(url + job["grid"])
        assert Image.open(BytesIO(grid.content)).size == (64, 64)
        wait_for(lambda: "experts" in studio.models.loaded())
        response = http.post(f"{url}/v1/images", json={"prompt": "a circle", "steps": 2}).json()
        assert decoded(response["images"][0]["png"]).size == (32, 32)
        assert http.get(f"{url}/v1/run").json()["missing"] == ["experts/000", "experts/002"]
