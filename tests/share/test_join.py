"""`atoll join`: contributors that start, stop and crash, and a run that is complete in the end."""

import json
import os
import random
import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

import atoll
from atoll import cli
from atoll.apps.share.admit import admit
from atoll.apps.share.lease_records import list_leases
from atoll.apps.share.leases import Lease
from atoll.apps.share.owners import push
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import Access
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import read_manifest
from atoll.apps.share.worker import open_worker
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.core.metrics_file import read_lines
from atoll.train import resolve_job, train_job
from share.servers import access, new_bucket, proxy
from share.shared import acquire, key_file, lease_of, person, publishers, remote, share
from share.workers import end, start
from train.conftest import Copy
from train.workers import assert_same_weights, stop_at_the_first_line, stopped
from waiting import HOUR

EXPERTS = [f"experts/{number:03d}" for number in range(3)]


def with_key(folder: Path, name: str = "owner") -> dict[str, str]:
    """Return environment variables with the private key of a person, and a configuration folder, in `folder`."""
    folder.mkdir(exist_ok=True)
    return {"ATOLL_KEY": str(key_file(name, folder)), "XDG_CONFIG_HOME": str(folder / "config"), **access()}


def requested_shards(requests: list[str]) -> set[str]:
    found = [re.search(r"cluster_(\d{3})/sha256", line) for line in requests if line.startswith("GET")]
    return {f"experts/{match.group(1)}" for match in found if match}


def test_two_contributors_train_one_model_and_download_only_their_shards(
    s3: str, bucket: str, new_run: Copy, tmp_path: Path, reference: Path
) -> None:
    """Each contributor uses a real S3 server through a proxy that logs its requests."""
    url = f"{bucket}#sha256={share(new_run(), Store.open(bucket))}"
    with proxy(s3) as first, proxy(s3) as second:
        workers = []
        for name, line in (("ann", first), ("bob", second)):
            folder, log = tmp_path / name, tmp_path / f"{name}.txt"
            environment = {**with_key(folder), "AWS_ENDPOINT_URL": line.address}
            options = ("--folder", str(folder), "--name", name, "--lease", "3600", "--publish-every", "0", "--wait")
            workers.append((start(log, environment, "join", url, *options, prepare=stop_at_the_first_line), log))
        # Each has an expert before one of them goes on, so neither can train all three alone.
        with ExitStack() as both:
            for process, _ in workers:
                both.enter_context(stopped(process))
        for process, log in workers:
            end(process, log)
        logs = {"ann": first.requests, "bob": second.requests}
    store = Store.open(bucket)
    records = {job: lease_status.record for job, lease_status in list_leases(store).leases.items()}
    assert {job: record.state for job, record in records.items()} == dict.fromkeys(EXPERTS, "done")
    for name, requests in logs.items():
        mine = set(re.findall("^(.*): lease acquired", (tmp_path / f"{name}.txt").read_text(), re.MULTILINE))
        assert mine, f"{name} did nothing"
        assert requested_shards(requests) == mine
    assert [line.state for line in status(store, remote(store))] == ["done"] * 3 + ["missing"]
    left = [entry.key for entry in store.entries("experts/000/checkpoints")]
    assert all("/signatures/" in key for key in left)
    assert set(pull(remote(store, tmp_path / "model"), tmp_path / "model").values()) == {"fetched"}
    model = atoll.load(tmp_path / "model", routing="nearest")
    assert model.missing == ()
    images = model.sample(["a circle", "a square"], num_inference_steps=3, seed=0)
    assert [image.size for image in images] == [(32, 32)] * 2
    for job in EXPERTS:  # bit-equal to training on one machine
        assert_same_weights(reference / job / "final", tmp_path / "model" / job / "final")


def kill_repeatedly(url: str, fingerprint: str, *, reference: Path, tmp_path: Path, kills: int) -> None:
    """Kill a contributor at random moments; check that committed experts stay and the final weights are the same."""
    rng, store, committed = random.Random(0), Store.open(url), dict[str, str]()
    options = ("--publish-every", "0", "--wait", "--train.save_every", "16")
    steady_log, killed_log = tmp_path / "steady.txt", tmp_path / "killed.txt"
    command = ("join", f"{url}#sha256={fingerprint}", *options, "--folder")
    killed = 0
    while killed < kills:
        log = killed_log
        process = start(
            log, with_key(tmp_path), *command, str(tmp_path / "killed"), "--name", f"killed-{killed}", "--lease", "1"
        )
        process.join(rng.uniform(0.3, 1.5))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
        elif process.exitcode == 0:
            break
        now = {job: network.manifest for job, network in remote(store).networks().items()}
        assert committed.items() <= now.items(), "a committed expert was lost or changed"
        committed = now
    assert killed >= min(kills, 3), "it ended too soon"
    steady = start(
        steady_log, with_key(tmp_path), *command, str(tmp_path / "steady"), "--name", "steady", "--lease", "3600"
    )
    end(steady, steady_log)
    assert set(pull(remote(store, tmp_path / "model"), tmp_path / "model").values()) == {"fetched"}
    for job in EXPERTS:
        assert_same_weights(reference / job / "final", tmp_path / "model" / job / "final")


def test_killed_workers_lose_nothing_that_was_committed(new_run: Copy, tmp_path: Path, reference: Path) -> None:
    fingerprint = share(new_run(), Store.open(tmp_path / "shared"))
    kill_repeatedly(str(tmp_path / "shared"), fingerprint, reference=reference, tmp_path=tmp_path, kills=2)


@pytest.mark.slow
def test_ten_kills_on_s3(bucket: str, new_run: Copy, tmp_path: Path) -> None:
    run = new_run(train={"total_images": 640})
    fingerprint = share(run, Store.open(bucket))
    for expert in range(3):
        train_job(resolve_job(run, config.load(run), "expert", expert=expert))
    kill_repeatedly(bucket, fingerprint, reference=run, tmp_path=tmp_path, kills=10)


def test_an_interrupted_worker_publishes_its_last_checkpoint(new_run: Copy, tmp_path: Path) -> None:
    """Ctrl-C publishes a checkpoint and releases the lease. A second worker resumes with the same overrides."""
    run, store_url = new_run(train={"total_images": 480, "save_every": 10000, "log_every": 8}), tmp_path / "shared"
    store = Store.open(store_url)
    url = f"{store_url}#sha256={share(run, store)}"
    log = tmp_path / "log.txt"
    overrides = ("--objective", "ddpm", "--train.lr", "2e-3", "--name", "first")
    options = ("join", url, "--expert", "1", "--lease", "3600", "--publish-every", "3600", "--folder")
    first = start(log, with_key(tmp_path), *options, str(tmp_path / "a"), *overrides, prepare=stop_at_the_first_line)
    with stopped(first):
        line = next(line for line in status(store, remote(store)) if line.job == "experts/001")
        assert (line.state, line.where) == ("running", "first")
        os.kill(first.pid, signal.SIGINT)
    end(first, log)
    lease_status = lease_of(store, "experts/001")
    assert (lease_status.record.state, lease_status.record.failures) == ("released", 0)
    assert 0 < lease_status.record.images < lease_status.record.total == 480
    assert lease_status.record.checkpoint
    line = next(line for line in status(store, remote(store)) if line.job == "experts/001")
    assert line.state == "free"
    lines = {line.images: line.loss for line in read_lines(tmp_path / "a/experts/001/metrics.jsonl")}
    assert line.loss in lines.values()
    second = start(log, with_key(tmp_path), *options, str(tmp_path / "b"), "--objective", "x0", "--name", "second")
    end(second, log)
    assert f"resuming from {lease_status.record.images:,} images" in log.read_text()
    overrides = {"experts.1": "ddpm", "train.lr": "2e-3"}
    train_job(resolve_job(run, config.load(run, overrides), "expert", expert=1))
    assert_same_weights(run / "experts/001/final", tmp_path / "b/experts/001/final")
    made = read_manifest(store, "experts/001/final", remote(store).networks()["experts/001"].manifest)
    assert made.content["objective"]["prediction"] == "epsilon"
    assert made.files == Artifact(run, "experts/001/final").open(EXPERT).files


def test_a_worker_that_lost_its_lease_publishes_nothing(new_run: Copy, tmp_path: Path) -> None:
    """It is stopped until its lease has expired, another worker finishes the expert, and it continues."""
    run, store_url = new_run(train={"total_images": 400}), tmp_path / "shared"
    store = Store.open(store_url)
    url = f"{store_url}#sha256={share(run, store)}"
    options = ("join", url, "--expert", "0", "--publish-every", "3600", "--wait", "--folder")
    slow_log, quick_log = tmp_path / "slow.txt", tmp_path / "quick.txt"
    # On a busy machine it may lose its lease before it stops, too, and takes it again.
    named = (str(tmp_path / "a"), "--name", "slow", "--lease", "3", "--objective", "x0")
    slow = start(slow_log, with_key(tmp_path), *options, *named, prepare=stop_at_the_first_line)
    with stopped(slow):
        named = (str(tmp_path / "b"), "--name", "quick", "--lease", "3600")
        end(start(quick_log, with_key(tmp_path), *options, *named), quick_log)
        before = {entry.key: entry.modified for entry in store.entries("experts/000")}
    end(slow, slow_log)
    assert "nothing was published" in slow_log.read_text() or "lost" in slow_log.read_text()
    assert {entry.key: entry.modified for entry in store.entries("experts/000")} == before
    lease_status = lease_of(store, "experts/000")
    assert (lease_status.record.state, lease_status.record.holder) == ("done", "quick")


def test_an_interrupted_admission_is_finished_by_the_next_admitter(new_run: Copy, tmp_path: Path) -> None:
    """The worker died between its snapshot and its last record, or between its last record and a snapshot."""
    store = Store.open(tmp_path / "shared")
    share(new_run(), store)
    worker = open_worker(store.url, tmp_path / "a", Access(None, True, person("owner")))
    assert worker.run(expert=2) == 1
    made = remote(store).networks()
    store.delete([entry.key for entry in store.entries("snapshot")])
    with pytest.raises(AtollError, match=r"older state of run .* than you have seen"):
        remote(store).networks()
    shutil.rmtree(Path(os.environ["XDG_CONFIG_HOME"]) / "atoll")
    assert remote(store).networks() == {}
    assert admit(remote(store, by="owner"), tmp_path / "o") == {"experts/002": "admitted"}
    again = remote(store).networks()
    assert {job: network.manifest for job, network in again.items()} == {job: one.manifest for job, one in made.items()}


def test_a_failed_job_records_the_reason_and_can_be_retried(new_run: Copy, tmp_path: Path) -> None:
    run, store_url = new_run(), tmp_path / "shared"
    url = f"{store_url}#sha256={share(run, Store.open(store_url))}"
    log = tmp_path / "log.txt"
    diverging = ("--train.lr", "6e4", "--train.max_grad_norm", "6e4", "--train.warmup_images", "0")
    options = ("join", url, "--expert", "0", *diverging)
    end(start(log, with_key(tmp_path), *options, "--folder", str(tmp_path / "a")), log, code=2)
    store = Store.open(store_url)
    line = next(line for line in status(store, remote(store)) if line.job == "experts/000")
    assert line.state == "failed"
    assert "not finite" in line.why
    assert str(tmp_path) not in line.why
    end(start(log, with_key(tmp_path), "join", url, "--expert", "0", "--folder", str(tmp_path / "b")), log)
    assert next(line for line in status(store, remote(store)) if line.job == "experts/000").state == "done"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--objective", "ddpm"), "policy of the run allows only the objectives flow-matching, x0"),
        (("--network", "DiT-S/2"), "parameters; the policy of the run allows 100,000"),
        (("--train.init_from", "/etc"), "--train.init_from cannot be set by contributors"),
        (("--data.source", "x"), "--data.source cannot be set by contributors"),
        (("--expert", "9"), "there is no expert 9"),
    ],
)
def test_overrides_outside_the_policy_are_refused_before_training(
    options: tuple[str, ...], reason: str, new_run: Copy, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    policy = {"objectives": ["flow-matching", "x0"], "max_parameters": 100_000}
    fingerprint = share(new_run(), Store.open(tmp_path / "shared"), policy=policy)
    monkeypatch.setenv("ATOLL_KEY", str(key_file("owner", tmp_path)))
    url = f"{tmp_path / 'shared'}#sha256={fingerprint}"
    code = cli.main(["join", url, "--folder", str(tmp_path / "a"), *options])
    output = capfd.readouterr()
    assert reason in output.out + output.err
    assert code == 2
    assert remote(Store.open(tmp_path / "shared")).networks() == {}


def test_admission_by_the_owner_with_signatures(
    new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contribution waits until the owner admits it. Then it can be pulled, and loading checks the snapshot."""
    store = Store.open(tmp_path / "shared")
    policy = {"max_validation_loss": 50}
    url = f"{store.url}#sha256={share(new_run(), store, publishers=publishers('ann'), policy=policy)}"
    monkeypatch.setenv("ATOLL_KEY", str(key_file("ann", tmp_path)))
    assert cli.main(["join", url, "--expert", "1", "--folder", str(tmp_path / "a")]) == 0
    assert "waits for admission" in capsys.readouterr().out
    assert next(line for line in status(store, remote(store)) if line.job == "experts/001").state == "proposed"
    assert cli.main(["admit", url, "--folder", str(tmp_path / "o")]) == 2  # ann is not an admitter
    capsys.readouterr()
    owner_key = ("--key", str(key_file("owner", tmp_path)))
    assert cli.main(["admit", url, "--json", "--folder", str(tmp_path / "o"), *owner_key]) == 0
    assert json.loads(capsys.readouterr().out) == {"experts/001": "admitted"}
    assert cli.main(["pull", url, str(tmp_path / "m"), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert verdicts["experts/001"] == "fetched"
    assert verdicts["experts/000"] == "missing"
    model = atoll.load(tmp_path / "m", "expert:1")
    assert len(model.sample(["a circle"], num_inference_steps=2, seed=0)) == 1
    weights = max((tmp_path / "shared/experts/001/final").rglob("*"), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert cli.main(["pull", url, str(tmp_path / "n")]) == 2
    assert "refused: experts/001" in capsys.readouterr().err
    assert remote(store).networks()["experts/001"].publisher == person("ann").public
    for file in (tmp_path / "m/snapshot").iterdir():
        file.unlink()
    with pytest.raises(AtollError, match="is not part of the signed snapshot"):
        atoll.load(tmp_path / "m", "expert:1")


def test_a_refused_contribution_leaves_the_expert_free(new_run: Copy, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "shared")
    share(new_run(), store, publishers=publishers("mallory", "ann"))
    mallory, ann, owner = (remote(store, by=name) for name in ("mallory", "ann", "owner"))
    lease = acquire(store, "experts/000", HOUR, holder="mallory", authority=mallory)
    lease.end("proposed", manifest="0" * 64)
    verdicts = admit(owner, tmp_path / "o")
    assert "has no manifest" in verdicts["experts/000"]
    line = next(line for line in status(store, remote(store)) if line.job == "experts/000")
    assert (line.state, line.why) == ("free", verdicts["experts/000"])
    assert Lease.acquire(store, "experts/000", HOUR, holder="ann", authority=ann) is not None


def test_status_of_a_folder_without_leases(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run()
    train_job(resolve_job(run, config.load(run), "expert", expert=0))
    shutil.copytree(run / "experts/000", run / "experts/001")
    shutil.rmtree(run / "experts/001/final")
    capsys.readouterr()
    assert cli.main(["status", str(run), "--json"]) == 0
    lines = {line["job"]: line for line in json.loads(capsys.readouterr().out)}
    assert {job: line["state"] for job, line in lines.items()} == {
        "experts/000": "done", "experts/001": "running", "experts/002": "free", "router": "missing",
    }  # fmt: skip
    assert lines["experts/001"]["images"] == 640
    assert cli.main(["status", str(run)]) == 0
    assert "experts/001" in capsys.readouterr().out
    assert cli.main(["status", str(run / "nowhere")]) == 2


def test_pushing_twice_is_allowed_and_pushing_another_run_is_an_error(
    new_run: Copy, tmp_path: Path, s3: str, bucket: str
) -> None:
    store = Store.open(new_bucket(s3))
    first, second = new_run("first"), new_run("second", train={"lr": 0.5})
    assert push(first, store, person("owner")) == push(first, store, person("owner"))
    with pytest.raises(AtollError, match=r"holds another run than .*use another URL"):
        push(second, store, person("owner"))
