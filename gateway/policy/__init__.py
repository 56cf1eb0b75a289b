"""Which group gets a request: pure, so that the simulator does the same."""
