"""Real engines without a scheduler."""
