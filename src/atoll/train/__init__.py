"""Training: one loop for expert, router, monolith and student, from shards to a network with its manifest.

    spec = resolve_job(run, config, "expert", expert=3)    # plain values, checked before anything is built
    train_job(spec)                                        # build_task, train, commit

Read `spec`, `job`, `tasks` and `loop`, in this order; then `distill`, `checkpoints` and `estimate`.
"""

from atoll.train.job import build_task, train_job
from atoll.train.loop import REQUEUE, Requeue
from atoll.train.spec import TrainSpec, resolve_job

__all__ = ["REQUEUE", "Requeue", "TrainSpec", "build_task", "resolve_job", "train_job"]
