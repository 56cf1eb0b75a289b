"""Copies under way: between images and the extents of engines, from lease to lease, of weights and of KV."""
