"""A simulator: the services' own policy code on a virtual clock.

    python -m sim --trace FILE --catalogue FILE --gpus N --policy prism

A trace's requests go through placement's, the gpu_scheduler's and balloond's policies, exactly the functions that the
services call, onto engines that are a cost model (`cost.py`, fitted to measured H200 figures by `fit.py`).

    clock, processor     virtual time; compute that engines share
    cost, engine         what steps cost; continuous batching with chunked prefill
    memory, node         a group's ledger, by balloond's policy; residencies
    arbiter, fleet       the shared queue of a group; placement: the services' glue, without their I/O
    standings            what placement knows of the groups, kept between its decisions
    policies/            the systems that are compared, one file each
    trace, catalogue, replay, report    in and out; `python -m sim.synthetic` draws a fleet of any size

Modelled: arrivals, arbitration, the prefill turn and pauses, batching, KV by extents, ballooning with limits and
reclaims, residencies and what they take, eviction, migration, time slices between engines.

Checked against H200s by `python -m sim.fit --results benchmarks/results --keep`: of 18 figures that nothing was fitted
to half are met within a seventh, the worst within a third: a decode step beside a neighbour's prefill (31 % too fast),
first tokens of lone requests (6 ms too late, as the path through the gateway is fitted to a busy one), one engine under
256 endless requests of equal length (TTFT 23 % more than was measured, TPOT 14 % less), two at 28 to 32 requests/s
(TTFT 18 % more), a wake-up while other GPUs of the host are busy (15 % too fast). Fitted with models of 1B and 8B only.

24 hours of 306,520 requests for 48 models on eight GPUs took 687 s of a core that other work shared, which is more than
was hoped for. Three quarters of that went into the last ten hours, in which at times hundreds of requests wait on one
group and are planned anew at every event. Placement decides once each `period_s`: `--set period_s=5` makes a run
shorter, and another one.

Not modelled: prefixes that are found again (every prompt is computed whole); KV that moves along with a migration (the
source finishes what it runs); weights over several links or from another GPU, and copies that share a link; models
that have no image in host memory yet; host memory, warm engines and processes that run out; the time that policies
themselves take, and messages between processes but for one constant; faults.
"""
