"""Device and host memory of one model: its lease with balloond, its address ranges, and what CUDA graphs take."""
