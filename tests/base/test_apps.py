"""A run on a base in the applications: studio, evaluation, report, memory plan, and the cache of experts."""

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import atoll
from atoll import cli
from atoll.core.errors import AtollError
from atoll.ensemble.memory_plan import plan_memory
from atoll.ensemble.sampler import Sampler
from atoll.nets import base as bases
from studio.conftest import http, serving

PROMPTS = ("a red cube", "a blue ball on a high green hill in the evening", "a cross")
"""Prompts of different lengths."""


def served(generated: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(generated["png"])))).astype(int)


def test_the_studio_returns_the_images_of_the_library_whatever_shares_their_batch(trained_base: Path) -> None:
    """Requests with prompts of different lengths, without a prompt, and with other guidance run together."""
    bodies: list[dict[str, Any]] = [{"prompt": prompt, "seed": seed} for seed, prompt in enumerate(PROMPTS)]
    bodies += [{"seed": 7}, {"prompt": PROMPTS[0], "seed": 8, "guidance_scale": 1.0}, {"prompt": "", "expert": 1}]
    found: list[dict[str, Any]] = [{} for _ in bodies]
    with serving(trained_base) as (url, studio):
        assert http.get(f"{url}/v1/run").json()["conditioning"]["text"]
        slots = studio.models.get("experts").condition_cache

        def request(number: int) -> None:
            found[number] = http.post(f"{url}/v1/images", json={"steps": 4, "num_images": 2, **bodies[number]}).json()

        threads = [Thread(target=request, args=(number,)) for number in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(slots._pools) == 1
        again = http.post(f"{url}/v1/images", json={"steps": 4, **bodies[0]}).json()
    sampler = atoll.load(trained_base)
    for body, response in zip([*bodies, bodies[0]], [*found, again], strict=True):
        given = [body["prompt"]] if "prompt" in body else None
        options = {"routing": "oracle", "cluster": 1} if "expert" in body else {}
        scale = body.get("guidance_scale", 4.0)
        images = sampler.sample(
            given, num_images=2, num_inference_steps=4, seed=body.get("seed", 0), guidance_scale=scale, **options
        )
        for generated, wanted in zip(response["images"], images, strict=False):
            assert abs(served(generated) - np.asarray(wanted)).max() <= 1  # rounding


def test_evaluation_and_report_know_adapters(trained_base: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_base, tmp_path / "run"))
    small = ("--num-images", "4", "--steps", "2", "--num-real", "8", "--num-val", "3", "--num-trajectories", "2")
    chosen = ("--routings", "top-1", "nearest", "--extractors", "efficientnet-lite0", "--without", "diversity")
    assert cli.main(["evaluate", str(run), *small, *chosen, "--allow-small"]) == 0
    found = json.loads((run / "evaluation/latest.json").read_text())
    assert [model["label"] for model in found["models"]] == ["experts top-1", "experts nearest"]
    for model in found["models"]:
        assert model["training"]["parameters"] < 78_000  # adapters, and a router; the base has more
        assert model["metrics"]["efficientnet-lite0"]["kid"]
    assert cli.main(["report", str(run), "--prompts", PROMPTS[0], "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def latents(sampler: Sampler, **options: Any) -> torch.Tensor:
    return sampler.generate(
        list(PROMPTS), num_inference_steps=2, routing="oracle", cluster=[0, 1, 0], **options
    ).latents


def test_the_base_is_in_memory_once_and_stays_when_adapters_are_dropped(trained_base: Path) -> None:
    everything, few = atoll.load(trained_base), atoll.load(trained_base, max_loaded_experts=1)
    wanted = latents(everything)
    shared = {id(loaded.expert.network.base) for loaded in everything.ensemble.cache._loaded.values()}
    assert len(shared) == 1
    torch.testing.assert_close(latents(few), wanted, rtol=1e-5, atol=1e-5)
    assert few.ensemble.cache.loads > 2  # each step drops one of them
    (base,) = bases._open.values()
    assert id(base) in shared
    del everything
    assert bases._open, "the other sampler has it"
    plan = plan_memory(few, 4)
    weights = sum(own.nbytes for name, own in base.named_parameters() if ".lora_" not in name)
    assert plan.parts["base network"] == weights
    with pytest.raises(AtollError, match="not quantized; omit --quantize"):
        atoll.load(trained_base, quantize="int8")
