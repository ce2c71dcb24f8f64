"""Training: one loop for expert, router, monolith and student."""

from atoll.train.job import build_task, train_job
from atoll.train.loop import REQUEUE, Requeue
from atoll.train.spec import TrainSpec, resolve_job

__all__ = ["REQUEUE", "Requeue", "TrainSpec", "build_task", "resolve_job", "train_job"]
