"""The processes of one engine, one for each of its devices, and the socket to the gpu_scheduler."""
