"""One model in an engine: built, proven, measured, put to sleep and woken; its requests and their outputs.

loaded_model    the model from Load to Unload: its memory, parts and requests
lifecycle       what happens to it: built, proven, put to sleep, woken, taken apart
adapters        the model's adapters (LoRA), over SGLang's own manager
probe           the engine's own requests that prove and measure it
quota           device memory of the process beside its leases
teardown        what SGLang must not keep for the next model
requests        messages to SGLang's requests
outputs         SGLang's outputs to messages
stats           counters and statistics for the gpu_scheduler
"""
