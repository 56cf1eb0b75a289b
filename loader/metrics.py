"""Metrics of the loader."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.telemetry.metrics import SLOW_BUCKETS_S

COPIED = Counter("prism_image_copied_bytes", "Bytes copied between images and extents", ["direction"])
SECONDS = Histogram(
    "prism_copy_seconds", "What a copy of a model's weights took", ["direction"], buckets=SLOW_BUCKETS_S
)
HELD = Gauge("prism_image_held_bytes", "Host memory that images take, those under way included")
CAPACITY = Gauge("prism_image_capacity_bytes", "Most host memory that images may take")
CONTEXT = Gauge("prism_loader_context_bytes", "Memory of a GPU that the loader takes for itself", ["device"])
MODELS = Gauge("prism_catalogue_models", "Models in the catalogue", ["state"])
DISK_HELD = Gauge("prism_image_disk_bytes", "Disk that images take")
DISK_MOVED = Counter("prism_image_disk_moved_bytes", "Bytes of images written to and read from disk", ["direction"])
