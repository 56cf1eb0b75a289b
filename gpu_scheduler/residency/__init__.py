"""Which models are on a group, in what state, and how that changes: activation, hibernation, handover, shutdown."""
