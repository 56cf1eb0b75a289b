"""The services of a system: where they are, whether they answer, how they are configured."""
