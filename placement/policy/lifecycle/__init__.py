"""Which models are up: activation, eviction, reservations for models that wait.

activation      where a model comes up, and which models leave for it
eviction        which idle models leave when memory, host memory or an engine is wanted
preemption      which busy models leave for one that waits
reservations    groups that are reserved for models that wait, and the bound on their waiting
kv_pressure     idle models that leave for others' KV
refusal         models that no group can hold
group_index     what is on which group, kept between decisions
eligibility     what of a group decides whether a model can come up there
decisions       rules, residents and decisions, as values
"""
