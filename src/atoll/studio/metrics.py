"""Figures for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_STEP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LATENCY = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "atoll_requests", "Requests for pictures, by how they ended", ["outcome"], registry=self.registry
        )
        self.images = Counter("atoll_images", "Pictures that were finished", ["model"], registry=self.registry)
        self.experts = Counter(
            "atoll_expert_images", "Pictures by expert, each shared among them by weight", ["expert"],
            registry=self.registry,
        )  # fmt: skip
        self.open = Gauge("atoll_requests_open", "Requests that wait or are worked on", registry=self.registry)
        self.waiting = Gauge("atoll_requests_waiting", "Requests that have not begun", registry=self.registry)
        self.batch = Gauge("atoll_samples_in_flight", "Samples in the last step", registry=self.registry)
        self.steps = Counter("atoll_sample_steps", "Steps, counted for every sample", registry=self.registry)
        self.step_seconds = Histogram(
            "atoll_step_seconds", "Time of one step of all samples in flight", buckets=_STEP, registry=self.registry
        )
        self.seconds = Histogram(
            "atoll_request_seconds", "Time from request to last picture", buckets=_LATENCY, registry=self.registry
        )

    def text(self) -> bytes:
        """As Prometheus reads them."""
        return generate_latest(self.registry)
