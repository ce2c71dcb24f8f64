"""What a working island tells the others: progress with every renewal of its lease, and checkpoints to go on from."""

import re
import shutil
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from os import link

from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import CHECKPOINT
from atoll.core.signing import Signer
from atoll.islands.leases import Lease, LeaseLost
from atoll.islands.store import Store
from atoll.islands.transfer import parts_of, proposal_key, signature_key, upload
from atoll.train.spec import TrainSpec

_OBJECT = r"(sha256/[0-9a-f]{64}(\.[0-9]{4,6})?|manifests/[0-9a-f]{64}\.json|signatures/[0-9a-f]{64}\.publish\.json)"
"""The rest of a key below the name of a checkpoint, as `atoll.islands.transfer` makes it."""


class Reporter:
    """Publishes checkpoints while a job trains (a `TrainCallback`); one upload runs at a time beside training."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        spec: TrainSpec,
        *,
        signer: Signer | None,
        every: float,
        stop: threading.Event,
        resumed: Collection[str] = (),
    ) -> None:
        self.store, self.lease, self.signer, self.every, self.stop = store, lease, signer, every, stop
        # All that this worker ever deletes: keys that it wrote, and those of the checkpoint that it fetched, verified
        # and resumed from, whose progress the next one contains. No key comes from a listing or from a record.
        self._superseded = set(resumed)
        # Objects of different attempts never meet, so clearing up after one cannot hurt another.
        self.name = f"{layout.checkpoints(lease.job)}/{lease.record.nonce[:16]}"
        self.outbox = spec.run / lease.job / ".outbox"
        self._pool = ThreadPoolExecutor(1)
        self._upload: Future[None] | None = None
        self._last = float("-inf")
        self._waiting: Artifact | None = None
        self._start: tuple[float, int] | None = None
        shutil.rmtree(self.outbox, ignore_errors=True)
        lease.tell(total=spec.settings.total_images, rate=0.0)

    def on_step(self, images: int) -> bool:
        """News for the next renewal; a lost lease or a wish to leave stops the job."""
        now = time.monotonic()
        if self._start is None:
            self._start = (now, images)
        seconds, done = now - self._start[0], images - self._start[1]
        self.lease.tell(images=images, rate=done / seconds if seconds > 0 else 0.0)
        return self.stop.is_set() or self.lease.lost

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        """Publish the checkpoint, unless one was published lately or is on its way: then it waits."""
        busy = self._upload is not None and not self._upload.done()
        self._waiting = checkpoint
        if not busy and time.monotonic() - self._last >= self.every:
            self._send()

    def close(self, send: bool = True) -> None:
        """Publish the last checkpoint if the job is not finished, and wait until it is there; or leave at once."""
        if send and self._waiting is not None and self._waiting.manifest() is not None:
            self._send()
        self._pool.shutdown(wait=send, cancel_futures=not send)
        shutil.rmtree(self.outbox, ignore_errors=True)

    def _send(self) -> None:
        if self._waiting is None or self.lease.lost:
            return
        self._last = time.monotonic()
        copy = Artifact(self.outbox, self._waiting.folder.name)
        # Links cost nothing, and training may forget its old checkpoints meanwhile.
        shutil.copytree(self._waiting.folder, copy.folder, copy_function=link, dirs_exist_ok=True)
        self._upload = self._pool.submit(self._publish, copy)
        self._waiting = None

    def _publish(self, copy: Artifact) -> None:
        try:
            manifest = copy.open(CHECKPOINT)
            kept = checkpoint_keys(self.name, manifest)
            self._superseded |= kept
            upload(self.store, copy, manifest, name=self.name, quiet=True)
            if self.signer is not None:
                signature = self.signer.sign("publish", self.name, manifest)
                self.store.write(signature_key(self.name, manifest.digest, "publish"), signature)
            # From here on it counts: whoever takes over starts from the newest record.
            self.lease.renew(checkpoint=f"{self.name}@{manifest.digest}", images=int(copy.folder.name))
            self.store.delete(sorted(self._superseded - kept))
            self._superseded = kept
        except LeaseLost as lost:
            print(f"checkpoint not published: {lost}", flush=True)
        except AtollError as error:
            print(f"{self.lease.job}: the checkpoint could not be published, the next one will be: {error}", flush=True)
        finally:
            shutil.rmtree(copy.folder, ignore_errors=True)


def checkpoint_keys(name: str, manifest: Manifest) -> set[str]:
    """Return every key that a published checkpoint has in the store."""
    parts = {part.key for entry in manifest.files.values() for part in parts_of(name, entry)}
    return parts | {proposal_key(name, manifest.digest), signature_key(name, manifest.digest, "publish")}


def is_checkpoint_key(key: str, job: str) -> bool:
    """Whether a key is one that a published checkpoint of this job can have."""
    pattern = rf"{re.escape(layout.checkpoints(job))}/[0-9a-f]{{16}}/{_OBJECT}"
    return re.fullmatch(pattern, key) is not None
