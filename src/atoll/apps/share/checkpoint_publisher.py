"""Publish progress and checkpoints of a job that is training, so that another worker can take it over."""

import re
import shutil
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from os import link
from typing import Self

from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.transfer import parts_of, upload, uploaded_manifest_key
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import CHECKPOINT
from atoll.core.metrics_file import progress_of
from atoll.train.spec import TrainSpec

_OBJECT = r"(sha256/[0-9a-f]{64}(\.[0-9]{4,6})?|manifests/[0-9a-f]{64}\.json)"
"""The part of a key below the name of a checkpoint, as `atoll.apps.share.transfer` writes it. Signatures are kept: each
names the checkpoint before, so together they are the history of the training, which an auditor can compare."""
_READ_SECONDS = 1.0
"""Seconds between two looks at the loss that training writes for others; it writes it as often."""


class CheckpointPublisher:
    """A `TrainCallback` that publishes progress and checkpoints. Uploads run in a background thread, one at a time."""

    def __init__(
        self,
        remote: RemoteRun,
        lease: Lease,
        spec: TrainSpec,
        *,
        every: float,
        stop: threading.Event,
        resumed: Collection[str] = (),
    ) -> None:
        self.remote, self.lease, self.every, self.stop = remote, lease, every, stop
        # The digest of the last published checkpoint, also of the one that this worker resumed from.
        self.previous = lease.record.checkpoint.partition("@")[2] if lease.record.checkpoint and resumed else None
        # The only keys that this class ever deletes: those that it wrote, and those of the checkpoint that the worker
        # downloaded, verified and resumed from, whose progress the next one includes. No key comes from a listing or a
        # record, which anybody with write access could forge.
        self._superseded = set(resumed)
        # Each attempt has its own prefix, so deleting the objects of one cannot affect another.
        self.name = f"{layout.checkpoints(lease.job)}/{lease.record.nonce[:16]}"
        self.outbox = spec.run / lease.job / ".outbox"
        self._pool = ThreadPoolExecutor(1)
        self._upload: Future[None] | None = None
        self._last = float("-inf")
        self._waiting: Artifact | None = None
        self._folder, self._read = spec.run / lease.job, float("-inf")
        shutil.rmtree(self.outbox, ignore_errors=True)
        lease.set_pending(total=spec.settings.total_images, rate=0.0)

    def on_step(self, images: int) -> bool:
        """Update progress for the next renewal; return whether to stop (lease lost, or stop requested)."""
        self.lease.set_pending(images=images)
        if time.monotonic() - self._read > _READ_SECONDS and (current := progress_of(self._folder)):
            self._read = time.monotonic()
            self.lease.set_pending(rate=current.images_per_second, loss=current.loss, lr=current.lr)
        return self.stop.is_set() or self.lease.lost

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        """Publish the checkpoint, or keep it for later if an upload is running or was started recently."""
        busy = self._upload is not None and not self._upload.done()
        self._waiting = checkpoint
        if not busy and time.monotonic() - self._last >= self.every:
            self._send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish the last unpublished checkpoint and wait for all uploads; a second Ctrl-C cancels them."""
        send = kind is not KeyboardInterrupt
        # A finished job has deleted its checkpoints (`manifest()` is None): nothing is left to publish.
        if send and self._waiting is not None and self._waiting.manifest() is not None:
            self._send()
        self._pool.shutdown(wait=send, cancel_futures=not send)
        shutil.rmtree(self.outbox, ignore_errors=True)

    def _send(self) -> None:
        if self._waiting is None or self.lease.lost:
            return
        self._last = time.monotonic()
        copy = Artifact(self.outbox, self._waiting.folder.name)
        # Hard links cost no disk space and survive when training deletes its old checkpoints during the upload.
        shutil.copytree(self._waiting.folder, copy.folder, copy_function=link, dirs_exist_ok=True)
        self._upload = self._pool.submit(self._publish, copy)
        self._waiting = None

    def _publish(self, copy: Artifact) -> None:
        try:
            manifest = copy.open(CHECKPOINT)
            kept = checkpoint_keys(self.name, manifest)
            self._superseded |= kept
            self.remote.write_signature("checkpoint", self.name, manifest.digest, previous=self.previous)
            upload(self.remote.store, copy, manifest, name=self.name, quiet=True)
            # With this record the checkpoint becomes the one that a takeover resumes from.
            images = int(copy.folder.name)
            self.lease.renew(checkpoint=f"{self.name}@{manifest.digest}", images=images, published=images)
            self.previous = manifest.digest
            self.remote.store.delete(sorted(self._superseded - kept))
            self._superseded = kept
        except LeaseLost as lost:
            print(f"checkpoint not published: {lost}", flush=True)
        except AtollError as error:
            print(f"{self.lease.job}: the checkpoint could not be published, the next one may be: {error}", flush=True)
        finally:
            shutil.rmtree(copy.folder, ignore_errors=True)


def checkpoint_keys(name: str, manifest: Manifest) -> set[str]:
    """Return the keys of a published checkpoint in the store, except for its signature."""
    parts = {part.key for entry in manifest.files.values() for part in parts_of(name, entry)}
    return parts | {uploaded_manifest_key(name, manifest.digest)}


def is_checkpoint_key(key: str, job: str) -> bool:
    """Return whether a key can belong to a published checkpoint of this job."""
    pattern = rf"{re.escape(layout.checkpoints(job))}/[0-9a-f]{{16}}/{_OBJECT}"
    return re.fullmatch(pattern, key) is not None
