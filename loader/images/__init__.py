"""Images of weights: in host memory, of which the keeper holds each, and on local disk."""
