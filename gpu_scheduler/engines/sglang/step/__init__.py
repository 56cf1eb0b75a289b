"""Work between two steps of SGLang's event loop: commands, pauses, reclaims and retractions.

loop            the engine's side of SGLang's event loop
commands        commands of the gpu_scheduler to an engine with a model
decode_progress what an engine knows of its decode steps
reclaim         memory that leaves, for other engines or because of a lower limit
retraction      running requests taken out of the batch
current         the model and the loop of this process, for hooks
"""
