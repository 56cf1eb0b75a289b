"""Prism: placement by KV pressure, arbitration by slack, elastic KV, hibernation; all of it the services' own policy.

Settings: those of `placement/config.py` (tau, idle_s, ...; places as JSON) and of `gpu_scheduler/config.py`'s
Arbitration (chunk_tokens, prefill_turn, ...), with the services' defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from gpu_scheduler.config import Arbitration, Experiments
from placement.config import PlacementConfig
from services.runtime.config import Config, faults
from sim.cluster.fleet import Fleet
from sim.inputs.request import SimulatedRequest
from sim.system import SettingError, World


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> Fleet:
    known = (
        set(PlacementConfig.model_fields) - set(Config.model_fields) - {"groups", "loaders", "balloond", "traffic_file"}
    )
    of_arbitration = Arbitration.model_fields.keys() - {"experiments"} | Experiments.model_fields.keys()
    arbitration = {name: text for name, text in settings.items() if name in of_arbitration}
    placement: dict[str, Any] = {name: text for name, text in settings.items() if name in known}
    if unknown := set(settings) - set(arbitration) - set(placement):
        names = ", ".join(sorted(known | of_arbitration))
        raise SettingError(f"prism has no setting {', '.join(sorted(unknown))}; it has {names}")
    if "places" in placement:
        try:
            placement["places"] = json.loads(placement["places"])
        except ValueError as error:
            raise SettingError(f"prism: places has to be JSON, model to group: {error}") from None
    try:
        config = PlacementConfig.model_validate(
            {"name": "sim", "listen": "unix:sim", "groups": [], "loaders": ["unix:none"], **placement}, strict=False
        )
        rules = Arbitration.model_validate(arbitration, strict=False)
    except ValidationError as error:
        raise SettingError("; ".join(f"{fault.key}: {fault.what}" for fault in faults(error))) from None
    return Fleet(world, config, rules, finished)
