"""Sampling: the next token of each request, by its own seed.

sampling, sampling_kernel   the draw, on a CPU by sorting and on a GPU as one kernel
limits                      top-k, top-p and min-p of a batch
murmur                      the hash that the noise is made of
penalties                   tokens that SGLang's penalizers did not see
"""
