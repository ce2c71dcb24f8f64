"""Budgets of `atoll prepare` on an accelerator: the pass waits once for each batch, while the next one is queued."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import nullgpu
from atoll.core import config as configuration
from atoll.core.device import Download, device
from atoll.data import one_pass
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import open_preparation, stages_of

pytestmark = pytest.mark.slow
CHUNKS = 2
"""Of 31 images each."""


def test_the_pass_waits_once_for_each_batch(
    photographs_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With five sizes, flips, features, latents and patch features."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(photographs_run / "atoll.yaml", run)
    # The components of the patch features are fitted to values, and the null GPU computes none.
    (run / "data/patches").mkdir(parents=True)
    shutil.copy(photographs_run / "data/patches/projection.safetensors", run / "data/patches")
    seen: list[nullgpu.Seen] = []
    batches: list[str] = []
    queued_later: list[int] = []

    class WatchedBatches(one_pass._Batches):
        def _encode(self, key):
            # From the first batch on: networks are loaded and tried before.
            if not batches:
                seen.append(stack.enter_context(nullgpu.watch()))
            batches.append(key[0])
            super()._encode(key)

    class WatchedDownload(Download):
        def __init__(self, *tensors):
            assert {tensor.device for tensor in tensors} == {device()}
            super().__init__(*tensors)
            self.launches = nullgpu.counts()["launch"]

        def wait(self):
            queued_later.append(nullgpu.counts()["launch"] - self.launches)
            return super().wait()

    monkeypatch.setattr(one_pass, "_Batches", WatchedBatches)
    monkeypatch.setattr(one_pass, "Download", WatchedDownload)
    preparation = open_preparation(run, configuration.load(run))
    with ExitStack() as stack:
        one_pass.run_pass(preparation, [stage for stage in stages_of(preparation) if stage.in_pass], WorkerShare())
    assert set(batches) == {"features", "latents", "patches"}
    assert len(batches) > 40
    assert sum(seen[0].synchronizations.values()) == len(batches), seen[0].synchronizations
    assert len(seen[0].synchronizations) == 1, "the wait for the results of a batch"
    assert seen[0].pageable_copies == {}
    # Images are copied once for each batch, and once more if their mirror images are encoded.
    assert seen[0].counts["h2d_pinned"] == len(batches) + batches.count("latents") + batches.count("patches")
    # The copy of a result is queued ahead of the next batch. The last one of a chunk may be waited for earlier.
    assert len(queued_later) == len(batches)
    assert sum(launches > 10 for launches in queued_later) >= len(batches) - CHUNKS
