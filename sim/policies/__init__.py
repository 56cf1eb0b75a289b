"""The systems that are compared, one file each. A system serves requests on a fleet of groups; `SYSTEMS` has them by
name. All run on the same engines, memory and cost model, so what differs is what they decide.

    prism            placement by KV pressure, arbitration by slack, elastic KV, hibernation
    static           fixed places, fixed shares of memory
    muxserve         fixed places, elastic KV

`lines` (an engine's own queue) and `fixed` (places planned ahead) are what several of them have in common."""

from __future__ import annotations

from sim.policies import muxserve, prism, static
from sim.system import Build

SYSTEMS: dict[str, Build] = {"prism": prism.build, "static": static.build, "muxserve": muxserve.build}
