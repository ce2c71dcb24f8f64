"""`atoll serve --on ray` on a real Ray cluster: replicas die under load, and their number follows the load."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from studio.conftest import http, serving
from studio.test_api import read_events
from waiting import HOUR, wait_for

MAIN = "import sys, ray; ray.init(sys.argv[1], _node_ip_address='127.0.0.2', namespace='atoll', log_to_driver=False); "
MAIN += "from atoll.cli import main; sys.exit(main(sys.argv[2:]))"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node with four cores, which it need not have."""
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        pytest.skip(f"RAY SERVE IS NOT TESTED: pip install 'ray[serve]' ({error})")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Not 127.0.0.1: Ray replaces it by the machine's outward address.
    head = {"num_cpus": 4, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


@contextmanager
def served_on(cluster: Any, run: Path, log: Path, *options: str) -> Iterator[str]:
    """Start `atoll serve --on ray` and yield its address when its replicas are ready."""
    words = ["serve", str(run), "--on", "ray", "--port", "0", "--json", "--no-token", *options]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", MAIN, cluster.address, *words], stdout=out, stderr=out)
    try:
        wait_for(lambda: process.poll() is not None or "replicas are ready" in log.read_text())
        assert process.poll() is None, log.read_text()
        yield next(json.loads(line)["url"] for line in log.read_text().splitlines() if line.startswith('{"url"'))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HOUR) == 0, log.read_text()
        wait_for(lambda: not replicas())
    finally:
        process.kill()


def replicas() -> list[int]:
    """Return the processes of all replicas, the oldest first."""
    found = [
        one for one in psutil.process_iter(["cmdline", "create_time"]) if "ServeReplica" in str(one.info["cmdline"])
    ]
    return [one.pid for one in sorted(found, key=lambda one: one.info["create_time"])]


def images(url: str, seed: int, **body: Any) -> list[str]:
    response = http.post(f"{url}/v1/images", json={"prompt": "a circle", "steps": 60, "seed": seed, **body})
    assert response.status_code == 200, response.text
    return [image["png"] for image in response.json()["images"]]


@pytest.mark.slow
def test_a_killed_replica_loses_no_accepted_request(cluster: Any, served_run: Path, tmp_path: Path) -> None:
    with serving(served_run) as (url, _):
        expected = [images(url, seed, expert=1) for seed in range(16)]
    log = tmp_path / "log"
    with served_on(cluster, served_run, log, "--replicas", "2", "2") as url, ThreadPoolExecutor(17) as pool:
        assert http.get(f"{url}/v1/run").json()["models"] == ["experts", "monolith", "student"]
        before = replicas()
        assert len(before) == 2

        def stream() -> list[tuple[str, dict[str, Any]]]:
            body = {"prompt": "a circle", "steps": 250, "seed": 0, "stream": True, "expert": 1}
            with http.stream("POST", f"{url}/v1/images", json=body) as response:
                return read_events(response)

        streamed = pool.submit(stream)
        running = [pool.submit(images, url, seed, expert=1) for seed in range(16)]
        wait_for(lambda: any(psutil.Process(pid).cpu_percent(0.2) > 5 for pid in before))
        for pid in before:  # both, so that every accepted request loses its replica
            os.kill(pid, signal.SIGKILL)
        assert [each.result() for each in running] == expected
        assert streamed.result()[-1][0] == "done"
        assert "sending its request again" in log.read_text()
        # Errors are those of the application, and a second body is refused.
        wrong = http.post(f"{url}/v1/images", json={"num_images": 99})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "num_images")
        assert http.post(f"{url}/v1/images", content=b"x" * 100_000).status_code == 413
        by_address = {"prompt": "a circle", "response_format": "url"}
        assert http.post(f"{url}/v1/images/generations", json=by_address).status_code == 400


@pytest.mark.slow
def test_the_number_of_replicas_follows_the_load(cluster: Any, served_run: Path, tmp_path: Path) -> None:
    options = ("--replicas", "1", "2", "--batch-size", "2")
    with served_on(cluster, served_run, tmp_path / "log", *options) as url, ThreadPoolExecutor(8) as pool:
        assert len(replicas()) == 1
        until = time.monotonic() + HOUR

        def load(seed: int) -> None:
            while len(replicas()) < 2:
                assert time.monotonic() < until
                images(url, seed, steps=250, num_images=2)

        list(pool.map(load, range(8)))
