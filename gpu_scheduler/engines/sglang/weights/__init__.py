"""Weights of one model: their places in the weights range, and the loaders that fill it.

weights_range       places of parameters, layout, manifest, checksum
post_processing     what SGLang makes of quantised layers once they are read, moved into the range
unset               parameters that a checkpoint does not set
loader              SGLang's model loaders for a checkpoint, an image, or random weights
encoder             what SGLang's encoders lack
read_ahead          safetensors files read by several threads
adapter_files       the folder of an adapter (LoRA)
random_weights      weights from a seed, for benchmarks
"""
