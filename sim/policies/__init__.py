"""The systems that are compared, one file each. A system serves requests on a fleet of groups; `SYSTEMS` has them by
name. All run on the same engines, memory and cost model, so what differs is what they decide."""

from __future__ import annotations

from sim.policies import prism, static
from sim.system import Build

SYSTEMS: dict[str, Build] = {"prism": prism.build, "static": static.build}
