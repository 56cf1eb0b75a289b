"""Measurements on GPUs."""
