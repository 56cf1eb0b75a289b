"""What a group tells of itself: its state for placement, metrics for Prometheus, spans."""
