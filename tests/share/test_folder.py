"""Symbolic links in a shared folder are never followed."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from atoll.apps.share.folder_store import Folder
from atoll.apps.share.remote_run import Access
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.worker import open_worker
from atoll.core.errors import AtollError
from atoll.verify.untrusted import Refused
from share.shared import person, share
from train.conftest import Copy

ATTEMPT, DIGEST = "0123456789abcdef", "1" * 64
KEY = f"experts/001/checkpoints/{ATTEMPT}/sha256/{DIGEST}"
BELOW = {
    "at the top": "experts",
    "at an intermediate folder": "experts/001",
    "at the checkpoints": "experts/001/checkpoints",
    "at an attempt": f"experts/001/checkpoints/{ATTEMPT}",
    "at the files": f"experts/001/checkpoints/{ATTEMPT}/sha256",
    "at the object": KEY,
}
"""The part of a key that is a link."""
ACTS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read(KEY),
    "stream": lambda store: list(store.stream(KEY, 0, 4)),
    "entry": lambda store: store.entry(KEY),
    "write": lambda store: store.write(KEY, b"other"),
    "delete": lambda store: store.delete([KEY]),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Unrelated files of the user, with the same names as the parts of a checkpoint's key."""
    for part in BELOW.values():
        file = tmp_path / "outside" / part / "mine.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if part != KEY:
            file.write_text("mine")
    (tmp_path / "outside" / KEY).rmdir()
    (tmp_path / "outside" / KEY).write_text("mine")
    return tmp_path / "outside"


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def linked(tmp_path: Path, part: str, target: Path) -> Store:
    """Return a store in which one part of the key is a link."""
    link = tmp_path / "store" / part
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    return Store.open(tmp_path / "store")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("where", BELOW)
def test_a_link_is_refused(where: str, act: str, tmp_path: Path, outside: Path) -> None:
    part, before = BELOW[where], content(outside)
    store = linked(tmp_path, part, outside / part)
    with pytest.raises(Refused, match="is a symbolic link; links inside a store are not followed"):
        ACTS[act](store)
    assert content(outside) == before
    assert (tmp_path / "store" / part).is_symlink()


@pytest.mark.parametrize("where", BELOW)
def test_nothing_behind_a_link_is_listed_or_created(where: str, tmp_path: Path, outside: Path) -> None:
    part, before = BELOW[where], content(outside)
    store = linked(tmp_path, part, outside / part)
    (tmp_path / "store" / "plain").write_text("plain")
    for prefix in ("experts", "experts/001", "experts/001/checkpoints", f"experts/001/checkpoints/{ATTEMPT}", KEY):
        assert store.entries(prefix) == []
    assert [entry.key for entry in store.entries("")] == ["plain"]
    if part == KEY:
        assert not store.create(KEY, b"mine"), "not even with equal content behind the link"
    else:
        with pytest.raises(Refused, match="symbolic link"):
            store.create(KEY, b"mine")
    assert content(outside) == before


@pytest.mark.parametrize("target", ["missing", ".", "..", "loop", "/"])
@pytest.mark.parametrize("part", ["a", "a/b", "a/b/c"])
def test_dangling_links_and_loops_are_refused(part: str, target: str, tmp_path: Path) -> None:
    link = tmp_path / "store" / part
    store = linked(tmp_path, part, link if target == "loop" else Path(target))
    for act in (store.read, store.entry, lambda key: store.write(key, b"x"), lambda key: store.delete([key])):
        with pytest.raises(Refused, match="is a symbolic link"):
            act("a/b/c")
    assert store.entries("") == []
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_the_folder_itself_may_be_reached_through_links(tmp_path: Path) -> None:
    """The path of a store is the choice of its user."""
    (tmp_path / "disk" / "shared").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "run").symlink_to("home/shared")
    for store_url in (tmp_path / "run", f"file://{tmp_path}/run", tmp_path / "home" / "shared"):
        store = Store.open(store_url)
        store.write("a/b", b"x")
        assert store.path == tmp_path / "disk" / "shared"
        assert [entry.key for entry in store.entries("a")] == ["a/b"]
        store.delete(["a/b"])
        store.probe()


@pytest.mark.parametrize("key", ["..", "../x", "a/../../x", "/x", "a//b", ".", "a/.", "", "/", "a\0b"])
def test_keys_that_leave_the_folder_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    store = Store.open(tmp_path / "store")
    for act in (store.read, store.entry, lambda key: store.write(key, b"x"), lambda key: store.delete([key])):
        with pytest.raises(AtollError):
            act(key)
    assert content(tmp_path) == {"x": "mine"}


def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")
    store = Store.open(tmp_path)
    assert store.read("a/pipe") is None
    assert store.entry("a/pipe") is None
    assert store.entries("a") == []
    with pytest.raises(Refused, match="is not a regular file"), Folder.open(tmp_path).opened("a/pipe"):
        pass


def test_very_deep_folders_are_not_listed(tmp_path: Path) -> None:
    deep = tmp_path / "store" / "/".join(["a"] * 200)
    deep.mkdir(parents=True)
    (deep / "x").write_text("x")
    assert Store.open(tmp_path / "store").entries("") == []


def test_a_folder_that_is_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    """A thread keeps swapping a folder and a link to the files of the user."""
    mine, shared = tmp_path / "mine", tmp_path / "store" / "a"
    mine.mkdir()
    (mine / "b").write_text("mine")
    shared.mkdir(parents=True)
    store, over = Folder.open(tmp_path / "store"), threading.Event()

    def exchange() -> None:
        for number in count():
            if over.is_set():
                return
            for act in (
                lambda number=number: shared.rename(tmp_path / f"aside-{number}"),
                lambda: shared.symlink_to(mine),
                shared.unlink,
                shared.mkdir,
            ):
                with suppress(OSError):  # the store creates the folder at the same time
                    act()

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(1000):
            for act in (lambda: store.put("a/b", b"theirs"), lambda: store.delete("a/b")):
                with suppress(Refused, OSError):
                    act()
    finally:
        over.set()
        thread.join()
    assert content(mine) == {"b": "mine"}


def test_two_writers_of_one_key_have_one_winner(tmp_path: Path) -> None:
    store, wins = Store.open(tmp_path), list[int]()
    threads = [
        threading.Thread(target=lambda number=number: store.create("a", b"%d" % number) and wins.append(number))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert store.read("a") == b"%d" % wins[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "a temporary file remains"


def test_partial_writes_of_other_programs_are_not_listed(tmp_path: Path) -> None:
    for name in ("a", "a#1", "a#12345", "a#b"):
        (tmp_path / name).write_text("x")
    assert [entry.key for entry in Store.open(tmp_path).entries("")] == ["a", "a#b"]


def test_a_file_url_of_another_host_is_refused() -> None:
    with pytest.raises(AtollError, match="names the host 'elsewhere'"):
        Store.open("file://elsewhere/tmp/x")


# Complete workers


def test_a_worker_does_not_delete_behind_a_link(new_run: Copy, tmp_path: Path) -> None:
    """A known attack: the checkpoints of an expert are a link to files of the user who runs the worker."""
    mine = tmp_path / "mine"
    for name in (f"{ATTEMPT}/sha256/{DIGEST}", "thesis.txt", f"{ATTEMPT}/notes.txt"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    before, shared = content(mine), tmp_path / "shared"
    share(new_run(), Store.open(shared))
    (shared / "experts" / "001").mkdir(parents=True)
    (shared / "experts" / "001" / "checkpoints").symlink_to(mine)
    worker = open_worker(
        str(shared), tmp_path / "a", Access(None, True, person("owner")), duration=3600.0, publish_every=0.0
    )
    assert worker.run(expert=1) == 1
    assert content(mine) == before
    assert "experts/001" in worker.remote.networks()


def test_a_link_instead_of_one_expert_does_not_stop_the_others(
    new_run: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    share(new_run(), Store.open(shared))
    (shared / "experts").mkdir()
    (shared / "experts" / "000").symlink_to(tmp_path)
    (shared / "leases" / "experts").mkdir(parents=True)
    (shared / "leases" / "experts" / "002").symlink_to(tmp_path)
    worker = open_worker(
        str(shared), tmp_path / "a", Access(None, True, person("owner")), duration=3600.0, publish_every=1000.0
    )
    assert worker.run() == 1
    states = {line.job: line.state for line in status(worker.store, worker.remote)}
    assert states["experts/001"] == "done"
    assert states["experts/000"] == "failed"
    assert worker.failed == ["experts/000"]
    output = capsys.readouterr().out
    assert "experts/000 is a symbolic link" in output
    assert "experts/002 is skipped: " in output
    assert not list(tmp_path.glob("final*"))
