"""How engines on the same devices share their compute: pure rules, used by engines, gpu_schedulers and the simulator.

throttle            how fast a model may prefill beside neighbours that decode
tpot_slack          how long the next decode step of an engine can wait
solo_step_time      how long a decode step takes alone
prefill_priority    when decode steps wait for neighbours' prefill steps
decode_arbitration  which engine's decode steps go first
step_gate           whether an engine may launch a step now: the rules above joined
prefill_graphs      which prefill steps run as CUDA graphs
"""
