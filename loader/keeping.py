"""The name under which the keeper knows the loader."""

OWNER = "loader"
"""The owner of all descriptors and records that the loader has the keeper hold."""
