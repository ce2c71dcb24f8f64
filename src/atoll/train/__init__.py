"""Training on an island: one loop for expert, router, monolith and student."""

from atoll.train.job import Job, run_job
from atoll.train.loop import REQUEUE, Requeue

__all__ = ["REQUEUE", "Job", "Requeue", "run_job"]
