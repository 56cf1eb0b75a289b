"""What a replay begins with: a trace of requests, a catalogue, rates."""
