"""What a group counts as it happens, and the spans of its requests and activations."""
