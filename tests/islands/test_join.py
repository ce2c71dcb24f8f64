"""`atoll join`: contributors who come and go, and a run that comes out whole."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest

import atoll
from atoll import cli
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.core.signing import Signer
from atoll.islands.leases import Lease, look, survey
from atoll.islands.remote_run import admit, pull, push
from atoll.islands.status import status
from atoll.islands.store import Store
from atoll.islands.transfer import read_manifest
from atoll.train import resolve_job, train_job
from islands.servers import access, new_bucket, proxy
from islands.workers import end, start
from train.conftest import Copy
from train.workers import assert_same_weights, wait_for

EXPERTS = [f"experts/{number:03d}" for number in range(3)]


def keyed(folder: Path) -> dict[str, str]:
    """An environment with a key of its own, made on first use."""
    return {"ATOLL_KEY": str(folder / "key.pem"), **access()}


def shards_asked_for(requests: list[str]) -> set[str]:
    found = [re.search(r"cluster_(\d{3})/sha256", line) for line in requests if line.startswith("GET")]
    return {f"experts/{match.group(1)}" for match in found if match}


def test_two_contributors_make_one_model_each_from_its_own_shards(
    s3: str, bucket: str, new_run: Copy, tmp_path: Path, reference: Path
) -> None:
    """On a real S3 server, each behind a proxy of its own, whose log tells what it asked for."""
    push(new_run(), Store.open(bucket))
    with proxy(s3) as first, proxy(s3) as second:
        workers = []
        for name, line in (("ann", first), ("bob", second)):
            folder, log = tmp_path / name, tmp_path / f"{name}.txt"
            environment = {**keyed(folder), "AWS_ENDPOINT_URL": line.address}
            how = ("--folder", str(folder), "--name", name, "--lease", "60", "--publish-every", "0", "--wait")
            workers.append((start(log, environment, "join", bucket, *how), log))
        for process, log in workers:
            end(process, log)
        logs = {"ann": first.requests, "bob": second.requests}
    store = Store.open(bucket)
    records = {job: seen.record for job, seen in survey(store).items()}
    assert {job: record.state for job, record in records.items()} == dict.fromkeys(EXPERTS, "done")
    for name, requests in logs.items():
        mine = {job for job, record in records.items() if record.holder == name}
        assert mine, f"{name} did nothing"
        assert shards_asked_for(requests) == mine
    assert [line.state for line in status(store)] == ["done"] * 3 + ["missing"]
    assert store.entries("experts/000/checkpoints") == []
    assert set(pull(store, tmp_path / "model").values()) == {"fetched"}
    model = atoll.load(tmp_path / "model", routing="nearest")
    assert model.missing == ()
    pictures = model.sample(["a circle", "a square"], steps=3, seed=0)
    assert [picture.size for picture in pictures] == [(32, 32)] * 2
    for job in EXPERTS:  # what the contributors trained is what one machine would have trained
        assert_same_weights(reference / job / "final", tmp_path / "model" / job / "final")


def kill_again_and_again(url: str, reference: Path, tmp_path: Path, kills: int) -> None:
    """One of two contributors is killed at random moments; whatever was committed stays, and all ends the same."""
    chance, store, committed = random.Random(0), Store.open(url), dict[str, str]()
    how = ("--lease", "1", "--publish-every", "0", "--wait", "--train.save_every", "16")
    steady_log, killed_log = tmp_path / "steady.txt", tmp_path / "killed.txt"
    command = ("join", url, *how, "--folder")
    killed = 0
    while killed < kills:
        log = killed_log
        process = start(log, keyed(tmp_path), *command, str(tmp_path / "killed"), "--name", f"killed-{killed}")
        process.join(chance.uniform(0.3, 1.5))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
        elif process.exitcode == 0:
            break
        now = {job: manifest.digest for job in EXPERTS if (manifest := read_manifest(store, f"{job}/final"))}
        assert committed.items() <= now.items(), "something committed was lost or changed"
        committed = now
    assert killed >= min(kills, 3)
    steady = start(steady_log, keyed(tmp_path), *command, str(tmp_path / "steady"), "--name", "steady")
    end(steady, steady_log)
    assert set(pull(store, tmp_path / "model").values()) == {"fetched"}
    for job in EXPERTS:
        assert_same_weights(reference / job / "final", tmp_path / "model" / job / "final")
        assert len(store.entries(f"{job}/final/manifest.json")) <= 1


def test_kills_lose_nothing_that_was_committed(new_run: Copy, tmp_path: Path, reference: Path) -> None:
    push(new_run(), Store.open(tmp_path / "shared"))
    kill_again_and_again(str(tmp_path / "shared"), reference, tmp_path, kills=3)


@pytest.mark.slow
def test_ten_kills_on_s3(bucket: str, new_run: Copy, tmp_path: Path) -> None:
    run = new_run(train={"total_images": 640})
    push(run, Store.open(bucket))
    for expert in range(3):
        train_job(resolve_job(run, config.load(run), "expert", expert=expert))
    kill_again_and_again(bucket, run, tmp_path, kills=10)


def test_whoever_leaves_hands_over_its_last_checkpoint(new_run: Copy, tmp_path: Path) -> None:
    """Ctrl-C publishes and gives up the lease; another, on the same machine, goes on as chosen to the same bits."""
    run, place = new_run(train={"total_images": 480, "save_every": 10000, "log_every": 8}), tmp_path / "shared"
    store = Store.open(place)
    push(run, store)
    log = tmp_path / "log.txt"
    choice = ("--objective", "ddpm", "--train.lr", "2e-3", "--name", "first")
    how = ("join", str(place), "--expert", "1", "--lease", "60", "--publish-every", "1000", "--folder")
    first = start(log, keyed(tmp_path), *how, str(tmp_path / "a"), *choice)
    wait_for((tmp_path / "a/experts/001/metrics.jsonl").exists)
    os.kill(first.pid, signal.SIGSTOP)  # that it is not over before it is asked to leave
    line = next(line for line in status(store) if line.job == "experts/001")
    assert (line.state, line.where) == ("running", "first")
    os.kill(first.pid, signal.SIGINT)
    os.kill(first.pid, signal.SIGCONT)
    end(first, log)
    seen = look(store, "experts/001")
    assert seen is not None
    assert (seen.record.state, seen.record.failures) == ("released", 0)
    assert 0 < seen.record.images < seen.record.total == 480
    assert seen.record.checkpoint
    assert next(line for line in status(store) if line.job == "experts/001").state == "free"
    second = start(log, keyed(tmp_path), *how, str(tmp_path / "b"), "--objective", "x0", "--name", "second")
    end(second, log)
    assert f"going on from {seen.record.images:,} images" in log.read_text()
    overrides = {"experts.1": "ddpm", "train.lr": "2e-3"}
    train_job(resolve_job(run, config.load(run, overrides), "expert", expert=1))
    assert_same_weights(run / "experts/001/final", tmp_path / "b/experts/001/final")
    made = read_manifest(store, "experts/001/final")
    assert made is not None
    assert made.content["objective"]["prediction"] == "epsilon"
    assert made.files == Artifact(run, "experts/001/final").open(EXPERT).files


def test_a_worker_that_lost_its_lease_publishes_nothing(new_run: Copy, tmp_path: Path) -> None:
    """It is stopped (SIGSTOP) past its lease; another finishes the expert meanwhile; it wakes up."""
    run, place = new_run(train={"total_images": 400}), tmp_path / "shared"
    store = Store.open(place)
    push(run, store)
    how = ("join", str(place), "--expert", "0", "--lease", "1", "--publish-every", "1000", "--wait", "--folder")
    slow_log, quick_log = tmp_path / "slow.txt", tmp_path / "quick.txt"
    slow = start(slow_log, keyed(tmp_path), *how, str(tmp_path / "a"), "--name", "slow", "--objective", "x0")
    wait_for(lambda: (seen := look(store, "experts/000")) is not None and seen.record.checkpoint)
    os.kill(slow.pid, signal.SIGSTOP)
    quick = start(quick_log, keyed(tmp_path), *how, str(tmp_path / "b"), "--name", "quick")
    end(quick, quick_log)
    before = {entry.key: entry.modified for entry in store.entries("experts/000")}
    os.kill(slow.pid, signal.SIGCONT)
    end(slow, slow_log)
    assert "nothing was published" in slow_log.read_text() or "lost" in slow_log.read_text()
    assert {entry.key: entry.modified for entry in store.entries("experts/000")} == before
    seen = look(store, "experts/000")
    assert seen is not None
    assert (seen.record.state, seen.record.holder) == ("done", "quick")


def test_a_commit_that_was_interrupted_is_finished_by_the_next(new_run: Copy, tmp_path: Path) -> None:
    """The worker died between its last record and the manifest."""
    run, store = new_run(), Store.open(tmp_path / "shared")
    push(run, store)
    log = tmp_path / "log.txt"
    how = ("join", str(tmp_path / "shared"), "--expert", "2", "--folder", str(tmp_path / "a"))
    end(start(log, keyed(tmp_path), *how), log)
    made = read_manifest(store, "experts/002/final")
    store.delete(["experts/002/final/manifest.json"])
    end(start(log, keyed(tmp_path), *how), log)
    assert read_manifest(store, "experts/002/final") == made


def test_a_job_that_fails_says_why_and_others_go_on(new_run: Copy, tmp_path: Path) -> None:
    run, place = new_run(), tmp_path / "shared"
    push(run, Store.open(place))
    log = tmp_path / "log.txt"
    how = (
        "join",
        str(place),
        "--expert",
        "0",
        "--train.lr",
        "1e30",
        "--train.max_grad_norm",
        "1e30",
        "--train.warmup_images",
        "0",
    )
    end(start(log, keyed(tmp_path), *how, "--folder", str(tmp_path / "a")), log, code=2)
    line = next(line for line in status(Store.open(place)) if line.job == "experts/000")
    assert line.state == "failed"
    assert "not finite" in line.why
    end(start(log, keyed(tmp_path), "join", str(place), "--expert", "0", "--folder", str(tmp_path / "b")), log)
    assert next(line for line in status(Store.open(place)) if line.job == "experts/000").state == "done"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--objective", "ddpm"), "policy allows the objectives flow-matching, x0 only"),
        (("--network", "DiT-S/2"), "parameters; the run's policy allows 100,000"),
        (("--train.init_from", "/etc"), "--train.init_from is not for contributors to choose"),
        (("--data.source", "x"), "--data.source is not for contributors to choose"),
        (("--expert", "9"), "there is no expert 9"),
    ],
)
def test_choices_outside_the_policy_are_refused_before_training(
    options: tuple[str, ...], reason: str, new_run: Copy, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = new_run()
    (run / "policy.json").write_text(json.dumps({"objectives": ["flow-matching", "x0"], "max_parameters": 100_000}))
    push(run, Store.open(tmp_path / "shared"))
    monkeypatch.setenv("ATOLL_KEY", str(tmp_path / "key.pem"))
    code = cli.main(["join", str(tmp_path / "shared"), "--folder", str(tmp_path / "a"), *options])
    said = capfd.readouterr()
    assert reason in said.out + said.err
    assert code == 2
    assert not list((tmp_path / "shared/experts").glob("*/final/manifest.json"))


def test_only_those_whom_the_policy_lists_may_join(
    new_run: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = Signer.open(tmp_path / "ann.pem")
    run = new_run()
    (run / "policy.json").write_text(json.dumps({"publishers": {"ann": ann.public}}))
    push(run, Store.open(tmp_path / "shared"))
    monkeypatch.setenv("ATOLL_KEY", str(tmp_path / "bob.pem"))
    assert cli.main(["join", str(tmp_path / "shared"), "--folder", str(tmp_path / "b")]) == 2
    assert "does not list your key" in capsys.readouterr().err


def test_admission_by_the_owner_and_signatures_all_the_way(
    new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contribution waits until the owner has checked it; then it is pulled, and loading checks both signatures."""
    owner, ann = Signer.open(tmp_path / "owner.pem"), Signer.open(tmp_path / "ann.pem")
    run, place = new_run(), str(tmp_path / "shared")
    rules = {"publishers": {"ann": ann.public}, "admitters": {"owner": owner.public}, "max_held_out_loss": 50}
    (run / "policy.json").write_text(json.dumps(rules))
    push(run, Store.open(place))
    monkeypatch.setenv("ATOLL_KEY", str(tmp_path / "ann.pem"))
    assert cli.main(["join", place, "--expert", "1", "--folder", str(tmp_path / "a")]) == 0
    assert "waits for admission" in capsys.readouterr().out
    assert next(line for line in status(Store.open(place)) if line.job == "experts/001").state == "proposed"
    assert cli.main(["admit", place, "--folder", str(tmp_path / "o")]) == 2  # ann is no admitter
    capsys.readouterr()
    owner_key = ("--key", str(tmp_path / "owner.pem"))
    assert cli.main(["admit", place, "--json", "--folder", str(tmp_path / "o"), *owner_key]) == 0
    assert json.loads(capsys.readouterr().out) == {"experts/001": "admitted"}
    assert cli.main(["pull", place, str(tmp_path / "m"), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert verdicts["experts/001"] == "fetched"
    assert verdicts["experts/000"] == "missing"
    model = atoll.load(tmp_path / "m", "expert:1")
    assert len(model.sample(["a circle"], steps=2, seed=0)) == 1
    weights = max((tmp_path / "shared/experts/001/final").rglob("*"), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert cli.main(["pull", place, str(tmp_path / "n")]) == 2
    assert "refused: experts/001" in capsys.readouterr().err
    signatures = json.loads((tmp_path / "m/experts/001/final.signatures.json").read_text())
    assert (signatures["publish"]["key"], signatures["admit"]["key"]) == (ann.public, owner.public)
    (tmp_path / "m/experts/001/final.signatures.json").write_text(json.dumps({"publish": signatures["publish"]}))
    with pytest.raises(AtollError, match="is not signed, and the policy says who may have admitted it"):
        atoll.load(tmp_path / "m", "expert:1")


def test_a_refused_contribution_leaves_the_expert_free(
    new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Signer.open(tmp_path / "owner.pem")
    run, place = new_run(), str(tmp_path / "shared")
    (run / "policy.json").write_text(json.dumps({"admitters": {"owner": owner.public}}))
    store = Store.open(place)
    push(run, store)
    lease = Lease.take(store, "experts/000", 5, holder="mallory")
    assert lease is not None
    lease.end("proposed", manifest="0" * 64)
    verdicts = admit(store, tmp_path / "o", owner)
    assert "has no manifest" in verdicts["experts/000"]
    line = next(line for line in status(store) if line.job == "experts/000")
    assert (line.state, line.why) == ("free", verdicts["experts/000"])
    assert Lease.take(store, "experts/000", 5, holder="ann") is not None


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
    assert lines["experts/001"]["images"] == 160
    assert cli.main(["status", str(run)]) == 0
    assert "experts/001" in capsys.readouterr().out
    assert cli.main(["status", str(run / "nowhere")]) == 2


def test_a_run_is_pushed_once_and_not_over_another(new_run: Copy, tmp_path: Path, s3: str, bucket: str) -> None:
    store = Store.open(new_bucket(s3))
    first, second = new_run("first"), new_run("second", train={"lr": 0.5})
    assert push(first, store) == push(first, store)
    with pytest.raises(AtollError, match=r"atoll.yaml is there already and differs"):
        push(second, store)
