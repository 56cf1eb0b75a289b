"""What a gpu_scheduler decides, without I/O or a clock: times are arguments, decisions are values.

group_core          the whole of a group: events in, decisions out; joins all of the following
group_facts         what goes into it, and what it keeps of each model
queue/              the shared queue
    slack           facts about a request, its cost, and the time it has left
    moore_hodgson   the largest set of requests that all meet their deadlines
    backlog         every waiting request; `plan(now)` orders them
    wait_queues     requests with a deadline, those that missed it, best effort (their columns: request_columns)
    ageing          how much prefill time the requests without a deadline in reach get
    models          how fast each model prefills (measured by service_time), and since when it is active
    admission       which of the ordered requests may start now, given memory and prefill limits
    decisions       decisions of the queue's policy, as values
memory/
    holdings        what devices hold, as admission counts it
    forecast        tokens that a model's next request will generate
    demand          each model's share of demand, by which the balloon policy compares models
    kv_shortage     models whose waiting requests lack KV memory
    request_limit   which of these shortages become requests to balloond, and when
    migrated_prefixes   KV that came with a model that moved
throttle/
    interference    share of a model's decode steps that is lost beside a neighbour's prefills
    throttling      which models prefill more slowly to keep their neighbours' TPOT targets
adapter_room        names of adapters (LoRA) in engines, and what an engine has room for
hang_detector       when a silent engine is pinged, and when it is given up

core.arrived(request, now)                      # and the other events
for decision in core.plan(now, memory):
    match decision: ...                         # Start, Drop, Expire, NeedMemory, RequestMemory, SetThrottle
wake the dispatcher at core.next_plan_at()
"""
