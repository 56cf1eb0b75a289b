"""The input of a replay: a trace of requests, a catalogue, rates."""
