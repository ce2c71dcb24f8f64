"""`atoll trust`: the changes of a run's root as an owner types them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from atoll.apps.share.owners import change_root
from atoll.apps.share.remote_run import FRAGMENT, Access, RemoteRun, split_url
from atoll.apps.share.store import Store
from atoll.core.errors import AtollError, unknown
from atoll.verify.local_trust import local_snapshot, local_trust
from atoll.verify.signing import Signer
from atoll.verify.trust import Network, Policy, Publisher, Root, RootChain

Changes = dict[str, object]
"""New values of fields of the root."""


def show_root(source: str) -> RootChain:
    """Return the root of a shared run, given by its local folder or its URL."""
    url, fingerprint = split_url(source)
    if "://" not in url and (trust := local_trust(Path(url))):
        return trust
    # The root is only printed: whoever reads it compares the fingerprint.
    return RemoteRun.open(Store.open(url), None, Access(fingerprint, unsigned=True)).trust


def describe(trust: RootChain) -> str:
    """Return the root as text."""
    root = trust.current
    lines = [
        f"fingerprint  {trust.roots[0].fingerprint}   (never changes; others open URL{FRAGMENT}FINGERPRINT@VERSION)",
        f"version      {root.version}, valid until {root.expires}, fingerprint {root.fingerprint}",
        *(f"owner        {name}  {key}" for name, key in root.owners.items()),
        *(f"admitter     {name}  {key}" for name, key in root.admitters.items()),
    ]
    if root.publishers == "anyone":
        lines.append("publisher    anyone, for experts")
    else:
        for name, one in root.publishers.items():
            experts = "all experts" if one.experts is None else f"experts {', '.join(map(str, one.experts))}"
            lines.append(f"publisher    {name}  {one.key}  {experts}")
    lines += [f"withdrawn    {one}" for one in (*root.withdrawn_keys, *root.withdrawn)]
    limits = root.policy.model_dump(exclude_defaults=True)
    lines += [f"limit        {name} {value}" for name, value in limits.items()]
    return "\n".join(lines)


def change(run: Path, action: str, words: Sequence[str], *, experts: tuple[int, ...], signer: Signer) -> Root:
    """Make the next version of the root in the folder of its owner."""
    trust = local_trust(run)
    if trust is None:
        raise AtollError(f"{run} is not shared yet; share it with: atoll push {run} URL")
    root, changes = trust.current, Changes()  # renew: every new version is valid for a year
    if action == "add":
        changes = _add(root, words, experts or None)
    elif action == "invite":
        changes = _add(root, ("publisher", *words), experts or None)
    elif action == "withdraw":
        snapshot = local_snapshot(run, trust)
        changes = _withdraw(root, words, snapshot.content.networks if snapshot else {})
    elif action == "rotate":
        changes = _rotate(root, words)
    elif action == "set":
        changes = _set(root, words)
    return change_root(run, signer, **changes)


def _add(root: Root, words: Sequence[str], experts: tuple[int, ...] | None) -> Changes:
    match tuple(words):
        case ("publisher", "anyone"):
            return {"publishers": "anyone"}
        case ("publisher", name, key):
            return {"publishers": {**_publishers(root), name: {"key": key, "experts": experts}}}
        case ("admitter", name, key):
            return {"admitters": {**root.admitters, name: key}}
        case ("owner", name, key):
            return {"owners": {**root.owners, name: key}}
    raise AtollError(
        "expected: atoll trust RUN invite NAME KEY, add publisher|admitter|owner NAME KEY, or add publisher anyone"
    )


def _withdraw(root: Root, words: Sequence[str], networks: Mapping[str, Network]) -> Changes:
    """Withdraw a network, or a key, which also leaves every list."""
    match tuple(words):
        case ("network", job) if job in networks:
            # The weights, too, so that the same weights with another manifest stay out.
            return {"withdrawn": (*root.withdrawn, networks[job].manifest, networks[job].weights)}
        case ("network", digest):
            return {"withdrawn": (*root.withdrawn, digest)}
        case ("key", word):
            listed = {**{name: one.key for name, one in _publishers(root).items()}, **root.admitters, **root.owners}
            key = listed.get(word, word)
            publishers = {name: one for name, one in _publishers(root).items() if one.key != key}
            return {
                "withdrawn_keys": (*root.withdrawn_keys, key),
                "owners": {name: one for name, one in root.owners.items() if one != key},
                "admitters": {name: one for name, one in root.admitters.items() if one != key},
                "publishers": root.publishers if root.publishers == "anyone" else publishers,
            }
    raise AtollError("expected: atoll trust RUN withdraw network JOB|DIGEST, or withdraw key NAME|KEY")


def _rotate(root: Root, words: Sequence[str]) -> Changes:
    """Replace the key of a person. Signatures of the old key stay valid; withdraw it if it was stolen."""
    if len(words) != 2:
        raise AtollError("expected: atoll trust RUN rotate NAME KEY")
    name, key = words
    made: Changes = {}
    if name in root.owners:
        made["owners"] = {**root.owners, name: key}
    if name in root.admitters:
        made["admitters"] = {**root.admitters, name: key}
    if one := _publishers(root).get(name):
        made["publishers"] = {**_publishers(root), name: {"key": key, "experts": one.experts}}
    if not made:
        raise AtollError(unknown("name", name, (*root.owners, *root.admitters, *_publishers(root))))
    return made


def _set(root: Root, words: Sequence[str]) -> Changes:
    """Set a limit of the policy or the last day."""
    fields = (*Policy.model_fields, "expires")
    if len(words) != 2 or words[0] not in fields:
        raise AtollError(f"expected: atoll trust RUN set FIELD VALUE, with a field of {', '.join(fields)}")
    try:
        name, value = words[0], yaml.safe_load(words[1])
    except yaml.YAMLError as error:
        raise AtollError(f"{words[1]!r} is not a value of {words[0]}: {error}") from error
    if name in Policy.model_fields:
        return {"policy": root.policy.model_dump() | {name: value}}
    return {name: value}


def _publishers(root: Root) -> dict[str, Publisher]:
    return {} if root.publishers == "anyone" else root.publishers
