"""What operators do to models over HTTP, with an admin's key: what `prismctl` asks of placement."""
