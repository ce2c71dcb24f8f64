"""Compare the studio's server with offline sampling in batches, for the same images.

    python benchmarks/serve.py [--quick] [--json]

32 clients request one image after another from a server (`atoll serve`, a separate process, over loopback). Prompts,
seeds and numbers of steps differ, so that requests start and finish at all times. Offline, the same images are sampled
in batches of 32 with equal numbers of steps. The model has four experts with random weights and a router, text
conditioning by MiniLM, and guidance. Both sides encode prompts and decode images; the server also compresses and sends
them. The sides alternate, and the ratio is that of their medians. The second ratio is that of processor times, of the
server process and of the offline side: it leaves out the clients, and other work on the machine hardly changes it.
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
from atoll.core.artifacts import Artifact, ArtifactKind
from atoll.core.manifests import EXPERT
from atoll.core.manifests import ROUTER as ROUTER_KIND
from atoll.core.networks import read_network
from atoll.ensemble import Sampler
from atoll.experts.batch_conditions import BatchConditions
from atoll.nets import build, save_network
from harness import Row, run

CLIENTS, BATCH_SIZE, EXPERTS, GUIDANCE_SCALE, SIDE = 32, 32, 4, 3.0, 16
NETWORK = {"_class_name": "DiT", "width": 256, "depth": 4, "heads": 4, "patch": 2, "channels": 3, "out_channels": 3}
ROUTER = {"_class_name": "Router", "width": 128, "depth": 2, "heads": 2, "patch": 2, "channels": 3, "size": SIDE}
SPACE = {"mean": [0.0, 0.0, 0.0], "std": [0.5, 0.5, 0.5]}
TEXT = {"encoder": "minilm", "weights": None, "max_tokens": 16, "dimensions": 384, "pooled": 384}


@dataclass(frozen=True)
class Request:
    """A request for one image."""

    prompt: str
    seed: int
    steps: int

    def body(self, n: int = 1) -> dict[str, Any]:
        """Return the JSON body."""
        settings = {"seed": self.seed, "steps": self.steps, "guidance_scale": GUIDANCE_SCALE}
        return {"prompt": self.prompt, **settings, "num_images": n}


def write_run(folder: Path) -> Path:
    """Write a run with random networks, as training writes it."""
    folder.mkdir()
    (folder / "atoll.yaml").write_text(yaml.safe_dump({"clusters": {"count": EXPERTS}}))
    for number in range(EXPERTS):
        declared = {"objective": flow.Objective().spec, "conditioning": ["text"]}
        network = {**NETWORK, "size": SIDE, "text_width": TEXT["dimensions"]}
        _commit(folder, f"experts/{number:03d}", EXPERT, [number], network, declared)
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
    run: Path, job: str, kind: ArtifactKind[Any], clusters: list[int], network: dict[str, Any], own: dict[str, Any]
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
    """Start `atoll serve` for a run."""
    command = [
        sys.executable,
        "-m",
        "atoll.cli",
        "serve",
        str(folder),
        "--port",
        "0",
        "--batch-size",
        str(BATCH_SIZE),
        "--json",
        "--no-token",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            while not httpx.get(f"{url}/health", timeout=60).json()["models_ready"]:
                time.sleep(0.1)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


async def _client(url: str, bodies: Sequence[dict[str, Any]]) -> list[tuple[float, bytes]]:
    """Send one request after another over one connection; return the seconds and the JSON of each response."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=2**20)
    results = []
    for body in bodies:
        content = json.dumps(body).encode()
        head = f"POST /v1/images HTTP/1.1\r\nhost: {address.host}\r\ncontent-type: application/json\r\n"
        start = time.perf_counter()
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        found = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert found.startswith("http/1.1 200"), found
        length = int(found.partition("content-length: ")[2].partition("\r\n")[0])
        results.append((time.perf_counter() - start, await reader.readexactly(length)))
    writer.close()
    return results


def send(url: str, clients: Sequence[Sequence[dict[str, Any]]]) -> list[list[tuple[float, bytes]]]:
    """Run all clients concurrently; return the results of each.

    The clients share the cores with the server, so they only copy bytes: the responses are parsed afterwards.
    """

    async def together() -> list[list[tuple[float, bytes]]]:
        return await asyncio.gather(*(_client(url, bodies) for bodies in clients))

    return asyncio.run(together())


def offline(model: Sampler, requests: Iterable[Request]) -> dict[Request, Image.Image]:
    """Sample the same images in batches of equal steps."""
    by_steps: dict[int, list[Request]] = {}
    for request in requests:
        by_steps.setdefault(request.steps, []).append(request)
    images: dict[Request, Image.Image] = {}
    for steps, group in by_steps.items():
        for first in range(0, len(group), BATCH_SIZE):
            part = group[first : first + BATCH_SIZE]
            images |= dict(zip(part, model.decode(_latents(model, part, steps)), strict=True))
    return images


@torch.no_grad()
def _latents(model: Sampler, part: Sequence[Request], steps: int) -> Tensor:
    """Sample latents as `generate` does, with a seed for each image."""
    conditions = BatchConditions.of(
        model.encode([request.prompt for request in part]), torch.arange(len(part)), reused=True
    )
    noise = [model.noise(1, request.seed) for request in part]
    field = partial(model.ensemble.velocity, condition=conditions, routing="top-1", guidance_scale=GUIDANCE_SCALE)
    return flow.solve(lambda x, t: field(x, t[:1]), torch.cat(noise), steps=steps)


def measure(quick: bool) -> Iterable[Row]:
    steps, turns, rounds = ((4, 5, 6), 2, 2) if quick else ((20, 25, 30), 3, 5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_run(Path(scratch) / "run")
        model = atoll.load(folder)
        with server(folder) as (url, process):
            yield from _throughput(url, process, model, steps, turns, rounds)
            yield from _concurrent(url, steps[1])
            yield from _memory(url, process, 100 if quick else 1000)


def _throughput(
    url: str, process: psutil.Process, model: Sampler, steps: Sequence[int], turns: int, rounds: int
) -> Iterable[Row]:
    def spent() -> dict[str, float]:
        """Return the seconds of processor time of the server so far; the event loop is its main thread."""
        threads = {each.id: each.user_time + each.system_time for each in process.threads()}
        return {"served cpu": sum(threads.values()), "loop cpu": threads[process.pid]}

    plans = [
        [
            Request(f"image {turn} of client {client}", 1000 * client + turn, steps[(client + turn) % len(steps)])
            for turn in range(turns)
        ]
        for client in range(CLIENTS)
    ]
    bodies = [[request.body() for request in plan] for plan in plans]
    requests = [request for plan in plans for request in plan]
    send(url, [plan[:1] for plan in bodies])
    offline(model, requests[:BATCH_SIZE])
    times: dict[str, list[float]] = {
        name: [] for name in ("served", "offline", "served cpu", "loop cpu", "offline cpu")
    }
    for _ in range(rounds):
        start, before = time.perf_counter(), spent()
        results = send(url, bodies)
        times["served"].append(time.perf_counter() - start)
        for name, now in spent().items():
            times[name].append(now - before[name])
        start, started = time.perf_counter(), time.process_time()
        offline(model, requests)
        times["offline"].append(time.perf_counter() - start)
        times["offline cpu"].append(time.process_time() - started)
    median = {name: statistics.median(values) for name, values in times.items()}
    served = median["served"]
    yield Row("served over offline, images per second", median["offline"] / served, 0.85)
    yield Row("processor time of an image, offline over served", median["offline cpu"] / median["served cpu"], 0.9)
    yield Row("share of the server's processor time in its event loop", median["loop cpu"] / median["served cpu"])
    yield Row("served, images per second", len(requests) / served)
    seconds = [taken for plan in results for taken, _ in plan]
    yield Row("latency of an image in seconds, median", statistics.median(seconds), None, "lower")
    yield Row("latency of an image in seconds, 95th percentile", float(np.quantile(seconds, 0.95)), None, "lower")
    pace = [
        sum(request.steps for request in plan) / sum(taken for taken, _ in got)
        for plan, got in zip(plans, results, strict=True)
    ]
    yield Row(
        "fairness among equal clients (Jain's index)",
        sum(pace) ** 2 / (len(pace) * sum(each**2 for each in pace)),
        0.95,
    )
    yield Row(
        "largest pixel difference of an image under load and alone", _difference(model, plans, results), 1, "lower"
    )


def _difference(
    model: Sampler, plans: Sequence[Sequence[Request]], results: Sequence[Sequence[tuple[float, bytes]]]
) -> float:
    """Return the largest pixel difference (of 255) to the same image sampled alone, over some images."""
    worst = 0.0
    for plan, got in list(zip(plans, results, strict=True))[::8]:
        for request, (_, response) in zip(plan, got, strict=True):
            alone = model.generate(
                request.prompt, num_inference_steps=request.steps, guidance_scale=GUIDANCE_SCALE, routing="top-1",
                seed=request.seed,
            )  # fmt: skip
            served = Image.open(BytesIO(base64.b64decode(json.loads(response)["images"][0]["png"])))
            gap = np.asarray(served, int) - np.asarray(alone.images[0], int)
            worst = max(worst, float(np.abs(gap).max()))
    return worst


def _concurrent(url: str, steps: int) -> Iterable[Row]:
    """Measure one image while two requests of 16 images fill the batch, and while 31 requests of one image do."""
    one = Request("one image", 1, steps).body()
    many = [[Request(f"many images {number}", number, 3 * steps).body(16)] for number in range(2)]
    ones = [[Request(f"another image {number}", number, 3 * steps).body()] for number in range(CLIENTS - 1)]
    latency = {name: send(url, [*others, [one]])[-1][0][0] for name, others in (("many", many), ("ones", ones))}
    yield Row(
        "latency beside two requests of 16 images / beside 31 of one image",
        latency["many"] / latency["ones"],
        1.5,
        "lower",
    )


def _memory(url: str, process: psutil.Process, count: int) -> Iterable[Row]:
    """Measure the memory of the server after many requests with different prompts, over that after a tenth of them."""
    kept = []
    for part in (count // 10, count - count // 10):
        bodies = [
            [Request(f"request {number} of {len(kept)}", number, 1).body() for number in range(client, part, CLIENTS)]
            for client in range(CLIENTS)
        ]
        send(url, bodies)
        kept.append(process.memory_info().rss)
    yield Row(f"memory after {count} requests over after {count // 10}", kept[1] / kept[0], 1.05, "lower")


if __name__ == "__main__":
    run("Serving", measure)
