"""Fuzzing: every parser of what a stranger can create gives a value or an error of Atoll, whatever the bytes are.

Half of the inputs are valid documents with random changes of their JSON, the other half with random changes of their
bytes. Nothing but `AtollError` may escape, and what a parser accepts must be bounded.
"""

import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.apps.share.admission import Contribution, check_declaration, check_files
from atoll.apps.share.lease_records import Record, key_of, list_leases, read_record
from atoll.apps.share.remote_run import Access, split_url
from atoll.apps.share.shared_settings import read_shared
from atoll.apps.share.store import Store
from atoll.core.artifacts import Artifact, to_json
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS
from atoll.core.metrics_file import parse_lines
from atoll.verify.signing import Signature
from atoll.verify.trust import Objects, Root, RootChain, Snapshot, parse_signed
from atoll.verify.untrusted import strict_json, strict_manifest
from share.conftest import Published
from share.offers import WEIGHTS
from share.shared import remote
from share.test_records import GOOD

EXAMPLES = 200
"""Inputs of each parser: 2,600 in all."""
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320, "", "a", "0" * 64, "1" * 64,
    "..", "../x", "/etc/passwd", "C:\\x", "\x00", "\x1b[2J", "\u202e", "\ud83c\udfdd", "x" * 300, [], [1], [[]], {},
    {"a": 1}, {"": None}, [None] * 100,
    "experts/000", "anyone", "2026-01-01", "NaN", "1e999", "!!python/object:os.system", "DiT", "float32",
]  # fmt: skip


def change_json(value: Any, rng: random.Random) -> Any:
    """Return a copy with a few random changes: replaced, deleted, added and swapped parts."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        parents: list[Any] = []
        stack = [value]
        while stack:
            node = stack.pop()
            if isinstance(node, dict | list) and node:
                parents.append(node)
                stack += node.values() if isinstance(node, dict) else node
        if not parents:
            return rng.choice(VALUES)
        parent = rng.choice(parents)
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        action = rng.randrange(5)
        if action == 0:
            parent.pop(key)
        elif action == 1 and isinstance(parent, dict):
            parent[rng.choice(["x", "__class__", "format", "../y", "\x00"])] = rng.choice(VALUES)
        elif action == 2 and isinstance(parent, list):
            parent += parent[:50]
        elif action == 3 and isinstance(parent[key], int | float):
            parent[key] = parent[key] * rng.choice([-1, 0, 2, 1e6, 10**9])
        else:
            parent[key] = rng.choice(VALUES)
    return value


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few random changes: replaced, deleted, repeated and added parts."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(changed) + 1)
        length = rng.choice([1, 1, 2, 8, 64])
        action = rng.randrange(4)
        if action == 0:
            del changed[start : start + length]
        elif action == 1:
            changed[start : start + length] = rng.randbytes(length)
        elif action == 2:
            changed[start:start] = changed[start : start + length] * rng.choice([1, 2, 500])
        else:
            changed[start:start] = rng.choice(
                [b'"', b"{", b"[", b"}", b"]", b"\\", b"\xff", b"\x00", b"&a *a", b": ", b","]
            )
    return bytes(changed)


@dataclass(frozen=True)
class Parser:
    """A parser, a valid input, and what bounds its result."""

    parse: Callable[[bytes], object] = field(repr=False)
    valid: bytes = field(repr=False)
    is_json: bool = True


@pytest.fixture(scope="module")
def parsers(published: Published, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parser]:
    folder = tmp_path_factory.mktemp("fuzz")
    objects = published.objects
    root = next(data for name, data in sorted(objects.items()) if name.startswith("root/000002"))
    newest = max(name for name in objects if name.startswith("snapshot/"))
    snapshot = objects[newest]
    roots = Objects(tuple(sorted(name for name in objects if name.startswith("root/"))), objects.get)
    trust = RootChain.up_to(roots, None, "it").extended(roots)
    expert = Artifact(reference, "experts/001/final")
    manifest, shards = expert.open(EXPERT), Artifact(reference, "data/shards/cluster_001").open(SHARDS)
    record = to_json(json.loads(Record.model_validate(GOOD).model_dump_json()))

    def declared(data: bytes) -> object:
        contribution = Contribution("experts/001", strict_manifest(data, "it"), (shards,), trust.current.policy)
        check_declaration(contribution)
        return contribution

    def stored(data: bytes) -> object:
        store = Store.open(f"memory://{uuid4().hex}")
        store.write(key_of("experts/001", 0), data)
        assert set(list_leases(store).leases) <= {"experts/001"}
        return read_record(store, "experts/001", 0, authority=None)

    def weights(data: bytes) -> object:
        """Check the files of an expert whose weights are these bytes."""
        target = Artifact(folder, "experts/001/final")
        target.folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "cluster.safetensors"):
            target.path(name).write_bytes(expert.path(name).read_bytes())
        target.path(WEIGHTS).write_bytes(data)
        names = {name: entry for name, entry in manifest.files.items() if not name.startswith("ema-")}
        offered = type(manifest)(manifest.kind, manifest.made_from, manifest.content, names)
        return check_files(Contribution("experts/001", offered, (shards,), trust.current.policy), target)

    def chain(data: bytes) -> object:
        found = Objects(roots.names, lambda name: data if "/000002" in name else objects[name])
        return RootChain.up_to(found, None, "it").extended(found)

    return {
        "json": Parser(lambda data: strict_json(data, "it", 1 << 16), root),
        "manifest": Parser(lambda data: strict_manifest(data, "it"), manifest.to_json()),
        "declaration": Parser(declared, manifest.to_json()),
        "expert": Parser(lambda data: EXPERT.parse(strict_manifest(data, "it"), "it"), manifest.to_json()),
        "shards": Parser(lambda data: SHARDS.parse(strict_manifest(data, "it"), "it"), shards.to_json()),
        "root": Parser(lambda data: parse_signed(Root, data, "it"), root),
        "chain of roots": Parser(chain, root),
        "snapshot": Parser(lambda data: parse_signed(Snapshot, data, "it"), snapshot),
        "newest snapshot": Parser(lambda data: trust.newest_snapshot(Objects((newest,), lambda _: data)), snapshot),
        "lease": Parser(stored, record),
        "settings": Parser(lambda data: read_shared(data, "it"), objects["atoll.yaml"], is_json=False),
        "weights": Parser(weights, expert.path(WEIGHTS).read_bytes(), is_json=False),
        "metrics": Parser(parse_lines, b'{"images": 8, "total": 16, "images_per_second": 1.0, "loss": 1.0}\n' * 3),
    }


NAMES = (
    "json", "manifest", "declaration", "expert", "shards", "root", "chain of roots", "snapshot",
    "newest snapshot", "lease", "settings", "weights", "metrics",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(seed=st.integers(0, 2**32), raw=st.booleans())
def test_hostile_input_gives_an_error_of_atoll(parsers: dict[str, Parser], name: str, seed: int, raw: bool) -> None:
    parser, rng = parsers[name], random.Random(seed)
    if raw or (not parser.is_json and name != "settings") or name == "metrics":
        data = change_bytes(parser.valid, rng)
    elif name == "settings":
        data = yaml.safe_dump(change_json(yaml.safe_load(parser.valid), rng)).encode()
    else:
        data = json.dumps(change_json(json.loads(parser.valid), rng), sort_keys=True, indent=1).encode() + b"\n"
    try:
        result = repr(parser.parse(data))
    except AtollError as error:
        result = str(error)
    assert len(result) < 100 * (len(data) + 10_000)


@pytest.mark.parametrize("name", NAMES)
def test_the_unchanged_input_is_accepted(parsers: dict[str, Parser], name: str) -> None:
    """Otherwise the fuzzing would not get beyond the first check."""
    assert parsers[name].parse(parsers[name].valid) is not None


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(url=st.text(max_size=200), fingerprint=st.none() | st.text(max_size=80))
def test_any_url_is_split_or_refused(url: str, fingerprint: str | None) -> None:
    try:
        base, given = split_url(url, fingerprint)
        found, version = Access(given).parsed()
    except AtollError:
        return
    assert "#sha256=" not in base
    assert found is None or 32 <= len(found) <= 64
    assert 0 <= version < 1_000_000


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=600) | st.text(max_size=300).map(str.encode))
def test_any_object_as_a_signature_is_refused(published: Published, data: bytes) -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    published.copy(store)
    run = remote(store)
    digest = run.networks()["experts/000"].manifest
    assert isinstance(run.read_signature("publish", "experts/000/final", digest), Signature)
    store.write(f"experts/000/final/signatures/{digest}.json", data)
    with pytest.raises(AtollError):
        run.read_signature("publish", "experts/000/final", digest)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(max_size=60), data=st.binary(max_size=100))
def test_any_key_of_a_stranger_is_harmless(tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes) -> None:
    """In a folder, keys become paths: none leads out of it."""
    outer = tmp_path_factory.mktemp("keys")
    store = Store.open(outer / "store")
    with suppress(AtollError, ValueError, OSError):  # as the file system answers
        store.write(f"leases/{name}", data)
    assert {path.name for path in outer.iterdir()} == {"store"}
    assert list_leases(store, now=0.0).leases == {}
