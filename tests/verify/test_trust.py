"""Roots and snapshots: which chains of versions are valid, and whose signatures count."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.core.artifacts import to_json
from atoll.core.errors import AtollError
from atoll.verify.local_trust import check_seen
from atoll.verify.signing import _SMALL_ORDER, Signature, Signer, Statement
from atoll.verify.trust import Network, Root, RootChain, Signed, Snapshot, parse_signed
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


def signed(root: Root, *names: str) -> bytes:
    return Signed(root, tuple(person(name).sign(root.statement()) for name in names)).to_json()


def chain(*versions: bytes, fingerprint: str | None = None) -> RootChain:
    return RootChain.of({str(number): data for number, data in enumerate(versions)}, fingerprint, "store")


V1 = first()
V2 = after(V1, publishers={})


def test_versions_are_followed_as_far_as_they_are_signed() -> None:
    assert chain(signed(V1, "owner")).current == V1
    assert chain(signed(V2, "owner"), signed(V1, "owner")).current == V2
    assert chain(signed(V1, "owner"), signed(V2, "ann")).current == V1
    assert chain(signed(V1, "owner"), signed(after(V2), "owner")).current == V1, "version 2 is missing"


@pytest.mark.parametrize("fingerprint", [V1.digest, V2.digest], ids=["first", "second"])
def test_the_fingerprint_of_any_version_is_that_of_the_run(fingerprint: str) -> None:
    assert chain(signed(V1, "owner"), signed(V2, "owner"), fingerprint=fingerprint).current == V2


def test_another_run_is_refused_by_its_fingerprint() -> None:
    other = first(run="b" * 32)
    with pytest.raises(AtollError, match="has no valid root with the fingerprint"):
        chain(signed(V1, "owner"), fingerprint=other.digest)
    assert chain(signed(V1, "owner"), signed(other, "owner"), fingerprint=V1.digest).current == V1
    with pytest.raises(AtollError, match="has several roots"):
        chain(signed(V1, "owner"), signed(other, "owner"))


def test_a_threshold_of_owners_must_sign() -> None:
    three = first(owners=public("owner", "eve", "dan"), threshold=2)
    with pytest.raises(AtollError, match="no valid root"):
        chain(signed(three, "owner"))
    with pytest.raises(AtollError, match="no valid root"):
        chain(signed(three, "owner", "owner"))
    assert chain(signed(three, "owner", "dan")).current == three
    after_three = after(three, owners=public("owner"), threshold=1)
    versions = signed(three, "owner", "dan"), signed(after_three, "owner")
    assert chain(*versions).current == three, "one of the old owners is missing"
    assert chain(versions[0], signed(after_three, "owner", "dan")).current == after_three


def test_new_and_old_owners_sign_a_rotation() -> None:
    rotated = after(V1, owners=public("dan"), withdrawn_keys=(person("owner").public,))
    assert chain(signed(V1, "owner"), signed(rotated, "dan")).current == V1
    assert chain(signed(V1, "owner"), signed(rotated, "owner")).current == V1
    trust = chain(signed(V1, "owner"), signed(rotated, "owner", "dan"))
    assert trust.current == rotated
    again = after(rotated, publishers={})
    assert chain(signed(V1, "owner"), signed(rotated, "owner", "dan"), signed(again, "owner")).current == rotated


FORBIDDEN: list[dict[str, Any]] = [
    {"previous": TWO}, {"run": "b" * 32}, {"settings": TWO}, {"shards": (ONE,)}, {"withdrawn": ()},
    {"withdrawn_keys": ()}, {"version": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", FORBIDDEN, ids=str)
def test_a_version_must_follow_the_one_before(change: dict[str, Any]) -> None:
    base = first(withdrawn=(TWO,), withdrawn_keys=(person("mallory").public,))
    assert chain(signed(base, "owner"), signed(after(base, **change), "owner")).current == base


def test_owners_who_sign_two_versions_are_found() -> None:
    other = after(V1, admitters={})
    with pytest.raises(AtollError, match="two different roots of version 2"):
        chain(signed(V1, "owner"), signed(V2, "owner"), signed(other, "owner"))


def test_roots_of_a_stranger_do_not_stop_the_run() -> None:
    """Copies of the owner's root, and a root of the stranger's own with two successors."""
    own = first(run="b" * 32, owners=public("mallory"))
    forked = [signed(after(own, publishers={}), "mallory"), signed(after(own, admitters={}), "mallory")]
    objects = [signed(V1, "owner"), signed(V1, "owner"), signed(own, "mallory"), *forked, signed(V2, "owner")]
    assert chain(*objects, fingerprint=V1.digest).current == V2
    assert chain(*objects[:2]).current == V1, "copies are one root, also without a fingerprint"


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


def snapshot(signer: str, root: int = 1, version: int = 1, **changes: Any) -> bytes:
    network = Network(manifest=ONE, weights=TWO, publisher=person("ann").public)
    values: dict[str, Any] = {"run": V1.digest, "root": root, "version": version, "networks": {"experts/001": network}}
    content = Snapshot.model_validate(values | changes)
    return Signed(content, (person(signer).sign(content.statement()),)).to_json()


def newest(trust: RootChain, *files: bytes) -> tuple[int, int] | None:
    found = trust.newest_snapshot({str(number): data for number, data in enumerate(files)})
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
    content = parse_signed(Snapshot, data, "it").content
    for change in ({"withdrawn": (ONE,)}, {"withdrawn_keys": (person("ann").public,)}):
        trust = chain(signed(V1, "owner"), signed(after(V1, **change), "owner"))
        assert newest(trust, data) == (1, 1)
        assert trust.usable(content) == {}
    trust = chain(signed(V1, "owner"), signed(after(V1, withdrawn_keys=(person("eve").public,)), "owner"))
    assert newest(trust, data) is None


def test_an_older_root_or_snapshot_than_before_is_refused() -> None:
    old, new = chain(signed(V1, "owner")), chain(signed(V1, "owner"), signed(V2, "owner"))
    check_seen(old, (1, 4))
    check_seen(old)
    for order in ((1, 3), (0, 0)):
        with pytest.raises(AtollError, match="somebody rolled it back"):
            check_seen(old, order)
    check_seen(new, (2, 1))
    with pytest.raises(AtollError, match="somebody rolled it back"):
        check_seen(old)
    fork = chain(signed(V1, "owner"), signed(after(V1, admitters={}), "owner"))
    with pytest.raises(AtollError, match="somebody rolled it back"):
        check_seen(fork)


# Keys


@pytest.mark.parametrize("key", [*sorted(_SMALL_ORDER), "01" + "00" * 30 + "80", "ecff" + "ff" * 29 + "ff"])
def test_keys_of_small_order_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="small order"):
        first(owners={"owner": key})


def test_the_list_of_small_order_points_is_right() -> None:
    """Decode each encoding on the curve -x² + y² = 1 + d x² y² and multiply it by 8."""
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        t = d * a[0] * b[0] * a[1] * b[1] % p
        x = (a[0] * b[1] + a[1] * b[0]) * pow(1 + t, -1, p) % p
        return x, (a[1] * b[1] + a[0] * b[0]) * pow(1 - t, -1, p) % p

    for encoded in _SMALL_ORDER:
        y = int.from_bytes(bytes.fromhex(encoded), "little") % p
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        x = pow(square, (p + 3) // 8, p)
        x = x if x * x % p == square else x * pow(2, (p - 1) // 4, p) % p
        assert x * x % p == square
        point = (x, y)
        for _ in range(3):
            point = add(point, point)
        assert point == (0, 1)


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
    lambda value: {**value, "signatures": {}}, lambda value: {**value, "signatures": [1]},
    lambda value: {**value, "signed": []},
    changed(format=2), changed(run="x"), changed(version=0), changed(version=2.0), changed(version="1"),
    changed(version=10**9), changed(expires="soon"), changed(expires=5), changed(owners={}), changed(owners=[]),
    changed(owners={"a\x1b[2J": ONE}), changed(owners={"a": "x"}), changed(owners={"a": ONE.upper() + "A"}),
    changed(threshold=0), changed(threshold=2), changed(publishers="everyone"), changed(publishers=None),
    changed(publishers={"a": {"key": TWO, "experts": [-1]}}), changed(publishers={"a": {"key": TWO, "all": True}}),
    changed(shards="x"), changed(shards=["x"]), changed(shards=[ONE + "\n"]), changed(settings=None),
    changed(withdrawn=["../x"]), changed(withdrawn_keys=["0" * 64]), changed(policy={"max_bytes": 0}),
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
    "data", [b"", b"\xff", b"[" * 100, b'{"signed": {}, "signed": {}, "signatures": []}', b" " * (2 << 20), b"NaN"]
)
def test_a_root_that_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        parse_signed(Root, data, "it")
    with pytest.raises(AtollError, match="no valid root"):
        chain(data)


def test_a_signature_is_compared_with_all_of_its_bits() -> None:
    statement = V1.statement()
    made = person("owner").sign(statement)
    for position in range(128):
        digit = "0" if made.signature[position] != "0" else "1"
        wrong = made.signature[:position] + digit + made.signature[position + 1 :]
        with pytest.raises(Refused):
            Signature(key=made.key, version=1, signature=wrong).check(statement)
