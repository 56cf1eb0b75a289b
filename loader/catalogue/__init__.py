"""The models of a node: the operator's file, what calls added, pinned images, and looking at folders again."""
