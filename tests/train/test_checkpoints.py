"""Checkpoints that a thread writes: the right bytes, of the right moment, and valid only once they are committed."""

import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.core import artifacts, config
from atoll.core.artifacts import Artifact, sha256_of
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.manifests import CHECKPOINT
from atoll.train import TrainSpec, checkpoints, resolve_job, train_job
from atoll.train.checkpoints import (
    Checkpoints,
    CheckpointSaver,
    HostCopy,
    Shard,
    TrainState,
    file_of,
    header,
    own_shards,
)
from atoll.train.ema import EMA
from atoll.train.loop import Requeue
from train.conftest import Copy
from train.ranks import log, no_hook, run_ranks
from train.workers import assert_same_weights
from waiting import HOUR

ALONE = DistContext(0, 1, torch.device("cpu"))


def make_state(seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    state = TrainState(network, EMA(network, {"short": 10.0, "long": 100.0}), torch.optim.AdamW(network.parameters()))
    for tensor in state.tensors().values():
        tensor.normal_()
    return state


def values(state: TrainState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def saver_of(run: Path, committed: list[Artifact] | None = None, keep_last: int = 2) -> CheckpointSaver:
    return CheckpointSaver(
        Checkpoints(run, "job", {}, ALONE, keep_last), ([] if committed is None else committed).append
    )


def test_a_file_equals_that_of_torch_distributed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, names and metadata, with tensors that span chunks, are not contiguous or have no dimension."""
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 40)
    tensors = {
        "matrix": torch.randn(6, 5),
        "transposed": torch.randn(4, 3).T,
        "images": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.5),
        "half": torch.randn(3).bfloat16(),
    }
    copy = HostCopy(ALONE)
    copy.take(tensors)
    (tmp_path / "own.safetensors").write_bytes(b"".join(copy.parts()))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        save(contiguous, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "dcp"), save_distributed=True))
    (theirs,) = (tmp_path / "dcp").glob("*.safetensors")
    found, expected = load_file(tmp_path / "own.safetensors"), load_file(theirs)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype
    with safe_open(tmp_path / "own.safetensors", "pt") as own, safe_open(theirs, "pt") as dcp:
        metadata = [
            {key: json.loads(value) if key == "DCP_SHARDING_INFO" else value for key, value in file.metadata().items()}
            for file in (own, dcp)
        ]
    assert metadata[0] == metadata[1]


def test_processes_share_full_tensors_by_size() -> None:
    tensors = {str(i): torch.zeros(1 + 37 * i % 50) for i in range(60)}
    shares = [list(own_shards(tensors, rank, 4)) for rank in range(4)]
    assert sorted(shard.name for share in shares for shard in share) == sorted(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    for share in shares:
        assert abs(sum(shard.local.nbytes for shard in share) - total / 4) <= largest


def test_a_header_ends_at_a_multiple_of_eight_bytes() -> None:
    for length in range(1, 12):
        found = header([Shard("n" * length, torch.zeros(2), (0,))])
        assert len(found) % 8 == 0
        assert int.from_bytes(found[:8], "little") == len(found) - 8


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, read = make_state(), []
    monkeypatch.setattr(artifacts, "sha256_of", lambda file: read.append(file) or sha256_of(file))
    with saver_of(tmp_path) as saver:
        saver.save(state, 8, 1.0)
    assert read == [], "files were read again"
    artifact = Artifact(tmp_path, f"job/checkpoints/{8:012d}")
    manifest = artifact.open(CHECKPOINT, verify=True)
    assert read == [artifact.path(file_of(0))]
    assert list(manifest.files) == [file_of(0)]
    loaded = make_state(1)
    assert Checkpoints(tmp_path, "job", {}, ALONE).load_newest(loaded) == (8, 1.0)
    for name, tensor in values(state).items():
        assert torch.equal(loaded.tensors()[name], tensor), name


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written only after this event."""
    write, opened = Artifact.write_parts, threading.Event()

    def wait_and_write(self: Artifact, file: str, parts: Iterable[bytes | memoryview]) -> object:
        assert opened.wait(HOUR)
        return write(self, file, parts)

    monkeypatch.setattr(Artifact, "write_parts", wait_and_write)
    return opened


def test_a_checkpoint_has_the_state_of_its_moment(tmp_path: Path, gate: threading.Event) -> None:
    """Training changes the state before the file is written."""
    state, committed = make_state(), []
    with saver_of(tmp_path, committed) as saver:
        before = values(state)
        saver.save(state, 8, 1.0)
        for tensor in state.tensors().values():
            tensor.add_(1)
        assert not saver.poll()
        assert committed == []
        assert saver._checkpoints.newest() == "none"
        gate.set()
        assert saver.newest().endswith(f"{8:012d}")
        assert not saver.poll()
        assert [artifact.folder.name for artifact in committed] == [f"{8:012d}"]
    assert len(committed) == 1
    loaded = make_state(1)
    saver._checkpoints.load_newest(loaded)
    for name, tensor in before.items():
        assert torch.equal(loaded.tensors()[name], tensor), name


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    state, committed = make_state(), []
    with saver_of(tmp_path, committed, keep_last=1) as saver:
        saver.save(state, 8, 1.0)
        second = threading.Thread(target=saver.save, args=(state, 16, 2.0))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert not (tmp_path / f"job/checkpoints/{16:012d}").exists()
        gate.set()
        second.join(HOUR)
    assert [artifact.folder.name for artifact in committed] == [f"{8:012d}", f"{16:012d}"]
    assert [path.name for path in (tmp_path / "job/checkpoints").iterdir()] == [f"{16:012d}"]


def full_disk(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    yield next(iter(parts))
    raise OSError("no space left on device")


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Make writing fail in the middle of a file, after `count` files; return the list of those that were begun."""
    write, begun = Artifact.write_parts, []

    def write_or_fail(self: Artifact, file: str, parts: Iterable[bytes | memoryview]) -> object:
        begun.append(self.name)
        return write(self, file, parts if len(begun) <= count else full_disk(parts))

    monkeypatch.setattr(Artifact, "write_parts", write_or_fail)
    return begun


def test_the_error_of_the_thread_is_raised_by_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, 1)
    state, committed = make_state(), []
    with saver_of(tmp_path, committed) as saver:
        saver.save(state, 8, 1.0)
        saver.save(state, 16, 2.0)
        assert saver.newest().endswith(f"{8:012d}")
        assert saver.poll()
        with pytest.raises(OSError, match="no space left"):
            saver.save(state, 24, 3.0)
    assert [artifact.folder.name for artifact in committed] == [f"{8:012d}"]
    assert Checkpoints(tmp_path, "job", {}, ALONE).load_newest(state) == (8, 1.0)


def test_training_that_fails_waits_for_its_last_checkpoint(tmp_path: Path, gate: threading.Event) -> None:
    """The checkpoint is of a good step."""
    threading.Timer(0.1, gate.set).start()
    saver = saver_of(tmp_path)

    def fail() -> None:
        with saver:
            saver.save(make_state(), 8, 1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert saver._checkpoints.newest().endswith(f"{8:012d}")


def test_the_end_of_training_raises_the_error_of_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, 0)
    saver = saver_of(tmp_path)

    def end() -> None:
        with saver:
            saver.save(make_state(), 8, 1.0)

    with pytest.raises(OSError, match="no space left"):
        end()


def test_a_file_that_the_main_process_does_not_see_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines without a common file system."""
    write = Artifact.write_parts

    def write_elsewhere(self: Artifact, file: str, parts: Iterable[bytes | memoryview]) -> object:
        entry = write(self, file, parts)
        self.path(file).unlink()
        return entry

    monkeypatch.setattr(Artifact, "write_parts", write_elsewhere)
    saver = saver_of(tmp_path)
    saver.save(make_state(), 8, 1.0)
    with pytest.raises(AtollError, match=r"state-00000.safetensors was written by .* need a common file system"):
        saver.wait()
    assert saver._checkpoints.newest() == "none"


class Recorder:
    """A callback that records its calls, and that the job stops at some number of images."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.stop_at, self.calls = stop_at, []

    def on_step(self, images: int) -> bool:
        self._record("step", images)
        return images >= self.stop_at

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        assert checkpoint.manifest() is not None
        self._record("checkpoint", int(checkpoint.folder.name))

    def _record(self, what: str, images: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.calls.append((what, images))


def job(run: Path) -> TrainSpec:
    return resolve_job(run, config.load(run), "expert", expert=0)


def test_the_callback_gets_every_committed_checkpoint_in_the_training_thread(new_run: Copy) -> None:
    run, recorder = new_run(train={"save_every": 32}), Recorder(stop_at=80)
    with pytest.raises(Requeue, match="interrupted and saved at 80 images"):
        train_job(job(run), recorder)
    assert [images for what, images in recorder.calls if what == "checkpoint"] == [32, 64, 80]
    assert recorder.calls[-1] == ("checkpoint", 80), "before the job ends"


def test_a_job_that_cannot_save_stops_with_the_error_and_resumes(
    new_run: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops as soon as the thread has failed, at a step that is not a checkpoint's."""
    run, recorder = new_run(train={"save_every": 64, "total_images": 100_000}), Recorder(stop_at=1000)
    with monkeypatch.context() as patch:
        begun = fail_after(patch, 1)
        with pytest.raises(OSError, match="no space left"):
            train_job(job(run), recorder)
    assert [name.rpartition("/")[2] for name in begun] == [f"{64:012d}", f"{128:012d}"]
    assert ("checkpoint", 64) in recorder.calls
    assert ("checkpoint", 128) not in recorder.calls
    resumed = Recorder(stop_at=72)
    with pytest.raises(Requeue):
        train_job(job(run), resumed)
    assert resumed.calls[0] == ("step", 72)


def die_while_writing(run: Path, rank: int, *, who: int, how: str) -> None:
    """End process `who`, or fail, in the middle of its file of the second checkpoint."""
    write, begun = Artifact.write_parts, []

    def break_off(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        yield next(iter(parts))
        if how == "killed":
            os._exit(9)
        raise OSError("no space left on device")

    def write_or_die(self: Artifact, file: str, parts: Iterable[bytes | memoryview]) -> object:
        begun.append(file)
        return write(self, file, break_off(parts) if len(begun) == 2 and rank == who else parts)

    Artifact.write_parts = write_or_die


def break_second_checkpoint(run: Path, who: int, how: str) -> None:
    codes = run_ranks(run, "--expert", "0", hook=partial(die_while_writing, who=who, how=how))
    assert None not in codes, "a process hangs"
    assert 0 not in codes
    committed = [path.parent.name for path in (run / "experts/000/checkpoints").glob("*/manifest.json")]
    assert committed == [f"{16:012d}"]


def test_if_one_process_cannot_write_all_end_with_its_error(new_run: Copy) -> None:
    run = new_run(train={"total_images": 48, "save_every": 16})
    break_second_checkpoint(run, 1, "failed")
    assert "process 0 ends because process 1 failed: OSError: no space left on device" in log(run, 0).read_text()
    assert "OSError: no space left on device" in log(run, 1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_dies_while_it_writes_leaves_the_checkpoint_before(who: int, new_run: Copy) -> None:
    settings = {"total_images": 48, "save_every": 16, "parallel": "fsdp2"}
    broken, straight = new_run("broken", train=settings), new_run("straight", train=settings)
    break_second_checkpoint(broken, who, "killed")
    for run in (broken, straight):
        assert run_ranks(run, "--expert", "0", hook=no_hook) == [0, 0], log(run, 0).read_text()[-3000:]
    assert_same_weights(straight / "experts/000/final", broken / "experts/000/final")
