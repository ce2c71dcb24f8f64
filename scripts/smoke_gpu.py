"""Try Atoll on one GPU, in about ten minutes and without the hub, and print one block to paste into an issue.

python scripts/smoke_gpu.py [STAGE ...] [--small] [--folder build/smoke]

Stages are ordinary commands in processes of their own: one that fails, crashes or hangs does not end the others. Each
writes FOLDER/STAGE.log. The exit code is 1 if a stage failed. `--small` is meant for CPUs.
"""

import argparse
import base64
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LIMIT = 600.0
"""Seconds after which a command counts as hanging. The longest one compiles a network."""
PROMPTS = ("red apple", "pizza")
COMMON = {
    "data.source": "emoji:styles=twemoji;categories=food-drink;skin-tones=no",
    "clusters.count": 2,
    "train.compile": "false",
    "train.lr": 1e-4,
    "train.warmup_images": 0,
    "router.network": "{name: DiT-XS/4, width: 128, depth: 4, heads: 2}",
}
# 256 tokens of 64 images saturate the matrix products of a DiT-B.
LARGE = {
    "data.resolution": 128,
    "networks.default": "DiT-B/2",
    "train.batch_size": 64,
    "train.total_images": 300 * 64,
    "train.log_every": 50 * 64,
    "router.total_images": 100 * 32,
}
SMALL = {
    "networks.default": "{name: DiT-XS/4, width: 64, depth: 2, heads: 2}",
    "train.batch_size": 8,
    "train.total_images": 300 * 8,
    "train.log_every": 10 * 8,
    "router.total_images": 10 * 32,
}
# Every synchronization that torch detects becomes a warning with the line that caused it.
ATOLL = """
import sys, torch
from atoll.cli import main
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("warn")
code = main(sys.argv[1:])
if torch.cuda.is_available():
    print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
sys.exit(code)
"""
SYNCHRONIZED = "called a synchronizing CUDA operation"
PIPELINE = """
import sys, torch
from atoll import AtollPipeline
from atoll.core.device import device
pipe = AtollPipeline.from_pretrained(sys.argv[1]).to(device())
assert len(pipe(sys.argv[2:], num_inference_steps=4).images) == len(sys.argv[2:])
"""
VERSIONS = """
import torch
from importlib.metadata import version
from atoll.core.device import device
print("torch", torch.__version__, *(f"{name} {version(name)}" for name in ("atoll", "diffusers", "numpy")))
print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "ROCm", torch.version.hip)
found = torch.cuda.get_device_properties() if device().type == "cuda" else None
about = found and f"{found.name}, {found.total_memory / 2**30:.1f} GiB, capability {found.major}.{found.minor}"
print("device:", about or device())
"""


class StageError(Exception):
    """What the block says about a failed stage."""


@dataclass
class Smoke:
    """The run in a folder, and what the stages found out."""

    folder: Path
    small: bool
    log: Path = Path()
    """Log of the current stage."""
    facts: list[str] = field(default_factory=list)

    @property
    def run(self) -> str:
        """Folder of the run."""
        return str(self.folder / "run")

    # Stages, in their order

    def prepare(self) -> None:
        """Cluster and encode emoji."""
        settings = {**COMMON, **(SMALL if self.small else LARGE)}
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        shutil.rmtree(self.run, ignore_errors=True)
        self.atoll("init", self.run, "--preset", "demo", *options)
        self.atoll("prepare", self.run)

    def train(self) -> None:
        """Train an expert until it writes its first metrics, and interrupt it."""
        written = Path(self.run, "experts/000/metrics.jsonl")
        shutil.rmtree(written.parent, ignore_errors=True)
        process = self.start("train", self.run, "--expert", "0", "--train.save_every", "1000000")
        self.wait(lambda: process.poll() is not None or (written.is_file() and written.read_text() != ""), process)
        process.send_signal(signal.SIGTERM)
        self.finish(process, codes=(75,))  # 75: interrupted and saved

    def resume(self) -> None:
        """Train the expert to its end, from the checkpoint of the interruption."""
        before = self.metrics("experts/000")
        self.atoll("train", self.run, "--expert", "0")
        after = self.metrics("experts/000")
        if after[: len(before)] != before or len(after) <= len(before):
            raise StageError("training began anew, or had ended before")
        self.note_speed("experts/000", "training", after)

    def compile(self) -> None:
        """Train the other expert with compiled blocks."""
        self.atoll("train", self.run, "--expert", "1", "--train.compile", "true")
        self.note_speed("experts/001", "training, compiled", self.metrics("experts/001"))

    def launch(self) -> None:
        """Train what is left: the router, and the other expert if its compilation failed."""
        self.atoll("launch", self.run)

    def sample(self) -> None:
        """Generate images with both experts at every step."""
        self.atoll("sample", self.run, *PROMPTS, "--routing", "full", "--steps", "10")

    def sample_compiled(self) -> None:
        """Generate images with compiled experts."""
        self.atoll("sample", self.run, *PROMPTS, "--routing", "top-1", "--steps", "10", "--compile")

    def export(self) -> None:
        """Export the model, and generate images with its diffusers pipeline."""
        exported = str(self.folder / "exported")
        shutil.rmtree(exported, ignore_errors=True)
        self.atoll("export", self.run, exported)
        self.finish(self.spawn([sys.executable, "-c", PIPELINE, exported, *PROMPTS]))

    def serve(self) -> None:
        """Request images over HTTP."""
        process = self.start("serve", self.run, "--port", "0", "--json")
        try:
            self.wait(lambda: process.poll() is not None or '{"url"' in self.log.read_text(), process)
            lines = [line for line in self.log.read_text().splitlines() if line.startswith('{"url"')]
            if not lines:
                raise StageError(self.last_line())
            server = json.loads(lines[0])
            body = json.dumps({"prompt": PROMPTS[0], "num_images": 2, "steps": 4, "routing": "full"}).encode()
            headers = {"authorization": f"Bearer {server['token']}", "content-type": "application/json"}

            def post() -> bytes | None:
                try:
                    request = urllib.request.Request(f"{server['url']}/v1/images", body, headers)
                    with urllib.request.urlopen(request, timeout=LIMIT) as response:
                        content: bytes = response.read()
                    return content
                except urllib.error.HTTPError as error:
                    if error.code in (409, 503):  # models are being loaded
                        return None
                    raise StageError(error.read().decode()) from error

            images = json.loads(self.wait(post, process))["images"]
            if any(not base64.b64decode(image["png"]).startswith(b"\x89PNG") for image in images):
                raise StageError("the answer contains something else than PNG files")
        finally:
            process.terminate()
        self.finish(process)

    # Processes

    def atoll(self, *words: str) -> None:
        """Run a verb to its end."""
        self.finish(self.start(*words))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a verb that counts its synchronizations."""
        return self.spawn([sys.executable, "-W", f"always:{SYNCHRONIZED}", "-c", ATOLL, *words])

    def spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command whose output is appended to the log of the stage."""
        with self.log.open("ab") as log:
            # A session of its own, so that its worker processes can be ended too.
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self, process: subprocess.Popen[bytes], codes: Sequence[int] = (0,)) -> None:
        """Wait for a process; any other exit code is a failure."""
        self.wait(lambda: process.poll() is not None, process)
        if process.returncode not in codes:
            raise StageError(f"exit code {process.returncode}: {self.last_line()}")

    def wait(self, ready: Callable[[], T | None], process: subprocess.Popen[bytes]) -> T:
        """Return the first true result; end the process if there is none in time."""
        deadline = time.monotonic() + LIMIT
        try:
            while not (found := ready()):
                if time.monotonic() > deadline:
                    raise StageError(f"no result in {LIMIT:.0f} s")
                time.sleep(0.1)
        except (StageError, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return found

    def last_line(self) -> str:
        """Return the last line of the log that tells something."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith("peak memory")), "no output")

    # What the block says besides

    def metrics(self, job: str) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl."""
        lines = Path(self.run, job, "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]

    def note_speed(self, job: str, name: str, metrics: list[dict[str, float]]) -> None:
        """Note the speed at the end of a job, in images and as a share of matrix products; and its memory."""
        command = [sys.executable, "-m", "atoll", "train", self.run, "--dry-run", "--json", "--expert", job[-1]]
        costs = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=LIMIT).stdout)
        speed, peak = metrics[-1]["images_per_second"], costs["matmul_flops_per_second"]
        rate = speed * costs["flops_per_image"]
        self.facts.append(
            f"{name}: {speed:,.1f} images/s, {rate / 1e12:.3g} TFLOP/s, {rate / peak:.1%} of matrix products"
            f" ({peak / 1e12:.3g}); estimated memory {costs['bytes'] / 2**30:.2f} GiB"
        )

    def note_log(self, stage: str) -> None:
        """Note peak memory and synchronizations by line of code, from the log of a stage."""
        text = self.log.read_text(errors="replace")
        for memory in re.findall("^peak memory: (.*)$", text, re.MULTILINE):
            self.facts.append(f"{stage}: peak memory {memory}")
        places = Counter(re.findall(rf"^(.*?:\d+): UserWarning: {SYNCHRONIZED}", text, re.MULTILINE))
        if places:
            often = (f"{'/'.join(Path(place).parts[-2:])} x {count}" for place, count in places.most_common(3))
            self.facts.append(f"{stage}: {places.total()} synchronizations, most often {', '.join(often)}")


STAGES = ("prepare", "train", "resume", "compile", "launch", "sample", "sample_compiled", "export", "serve")


def main() -> int:
    """Run the stages, print the block, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"any of {', '.join(STAGES)}; default: all")
    parser.add_argument("--small", action="store_true", help="tiny networks, for CPUs")
    parser.add_argument("--folder", type=Path, default=Path("build/smoke"))
    given = parser.parse_args()
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(unknown)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    smoke = Smoke(given.folder, given.small)

    rows, failed = [], False
    for stage in given.stages or STAGES:
        smoke.log, start, result = given.folder / f"{stage}.log", time.monotonic(), "ok"
        smoke.log.write_bytes(b"")
        print(f"{stage} …", flush=True)
        try:
            getattr(smoke, stage)()
        except Exception as error:  # a stage that fails must not end the others
            result, failed = f"FAILED: {error}", True
        rows.append(f"{stage:16} {time.monotonic() - start:6.1f} s  {result}")
        smoke.note_log(stage)

    versions = subprocess.run([sys.executable, "-c", VERSIONS], capture_output=True, text=True, check=False)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    about = (versions.stdout or versions.stderr[-2000:]).strip()
    where = f"Python {platform.python_version()}, {platform.platform()}, commit {commit.stdout.strip()}"
    print("\nPaste this into an issue, with the logs of what failed:\n")
    print("\n".join(["```text", about, where, "", *rows, "", *smoke.facts, "```"]))
    print(f"\nLogs: {given.folder}/*.log")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
