"""What a group reports of itself: its state for placement and operators, and the same as metrics for Prometheus."""
