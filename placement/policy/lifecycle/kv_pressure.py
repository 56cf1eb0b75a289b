"""Idle models make way for KV.

A device lacks KV memory when requests wait for some (`gpu_scheduler/policy/memory/kv_shortage.py`), or when running
ones leave less than a share of it free: the next ones would then stop running decodes. Either condition is enough.
Both are needed: floors of idle models count as free although no other model may use them, so that with the second alone
a model's requests waited for half an hour beside six idle models (24 hours of servegen48, simulated).
The bytes that are lacking come from weights of models that are idle there. They hibernate, no more of them than it
takes, in the order of `evict`: the least wake-up time for each byte freed and each second idle first. No model goes
cold for KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.policy.kvpr import Group
from placement.policy.lifecycle.decisions import LifecycleRules, PlacedModel
from placement.policy.lifecycle.model_eviction import Eviction, evict


def relieve(group: Group, here: Sequence[PlacedModel], rules: LifecycleRules) -> Eviction:
    """The models of the group that leave, and what is still lacking then; none leaves if nothing is lacking."""
    wanted = lacking(group, here, rules)
    if not wanted:
        return Eviction()
    hungry = [r for r in here if r.kv_lacking] or [r for r in here if r.kv_used]
    names = ", ".join(sorted(r.model.name for r in hungry))
    leaving = replace(rules, idle_s=rules.kv_idle_s)
    return evict(here, wanted, leaving, for_whom=f"KV of {names}", go_cold=False)


def lacking(group: Group, here: Sequence[PlacedModel], rules: LifecycleRules) -> dict[str, int]:
    """Device -> bytes of KV that are lacking; devices that lack none are left out."""
    found = {}
    for device in group.devices:
        there = [r for r in here if device.name in r.place.devices]
        free = max(0, device.capacity - sum(r.booked.fixed for r in there))
        used, more = sum(r.kv_used for r in there), sum(r.kv_lacking for r in there)
        short = max(more, used + more - int(free * (1 - rules.headroom)))
        if short > 0:
            found[device.name] = short
    return found
