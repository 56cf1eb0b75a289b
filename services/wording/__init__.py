"""Text for people: counts, paths, places in files, and values that are wrong."""
