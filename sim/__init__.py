"""A simulator: the services' own policy code on a virtual clock.

    python -m sim --trace FILE --catalogue FILE --gpus N --policy prism

A trace's requests go through placement's, the gpu_scheduler's and balloond's policies, which are exactly the functions
that the services call, onto engines that are a cost model (`cost.py`, fitted to measured H200 figures by `fit.py`).
What joins the policies of a group is the gpu_scheduler's, too (`gpu_scheduler/policy/group_core.py`); what joins those
of placement is written again here, without I/O.

    clock               virtual time
    engines/            what steps cost (cost), continuous batching with chunked prefill, compute that engines share,
                        and whose decode steps wait for whose (decode_order)
    group/              a group's ledger, by balloond's policy; residencies (node); its shared queue (arbiter)
    cluster/            placement on a fleet, and what it knows of the groups
    policies/           the systems that are compared, one file each
    inputs/             traces, catalogues, rates; `python -m sim.synthetic` draws a fleet of any size
    replay, report      one run, and its figures
    trace_analysis      how the models of a trace share their time, without a replay (`prismctl trace`)

The model has arrivals, arbitration, the prefill turn and pauses, batching, KV by extents, ballooning with limits and
reclaims, residencies and their durations, eviction, migration, time slices between engines, and the host's part of
prefill and decode steps.

`python -m sim.fit --results benchmarks/results --keep` checks it against H200s. Of 50 figures that were not used for
fitting half are met within 3 %, the worst within 42 %. The larger errors are: two engines on a GPU (TTFT a fifth too
short, two fifths where both get all the load that they can take), one engine under 256 endless requests of equal length
(TTFT 14 % more than was measured, TPOT 6 % less), what an engine measures of its own prefill (17 % more), and a wake-up
while other GPUs of the host are busy (15 % too fast). Decode steps of 1 to 192 requests with nothing beside them are
met within 6 % (8B, 3B), the share of a GPU that three engines use which decode at once within 8 %. Only models of 1B,
3B and 8B were used for fitting. Whole systems, and two models that share a GPU: `benchmarks/sim_check.py`,
docs/lab/gpu-runs.md.

An H100 (`cost.py`) differs by its memory alone. Of nine runs of whole systems on two H100s, four of one session are
within 5 points of requests on time; five of another session, beside two more GPUs at work, are 2 to 13 points below
what the simulator says. Its bias by system, signed, and what is known of the causes: `benchmarks/sim_bias.py`,
docs/design/simulator.md. It is about two points for systems with fixed places, and five too many for Prism.

A replay of 24 hours with 306,520 requests for 48 models of 8B (TTFT 1 s, TPOT 50 ms) on eight GPUs took 121 to 287 s of
a core, on shared hosts whose speed varies by two. With models of 32B, 14B and 8B, which overload the GPUs at times so
that thousands of requests wait on one group, it took 517 s beside other work, before plans were computed in arrays.

The model leaves out: prefixes that are found again (every prompt is computed whole), and so whose prefixes go first; KV
that moves along with a migration (the source finishes what it runs); weights over several links or from another GPU,
and copies that share a link; models that have no image in host memory yet; host memory, warm engines and processes that
run out; the time that policies themselves take, and messages between processes but for one constant; what an engine
that captures its graphs takes from its neighbours; faults.
"""
