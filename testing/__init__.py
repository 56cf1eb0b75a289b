"""Systems, clients and faults that tests and benchmarks share."""
