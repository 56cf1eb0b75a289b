"""Logs as JSON lines, metrics for Prometheus, traces by OpenTelemetry."""
