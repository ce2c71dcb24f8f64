"""Prometheus metrics of the server."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Histogram buckets in seconds: 1, 2.5 and 5 in each decade. A step takes milliseconds for a small network on a GPU and
# seconds for a large batch on a CPU; a request takes tens of steps and may wait for others.
STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class ServerMetrics:
    """Metrics of one server. The client library appends `_total` to the names of counters."""

    def __init__(self) -> None:
        # A registry of its own: with the global one, two servers in one process (as in tests) would share counters.
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("atoll_requests", "Ended requests for images by outcome", ["outcome"])
        self.images = counter("atoll_images", "Finished images by model", ["model"])
        self.expert_images = counter(
            "atoll_expert_images", "Finished images, attributed to experts by mean routing weight", ["expert"]
        )
        self.in_progress = gauge("atoll_requests_in_progress", "Requests that are running or queued")
        self.queued = gauge("atoll_requests_queued", "Requests that have not started")
        self.batch_size = gauge("atoll_batch_size", "Images in the last denoising step")
        self.steps = counter("atoll_denoising_steps", "Denoising steps, summed over images")
        self.step_seconds = histogram(
            "atoll_step_duration_seconds", "Duration of one denoising step of the batch", buckets=STEP_BUCKETS
        )
        self.request_seconds = histogram(
            "atoll_request_duration_seconds", "Time from a request to its last image", buckets=REQUEST_BUCKETS
        )

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
