"""Checkpoint folders: the memory that their models need, and why a folder cannot be served.

checkpoint              a folder as a whole: the needs of its model, or why it cannot be served
architectures           the model classes that engines serve, and readers of their config.json
weight_files            the safetensors files of a folder, by their headers
adapter_folder          the folder of a LoRA adapter
embedding, reranking    whether a model embeds texts, or ranks them
generation_defaults     how tokens are sampled where a request does not say
text_trials             trials of tokenizers and chat templates, in a process of their own
config_values, errors   values of JSON files, checked; errors
"""
