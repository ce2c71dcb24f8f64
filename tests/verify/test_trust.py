"""Roots and snapshots: which chains of versions are valid, and whose signatures count."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from atoll.core import layout
from atoll.core.artifacts import to_json
from atoll.core.errors import AtollError
from atoll.verify.local_trust import check_seen, open_chain
from atoll.verify.signing import Signer, Statement
from atoll.verify.trust import Network, Objects, Root, RootChain, Signed, Snapshot, parse_signed
from atoll.verify.untrusted import Refused
from share.shared import person

TODAY = datetime.now(UTC).date()
ONE, TWO = "1" * 64, "2" * 64
RUN = "a" * 32


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def public(*names: str) -> dict[str, str]:
    return {name: person(name).public for name in names}


def first(**changes: Any) -> Root:
    values = {
        "run": RUN, "version": 1, "previous": None, "expires": TODAY + timedelta(days=30), "owners": public("owner"),
        "publishers": {"ann": {"key": person("ann").public}, "bob": {"key": person("bob").public, "experts": (2,)}},
        "admitters": public("eve"), "settings": ONE, "shards": (ONE, TWO),
    }  # fmt: skip
    return Root.model_validate(values | changes)


def after(root: Root, **changes: Any) -> Root:
    return Root.model_validate(root.model_dump() | {"version": root.version + 1, "previous": root.digest} | changes)


def signed(root: Root, name: str) -> bytes:
    return Signed(root, person(name).sign(root.statement())).to_json()


def stored(*versions: bytes) -> Objects:
    """Return objects as their authors name them, the oldest first."""
    roots = [parse_signed(Root, data, "it").content for data in versions]
    files = dict(zip((layout.root(root.version, root.digest) for root in roots), versions, strict=True))
    return Objects(tuple(files), files.get)


def chain(*versions: bytes, fingerprint: str | None = None) -> RootChain:
    objects = stored(*versions)
    return RootChain.up_to(objects, fingerprint, "store").extended(objects)


V1 = first()
V2 = after(V1, publishers={})


def test_versions_are_followed_as_far_as_they_are_signed() -> None:
    assert chain(signed(V1, "owner")).current == V1
    assert chain(signed(V2, "owner"), signed(V1, "owner")).current == V2
    assert chain(signed(V1, "owner"), signed(V2, "ann")).current == V1
    assert chain(signed(V1, "owner"), signed(after(V2), "owner")).current == V1, "version 2 is missing"


@pytest.mark.parametrize("root", [V1, V2], ids=["first", "second"])
@pytest.mark.parametrize("digits", [32, 64])
def test_the_fingerprint_of_any_version_is_one_of_the_run(root: Root, digits: int) -> None:
    assert chain(signed(V1, "owner"), signed(V2, "owner"), fingerprint=root.digest[:digits]).current == V2


def test_another_run_is_refused_by_its_fingerprint() -> None:
    other = first(run="b" * 32)
    with pytest.raises(AtollError, match="has no valid root with the fingerprint"):
        chain(signed(V1, "owner"), fingerprint=other.fingerprint)
    assert chain(signed(other, "owner"), signed(V1, "owner"), fingerprint=V1.fingerprint).current == V1


def test_the_name_of_an_object_must_have_its_digest() -> None:
    """A stranger cannot prepare a name that begins with a fingerprint."""
    good, bad = layout.root(1, V1.digest), layout.root(1, V1.fingerprint + "0" * 32)
    objects = Objects((bad, good), lambda _: signed(V1, "owner"))
    assert RootChain.up_to(objects, V1.fingerprint, "store").current == V1


def test_one_owner_is_enough_and_nobody_else() -> None:
    both = first(owners=public("owner", "dan"))
    assert chain(signed(both, "dan")).current == both
    with pytest.raises(AtollError, match="not signed by an owner"):
        chain(signed(both, "ann"))
    rotated = after(V1, owners=public("dan"), withdrawn_keys=(person("owner").public,))
    assert chain(signed(V1, "owner"), signed(rotated, "dan")).current == V1, "dan was no owner before"
    assert chain(signed(V1, "owner"), signed(rotated, "owner")).current == rotated
    again = after(rotated, publishers={})
    assert chain(signed(V1, "owner"), signed(rotated, "owner"), signed(again, "owner")).current == rotated
    assert chain(signed(V1, "owner"), signed(rotated, "owner"), signed(again, "dan")).current == again


FORBIDDEN: list[dict[str, Any]] = [
    {"previous": TWO}, {"run": "b" * 32}, {"settings": TWO}, {"shards": (ONE,)}, {"withdrawn": ()},
    {"withdrawn_keys": ()}, {"version": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", FORBIDDEN, ids=str)
def test_a_version_must_follow_the_one_before(change: dict[str, Any]) -> None:
    base = first(withdrawn=(TWO,), withdrawn_keys=(person("mallory").public,))
    assert chain(signed(base, "owner"), signed(after(base, **change), "owner")).current == base


BOTH = first(owners=public("owner", "mallory"))
GOOD = after(BOTH, owners=public("owner"), withdrawn_keys=(person("mallory").public,))
FORK = after(BOTH, admitters=public("mallory"))
LATER = [signed(after(FORK, publishers="anyone"), "mallory"), signed(FORK, "mallory")]
"""The key of mallory was stolen and withdrawn; the thief adds other versions beside the owner's."""


@pytest.mark.parametrize("order", [1, -1], ids=["after", "before"])
def test_a_withdrawn_owner_locks_nobody_out(order: int) -> None:
    """Whoever has the newest fingerprint, or has seen that version, stays with it, whatever the store shows first."""
    objects = [signed(BOTH, "owner"), signed(GOOD, "owner"), *LATER][::order]
    assert chain(*objects, fingerprint=GOOD.fingerprint).current == GOOD
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", f"{order}")
        assert chain(*objects, fingerprint=BOTH.fingerprint).current == (
            GOOD if order == 1 else after(FORK, publishers="anyone")
        )


def test_a_version_that_was_seen_is_followed(tmp_path: Path) -> None:
    first_look = stored(signed(BOTH, "owner"), signed(GOOD, "owner"))
    assert open_chain(first_look, BOTH.fingerprint, "store").current == GOOD
    forged_times = stored(*LATER, signed(BOTH, "owner"), signed(GOOD, "owner"))
    assert open_chain(forged_times, BOTH.fingerprint, "store").current == GOOD
    with pytest.raises(AtollError, match="Somebody rolled it back"):
        open_chain(stored(*LATER, signed(BOTH, "owner")), BOTH.fingerprint, "store")


def test_roots_of_a_stranger_do_not_stop_the_run() -> None:
    own = first(run="b" * 32, owners=public("mallory"))
    forked = [signed(after(own, publishers={}), "mallory"), signed(after(own, admitters={}), "mallory")]
    objects = [signed(own, "mallory"), *forked, signed(V1, "owner"), signed(V2, "owner")]
    assert chain(*objects, fingerprint=V1.fingerprint).current == V2


def test_an_expired_root_is_refused_with_what_to_do() -> None:
    trust = chain(signed(first(expires=TODAY - timedelta(days=1)), "owner"))
    with pytest.raises(AtollError, match=r"expired on .*atoll trust RUN renew"):
        trust.check_valid("store")
    renewed = after(trust.current, expires=TODAY)
    chain(signed(trust.current, "owner"), signed(renewed, "owner")).check_valid("store")


# Signatures

ROLES: list[tuple[str, str, str, bool]] = [
    ("owner", "publish", "router/final", True), ("owner", "publish", "experts/001/final", True),
    ("owner", "snapshot", "", True), ("owner", "lease", "experts/000", True),
    ("ann", "publish", "experts/001/final", True), ("ann", "checkpoint", "experts/001/checkpoints/a", True),
    ("ann", "lease", "experts/001", True), ("ann", "snapshot", "", False), ("ann", "publish", "router/final", False),
    ("ann", "publish", "student/final", False), ("ann", "publish", "monolith/final", False),
    ("bob", "publish", "experts/002/final", True), ("bob", "publish", "experts/001/final", False),
    ("bob", "lease", "experts/001", False), ("bob", "checkpoint", "experts/001/checkpoints/a", False),
    ("eve", "snapshot", "", True), ("eve", "lease", "experts/001", True),
    ("eve", "publish", "experts/001/final", False),
    ("mallory", "publish", "experts/001/final", False), ("mallory", "lease", "experts/001", False),
    ("mallory", "snapshot", "", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "role", "slot", "allowed"), ROLES)
def test_a_key_signs_only_what_the_root_delegates_to_it(name: str, role: Any, slot: str, allowed: bool) -> None:
    trust = chain(signed(V1, "owner"))
    made = person(name).sign(trust.statement(role, slot, TWO))
    if allowed:
        assert trust.verify(made, role, slot, digest=TWO) == name
    else:
        with pytest.raises(Refused, match="signed by a key that the root does not allow for it"):
            trust.verify(made, role, slot, digest=TWO)


@pytest.mark.parametrize("slot", ["router/final", "monolith/final", "student/final"])
def test_anyone_may_publish_experts_of_an_open_run_but_nothing_else(slot: str) -> None:
    trust = chain(signed(first(publishers="anyone"), "owner"))
    expert = person("mallory").sign(trust.statement("publish", "experts/001/final", TWO))
    assert trust.verify(expert, "publish", "experts/001/final", digest=TWO).endswith("…")
    with pytest.raises(Refused, match="does not allow"):
        trust.verify(person("mallory").sign(trust.statement("publish", slot, TWO)), "publish", slot, digest=TWO)
    with pytest.raises(Refused, match="does not allow"):
        trust.verify(person("mallory").sign(trust.statement("snapshot", "", TWO)), "snapshot", "", digest=TWO)


OTHER: list[dict[str, Any]] = [
    {"run": "b" * 64}, {"role": "checkpoint"}, {"slot": "experts/000/final"}, {"digest": ONE}, {"previous": ONE},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHER, ids=str)
def test_a_signature_is_for_one_run_role_slot_and_digest(change: dict[str, Any]) -> None:
    trust = chain(signed(V1, "owner"))
    statement = Statement.model_validate(trust.statement("publish", "experts/001/final", TWO).model_dump() | change)
    made = person("ann").sign(statement).model_copy(update={"previous": None})
    with pytest.raises(Refused, match="does not match its content and slot"):
        trust.verify(made, "publish", "experts/001/final", digest=TWO)


def test_what_a_replaced_key_signed_stays_valid_where_it_is_listed_and_a_withdrawn_key_is_not_valid() -> None:
    trust = chain(signed(V1, "owner"))
    made = person("ann").sign(trust.statement("publish", "experts/001/final", TWO))
    replaced = after(V1, publishers={"ann": {"key": person("dan").public}})
    trust = chain(signed(V1, "owner"), signed(replaced, "owner"))
    assert trust.verify(made, "publish", "experts/001/final", digest=TWO, listed=True) == "ann"
    with pytest.raises(Refused, match="does not allow"):
        trust.verify(made, "publish", "experts/001/final", digest=TWO)
    late = person("ann").sign(trust.statement("publish", "experts/001/final", TWO))
    with pytest.raises(Refused, match="does not allow"):
        trust.verify(late, "publish", "experts/001/final", digest=TWO, listed=True)
    withdrawn = after(replaced, withdrawn_keys=(person("ann").public,))
    trust = chain(signed(V1, "owner"), signed(replaced, "owner"), signed(withdrawn, "owner"))
    with pytest.raises(Refused, match="which was withdrawn"):
        trust.verify(made, "publish", "experts/001/final", digest=TWO, listed=True)


def test_a_withdrawn_digest_and_an_unpublished_version_are_refused() -> None:
    trust = chain(signed(first(withdrawn=(TWO,)), "owner"))
    made = person("ann").sign(trust.statement("publish", "experts/001/final", TWO))
    with pytest.raises(Refused, match="was withdrawn by the owners"):
        trust.verify(made, "publish", "experts/001/final", digest=TWO)
    later = trust.statement("publish", "experts/001/final", ONE).model_copy(update={"version": 2})
    with pytest.raises(Refused, match="which is not published"):
        trust.verify(person("ann").sign(later), "publish", "experts/001/final", digest=ONE)


# Snapshots


def snapshot(signer: str, root: int = 1, version: int = 1, by: str = "ann", **changes: Any) -> bytes:
    statement = RootChain((V1,)).statement("publish", "experts/001/final", ONE, weights=TWO)
    network = Network(manifest=ONE, signature=person(by).sign(statement))
    values: dict[str, Any] = {"run": V1.digest, "root": root, "version": version, "networks": {"experts/001": network}}
    content = Snapshot.model_validate(values | changes)
    return Signed(content, person(signer).sign(content.statement())).to_json()


def newest(trust: RootChain, *files: bytes) -> tuple[int, int] | None:
    named = {}
    for number, data in enumerate(files):
        try:
            named[layout.snapshot(*parse_signed(Snapshot, data, "it").content.order)] = data
        except Refused:
            named[layout.snapshot(1, 900_000 + number)] = data
    found = trust.newest_snapshot(Objects(tuple(named), named.get))
    return found.content.order if found else None


def test_the_newest_snapshot_of_an_admitter_counts() -> None:
    trust = chain(signed(V1, "owner"), signed(V2, "owner"))
    files = [
        snapshot("eve", version=2),
        snapshot("owner", version=3),
        snapshot("eve", root=2),
        snapshot("ann", root=2, version=9),
    ]
    assert newest(trust, *files) == (2, 1)
    assert newest(trust, *files[:2]) == (1, 3)
    assert newest(chain(signed(V1, "owner")), *files) == (1, 3), "root 2 is not known"
    assert newest(trust, b"{}", b"", snapshot("mallory"), snapshot("eve", run="b" * 64)) is None


def test_withdrawn_networks_publishers_and_admitters_leave_the_snapshot() -> None:
    data = snapshot("eve")
    listed = parse_signed(Snapshot, data, "it")
    assert list(chain(signed(V1, "owner")).usable(listed)) == ["experts/001"]
    assert chain(signed(V1, "owner")).usable(listed, "experts/000") == chain(signed(V1, "owner")).usable(None) == {}
    for change in ({"withdrawn": (ONE,)}, {"withdrawn_keys": (person("ann").public,)}):
        trust = chain(signed(V1, "owner"), signed(after(V1, **change), "owner"))
        assert newest(trust, data) == (1, 1)
        assert trust.usable(listed) == {}
    trust = chain(signed(V1, "owner"), signed(after(V1, withdrawn_keys=(person("eve").public,)), "owner"))
    assert newest(trust, data) is None


def test_an_admitter_cannot_list_the_network_of_another_author() -> None:
    """Eve admits. She lists a network with her own signature, and one with ann's signature over other weights."""
    trust = chain(signed(V1, "owner"))
    assert trust.usable(parse_signed(Snapshot, snapshot("eve", by="eve"), "it")) == {}
    listed = parse_signed(Snapshot, snapshot("eve"), "it")
    network = listed.content.networks["experts/001"]

    def lists(networks: dict[str, Network]) -> Signed[Snapshot]:
        return replace(listed, content=listed.content.model_copy(update={"networks": networks}))

    for change in ({"weights": ONE}, {"key": person("owner").public}):
        forged = network.model_copy(update={"signature": network.signature.model_copy(update=change)})
        assert trust.usable(lists({"experts/001": forged})) == {}
    assert trust.usable(lists({"router": network})) == {}


def test_an_older_root_or_snapshot_than_before_is_refused() -> None:
    old, new = chain(signed(V1, "owner")), chain(signed(V1, "owner"), signed(V2, "owner"))
    check_seen(old, (1, 4))
    check_seen(old)
    for order in ((1, 3), (0, 0)):
        with pytest.raises(AtollError, match="Somebody rolled it back"):
            check_seen(old, order)
    check_seen(new, (2, 1))
    with pytest.raises(AtollError, match="Somebody rolled it back"):
        check_seen(old)
    with pytest.raises(AtollError) as refused:
        check_seen(old)
    assert "delete" not in str(refused.value)
    assert "atoll trust RUN renew --push" in str(refused.value)
    fork = chain(signed(V1, "owner"), signed(after(V1, admitters={}), "owner"))
    with pytest.raises(AtollError, match="Somebody rolled it back"):
        check_seen(fork)


# Keys


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o604, 0o601])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key.pem"
    mine = Signer.open(file)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(mode)
    with pytest.raises(AtollError, match=r"can be read by other users .*chmod 600"):
        Signer.open(file)
    file.chmod(0o600)
    assert Signer.open(file).public == mine.public


# Malformed files


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value | {"signed": value["signed"] | changes}


MALFORMED: list[Callable[[dict[str, Any]], Any]] = [
    lambda _: [], lambda _: None, lambda value: {**value, "more": 1}, lambda value: {"signed": value["signed"]},
    lambda value: {**value, "signature": {}}, lambda value: {**value, "signature": [1]},
    lambda value: {**value, "signed": []},
    changed(format=2), changed(run="x"), changed(version=0), changed(version=2.0), changed(version="1"),
    changed(version=10**9), changed(expires="soon"), changed(expires=5), changed(owners={}), changed(owners=[]),
    changed(owners={"a\x1b[2J": ONE}), changed(owners={"a": "x"}), changed(owners={"a": ONE.upper() + "A"}),
    changed(threshold=1), changed(publishers="everyone"), changed(publishers=None),
    changed(publishers={"a": {"key": TWO, "experts": [-1]}}), changed(publishers={"a": {"key": TWO, "all": True}}),
    changed(shards="x"), changed(shards=["x"]), changed(shards=[ONE + "\n"]), changed(settings=None),
    changed(withdrawn=["../x"]), changed(withdrawn_keys=["x"]), changed(policy={"max_bytes": 0}),
    changed(policy={"objectives": ["mine"]}), changed(policy={"max_validation_loss": -1}), changed(unknown=1),
    changed(previous=ONE),
]  # fmt: skip


@pytest.mark.parametrize("change", MALFORMED)
def test_a_malformed_root_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    import json

    value = json.loads(signed(V1, "owner"))
    with pytest.raises(Refused, match="it is not a root"):
        parse_signed(Root, to_json(change(value)), "it")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[" * 100, b'{"signed": {}, "signed": {}, "signature": {}}', b" " * (2 << 20), b"NaN"]
)
def test_a_root_that_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        parse_signed(Root, data, "it")
    with pytest.raises(AtollError, match="no valid root"):
        RootChain.up_to(Objects((layout.root(1, V1.digest),), lambda _: data), None, "store")
