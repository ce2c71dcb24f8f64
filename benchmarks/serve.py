"""The studio's server against sampling in batches, in one process, for the same pictures.

    python benchmarks/serve.py [--quick] [--json]

32 clients ask a server (`atoll serve`, a process of its own, over loopback) for one picture after another, each of
another prompt, seed and number of steps, so that requests join and leave at all times. Offline, the same pictures are
made in batches of 32, those of equal steps together. Four experts of random weights with a router, told text by MiniLM,
under guidance; both sides encode prompts and decode pictures, the server also compresses and sends them. Sides are
measured in turn, and the ratio is that of the medians.
"""

import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
import yaml
from PIL import Image
from torch import Tensor

import atoll
from atoll import flow
from atoll.core.artifacts import Artifact, Kind
from atoll.core.manifests import EXPERT
from atoll.core.manifests import ROUTER as ROUTER_KIND
from atoll.core.networks import read_network
from atoll.ensemble import Sampler
from atoll.experts.batch_conditions import BatchConditions
from atoll.nets import build, save_network
from harness import Row, run

CLIENTS, BATCH, EXPERTS, GUIDANCE, SIDE = 32, 32, 4, 3.0, 16
NETWORK = {"_class_name": "DiT", "width": 256, "depth": 4, "heads": 4, "patch": 2, "channels": 3, "out_channels": 3}
ROUTER = {"_class_name": "Router", "width": 128, "depth": 2, "heads": 2, "patch": 2, "channels": 3, "size": SIDE}
SPACE = {"mean": [0.0, 0.0, 0.0], "std": [0.5, 0.5, 0.5]}
TEXT = {"encoder": "minilm", "weights": "minilm", "max_tokens": 16, "dimensions": 384, "pooled": 384}


@dataclass(frozen=True)
class Wish:
    """One picture."""

    prompt: str
    seed: int
    steps: int

    def body(self, n: int = 1) -> dict[str, Any]:
        """As it goes over the wire."""
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "steps": self.steps,
            "guidance_scale": GUIDANCE,
            "num_images": n,
        }


def write_run(folder: Path) -> Path:
    """A run as training leaves it, with random networks."""
    folder.mkdir()
    (folder / "atoll.yaml").write_text(yaml.safe_dump({"clusters": {"count": EXPERTS}}))
    for number in range(EXPERTS):
        told = {"objective": flow.Objective().spec, "conditioning": ["text"]}
        network = {**NETWORK, "size": SIDE, "text_width": TEXT["dimensions"]}
        _commit(folder, f"experts/{number:03d}", EXPERT, [number], network, told)
    _commit(
        folder,
        "router",
        ROUTER_KIND,
        list(range(EXPERTS)),
        {**ROUTER, "experts": EXPERTS},
        {"conditioning": [], "cluster_sizes": [1] * EXPERTS, "prior_entropy": 0.0, "temperature": 1.0},
    )
    return folder


def _commit(
    run: Path, job: str, kind: Kind[Any], clusters: list[int], network: dict[str, Any], own: dict[str, Any]
) -> None:
    artifact = Artifact(run, f"{job}/final")
    artifact.begin(kind, {"job": job})
    made = build(read_network(network))
    generator = torch.Generator().manual_seed(len(job) + clusters[0])
    with torch.no_grad():
        for part in made.parameters():
            part.copy_(
                torch.randn(part.shape, generator=generator) * (0.1 if part.ndim < 2 else part.shape[-1] ** -0.5)
            )
    save_network(made, artifact.folder)
    latents = {"autoencoder": "pixels", "weights": None, "resolution": SIDE, "shape": [3, SIDE, SIDE]}
    common = {"job": job, "clusters": clusters, "network": made.config, "statistics": SPACE, "text": TEXT}
    data = {"labels": [], "source": "random", "fingerprint": "", "latents": latents}
    artifact.commit(kind.content(**common, **data, **own))


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`atoll serve` of a run."""
    command = [sys.executable, "-m", "atoll.cli", "serve", str(folder), "--port", "0", "--batch", str(BATCH), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            while not httpx.get(f"{url}/health", timeout=60).json()["models_ready"]:
                time.sleep(0.1)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


async def _client(http: httpx.AsyncClient, wishes: Sequence[dict[str, Any]]) -> list[tuple[float, list[str]]]:
    """Ask for one thing after the other: seconds and pictures of each."""
    found = []
    for body in wishes:
        start = time.perf_counter()
        answer = await http.post("/v1/images", json=body)
        answer.raise_for_status()
        found.append((time.perf_counter() - start, [image["png"] for image in answer.json()["images"]]))
    return found


def ask(url: str, clients: Sequence[Sequence[dict[str, Any]]]) -> list[list[tuple[float, list[str]]]]:
    """What every client gets, all of them at the same time."""

    async def together() -> list[list[tuple[float, list[str]]]]:
        limits = httpx.Limits(max_connections=len(clients))
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            return await asyncio.gather(*(_client(http, wishes) for wishes in clients))

    return asyncio.run(together())


def offline(model: Sampler, wishes: Iterable[Wish]) -> dict[Wish, Image.Image]:
    """The same pictures in batches of equal steps."""
    by_steps: dict[int, list[Wish]] = {}
    for wish in wishes:
        by_steps.setdefault(wish.steps, []).append(wish)
    made: dict[Wish, Image.Image] = {}
    for steps, group in by_steps.items():
        for first in range(0, len(group), BATCH):
            part = group[first : first + BATCH]
            made |= dict(zip(part, model.decode(_latents(model, part, steps)), strict=True))
    return made


@torch.no_grad()
def _latents(model: Sampler, part: Sequence[Wish], steps: int) -> Tensor:
    """What `generate` does, with a seed for each picture."""
    told = BatchConditions.of(model.encode([wish.prompt for wish in part]), torch.arange(len(part)), reused=True)
    noise = [model.noise(1, wish.seed) for wish in part]
    field = partial(model.ensemble.velocity, condition=told, routing="top-1", guidance=GUIDANCE)
    return flow.solve(lambda x, t: field(x, t[:1]), torch.cat(noise), steps=steps)


def measure(quick: bool) -> Iterable[Row]:
    steps, turns, rounds = ((4, 5, 6), 2, 2) if quick else ((20, 25, 30), 3, 5)
    with tempfile.TemporaryDirectory() as folder:
        place = write_run(Path(folder) / "run")
        model = atoll.load(place)
        with server(place) as (url, process):
            yield from _throughput(url, model, steps, turns, rounds)
            yield from _company(url, steps[1])
            yield from _memory(url, process, 100 if quick else 1000)


def _throughput(url: str, model: Sampler, steps: Sequence[int], turns: int, rounds: int) -> Iterable[Row]:
    plans = [
        [
            Wish(f"picture {turn} of client {client}", 1000 * client + turn, steps[(client + turn) % len(steps)])
            for turn in range(turns)
        ]
        for client in range(CLIENTS)
    ]
    bodies = [[wish.body() for wish in plan] for plan in plans]
    every = [wish for plan in plans for wish in plan]
    ask(url, [plan[:1] for plan in bodies])
    offline(model, every[:BATCH])
    times: dict[str, list[float]] = {"served": [], "offline": []}
    for _ in range(rounds):
        start = time.perf_counter()
        answers = ask(url, bodies)
        times["served"].append(time.perf_counter() - start)
        start = time.perf_counter()
        offline(model, every)
        times["offline"].append(time.perf_counter() - start)
    served, alone = (statistics.median(times[side]) for side in ("served", "offline"))
    yield Row("served over offline, pictures a second", alone / served, 0.85)
    yield Row("served, pictures a second", len(every) / served)
    seconds = [taken for plan in answers for taken, _ in plan]
    yield Row("seconds to a picture, median", statistics.median(seconds), None, "lower")
    yield Row("seconds to a picture, 95 of 100", float(np.quantile(seconds, 0.95)), None, "lower")
    pace = [
        sum(wish.steps for wish in plan) / sum(taken for taken, _ in got)
        for plan, got in zip(plans, answers, strict=True)
    ]
    yield Row(
        "fairness among equal clients (Jain's index)",
        sum(pace) ** 2 / (len(pace) * sum(each**2 for each in pace)),
        0.95,
    )
    yield Row(
        "largest difference of a picture under load from itself alone", _difference(model, plans, answers), 1, "lower"
    )


def _difference(
    model: Sampler, plans: Sequence[Sequence[Wish]], answers: Sequence[Sequence[tuple[float, list[str]]]]
) -> float:
    """Of eight bits, over some pictures, each made by itself."""
    worst = 0.0
    for plan, got in list(zip(plans, answers, strict=True))[::8]:
        for wish, (_, pictures) in zip(plan, got, strict=True):
            alone = model.generate([wish.prompt], steps=wish.steps, guidance=GUIDANCE, routing="top-1", seed=wish.seed)
            served = Image.open(BytesIO(base64.b64decode(pictures[0])))
            gap = np.asarray(served, int) - np.asarray(alone.images[0], int)
            worst = max(worst, float(np.abs(gap).max()))
    return worst


def _company(url: str, steps: int) -> Iterable[Row]:
    """One picture while two requests of 16 fill the batch, and while 31 others of one picture do."""
    one = Wish("one picture", 1, steps).body()
    many = [[Wish(f"many pictures {number}", number, 3 * steps).body(16)] for number in range(2)]
    ones = [[Wish(f"another picture {number}", number, 3 * steps).body()] for number in range(CLIENTS - 1)]
    amid = {name: ask(url, [*others, [one]])[-1][0][0] for name, others in (("many", many), ("ones", ones))}
    yield Row("one picture beside two requests of 16, over beside 31 of one", amid["many"] / amid["ones"], 1.5, "lower")


def _memory(url: str, process: psutil.Process, count: int) -> Iterable[Row]:
    """Memory of the server after many requests of different prompts, over that after a tenth of them."""
    kept = []
    for part in (count // 10, count - count // 10):
        bodies = [
            [Wish(f"request {number} of {len(kept)}", number, 1).body() for number in range(client, part, CLIENTS)]
            for client in range(CLIENTS)
        ]
        ask(url, bodies)
        kept.append(process.memory_info().rss)
    yield Row(f"memory after {count} requests over after {count // 10}", kept[1] / kept[0], 1.05, "lower")


if __name__ == "__main__":
    run("Serving", measure)
