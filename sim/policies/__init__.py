"""The systems that are compared, one file each. A system serves requests on a fleet of groups; `SYSTEMS` has them by
name. All run on the same engines, memory and cost model, so what differs is what they decide.

    prism            placement by KV pressure, arbitration by slack, elastic KV, hibernation
    least_slack      what the authors' public code does instead: least slack first, memory per request
    muxserve         fixed places, elastic KV
    static           fixed places, fixed shares of memory
    qlm              whole models swapped by the deadlines of groups of requests
    serverlessllm    whole models swapped when they are idle

`lines` (an engine's own queue), `fixed` (places planned ahead) and `owned` (a group that one model has for itself) are
what several of them have in common."""

from __future__ import annotations

from sim.policies import least_slack, muxserve, prism, qlm, serverlessllm, static
from sim.system import Build

SYSTEMS: dict[str, Build] = {
    "prism": prism.build,
    "least_slack": least_slack.build,
    "muxserve": muxserve.build,
    "static": static.build,
    "qlm": qlm.build,
    "serverlessllm": serverlessllm.build,
}
