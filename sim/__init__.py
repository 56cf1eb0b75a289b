"""A simulator: the services' own policy code on a virtual clock.

    python -m sim --trace FILE --catalogue FILE --gpus N --policy prism

A trace's requests go through placement's, the gpu_scheduler's and balloond's policies, exactly the functions that the
services call (what joins them is written again here, without I/O), onto engines that are a cost model (`cost.py`,
fitted to measured H200 figures by `fit.py`).

    clock               virtual time
    engines/            what steps cost (cost), continuous batching with chunked prefill, compute that engines share,
                        and whose decode steps wait for whose (decode_order)
    group/              a group's ledger, by balloond's policy; residencies (node); its shared queue (arbiter)
    cluster/            placement on a fleet, and what it knows of the groups
    policies/           the systems that are compared, one file each
    inputs/             traces, catalogues, rates; `python -m sim.synthetic` draws a fleet of any size
    replay, report      one run, and what it came to

Modelled: arrivals, arbitration, the prefill turn and pauses, batching, KV by extents, ballooning with limits and
reclaims, residencies and what they take, eviction, migration, time slices between engines, and the host's part of
prefill and decode steps.

Checked against H200s by `python -m sim.fit --results benchmarks/results --keep`: of 50 figures that nothing was fitted
to half are met within 3 %, the worst within 42 %: two engines on a GPU (TTFT a fifth too short, two fifths where both
are given all that they can take), one under 256 endless requests of equal length (TTFT 14 % more than was measured;
TPOT 6 % less), what an engine measures of its own prefill (17 % more), a wake-up while other GPUs of the host are busy
(15 % too fast). Decode steps of 1 to 192 requests and nothing else are met within 6 % (8B, 3B), what three engines that
decode at once make of a GPU within 8 %. Fitted with models of 1B, 3B and 8B only. Whole systems, and two models that
share a GPU: `benchmarks/sim_check.py`, docs/lab/gpu-runs.md.

An H100 (`cost.py`) differs by its memory alone. Of nine runs of whole systems on two of them, four of one sitting are
within 5 points of requests on time, five of another, beside two more GPUs at work, 2 to 13 below what it says. Of
twenty-seven runs on H200s it is 4.3 points off in the mean, 14.8 at worst, on a host that others were using; 3.2 with
those of quicker hosts in their place. It is too good for Prism under heavy load.

24 hours of 306,520 requests for 48 models of 8B (TTFT 1 s, TPOT 50 ms) on eight GPUs took 121 to 287 s of a core, on
shared hosts whose speed varies by two. With models of 32B, 14B and 8B, which overload them at times so that thousands
of requests wait on one group, it took 517 s beside other work, before plans were computed in arrays.

Not modelled: prefixes that are found again (every prompt is computed whole), and so whose prefixes go first; KV that
moves along with a migration (the source finishes what it runs); weights over several links or from another GPU, and
copies that share a link; models that have no image in host memory yet; host memory, warm engines and processes that run
out; the time that policies themselves take, and messages between processes but for one constant; what an engine that
captures its graphs takes of its neighbours; faults.
"""
