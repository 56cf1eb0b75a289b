"""The models of a node: the operator's file, models that calls added, pinned images, and repeated looks at folders."""
