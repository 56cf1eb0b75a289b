"""The keeper: a small process that holds descriptors of extents and images while balloond or the loader restarts."""
