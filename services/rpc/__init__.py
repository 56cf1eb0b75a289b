"""gRPC: servers with health and reflection, channels, TLS, the table of errors, addresses, and followed state."""
