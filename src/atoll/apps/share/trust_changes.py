"""`atoll trust`: the changes of a run's root as an owner types them."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from atoll.apps.share.owners import change_root, own_trust
from atoll.apps.share.remote_run import FRAGMENT, Access, RemoteRun, split_url
from atoll.apps.share.store import Store
from atoll.core.errors import AtollError, unknown
from atoll.verify.local_trust import local_snapshot, local_trust
from atoll.verify.signing import Signer
from atoll.verify.trust import Policy, Root, RootChain


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
    trust = own_trust(run)
    root, policy = trust.current, tuple(Policy.model_fields)
    people = {} if root.publishers == "anyone" else root.publishers
    made: dict[str, object] = {}  # new values of fields of the root
    match (action, *words):
        case ("renew",):
            pass  # every new version is valid for a year
        case ("add", "publisher", "anyone"):
            made["publishers"] = "anyone"
        case ("invite", name, key) | ("add", "publisher", name, key):
            made["publishers"] = {**people, name: {"key": key, "experts": experts or None}}
        case ("add", "admitter", name, key):
            made["admitters"] = {**root.admitters, name: key}
        case ("add", "owner", name, key):
            made["owners"] = {**root.owners, name: key}
        case ("withdraw", "network", job):
            snapshot = local_snapshot(run, trust)
            listed = snapshot.content.networks.get(job) if snapshot else None
            # The weights, too, so that the same weights with another manifest stay out.
            digests = (listed.manifest, listed.weights) if listed else (job,)
            made["withdrawn"] = (*root.withdrawn, *digests)
        case ("withdraw", "key", word):  # also from every list
            key = {**{name: one.key for name, one in people.items()}, **root.admitters, **root.owners}.get(word, word)
            made["withdrawn_keys"] = (*root.withdrawn_keys, key)
            made["owners"] = {name: one for name, one in root.owners.items() if one != key}
            made["admitters"] = {name: one for name, one in root.admitters.items() if one != key}
            if root.publishers != "anyone":
                made["publishers"] = {name: one for name, one in people.items() if one.key != key}
        case ("rotate", name, key):  # signatures of the old key stay valid; withdraw it if it was stolen
            if name in root.owners:
                made["owners"] = {**root.owners, name: key}
            if name in root.admitters:
                made["admitters"] = {**root.admitters, name: key}
            if name in people:
                made["publishers"] = {**people, name: {"key": key, "experts": people[name].experts}}
            if not made:
                raise AtollError(unknown("name", name, (*root.owners, *root.admitters, *people)))
        case ("set", name, text) if name in (*policy, "expires"):
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise AtollError(f"{text!r} is not a value of {name}: {error}") from error
            made = {"policy": root.policy.model_dump() | {name: value}} if name in policy else {name: value}
        case _:
            raise AtollError(
                "expected: atoll trust RUN invite NAME KEY, add publisher|admitter|owner NAME KEY, add publisher "
                "anyone, withdraw network JOB|DIGEST, withdraw key NAME|KEY, rotate NAME KEY, renew, or set FIELD "
                f"VALUE with a field of {', '.join(policy)}, expires"
            )
    return change_root(run, signer, **made)
