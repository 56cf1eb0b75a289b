"""What a group tells of itself: its state for placement and operators, and that as metrics for Prometheus."""
