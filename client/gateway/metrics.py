"""What the gateway counts, in Prometheus' text format. Beside these, the process' own CPU time and memory."""

from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# A song waits for its turn, then for its first window: from a fraction of a second to many minutes.
_SECONDS: Final = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """One gateway's figures. Outcomes of a song: done, refused, unavailable, failed, time_limit, client_gone,
    slow_reader, stopped (the gateway was)."""

    def __init__(self) -> None:
        disable_created_metrics()  # one more series for each, which no dashboard here asks for
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        made = {"registry": self.registry, "namespace": "music3_gateway"}
        self.requests = Counter("requests", "answers by route and status", ["route", "status"], **made)
        self.songs = Counter("songs", "songs by outcome and delivery", ["outcome", "delivery"], **made)
        self.live = Gauge("live_songs", "songs on their way through this gateway, waiting ones too", **made)
        self.first_audio = Histogram(
            "first_audio_seconds", "request to first sound, at this gateway", buckets=_SECONDS, **made
        )
        self.audio = Counter("audio_seconds", "sound that came from the model", **made)
        self.sent = Counter("sent_bytes", "bytes of songs handed to connections", **made)
        self.buffered = Gauge("buffered_bytes", "encoded sound that waits for its readers", **made)

    def page(self) -> bytes:
        """The page at /metrics."""
        return generate_latest(self.registry)
