"""Why a model is where it is, in sentences made of what is known of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prismctl.views.wording import fault
from services.wording.plurals import agreeing
from services.wording.sizes import size

_BROUGHT = {
    "active": ("activate", "migrate", "replicate"),
    "waking": ("activate", "migrate", "replicate"),
    "hibernating": ("hibernate",),
    "draining": ("hibernate", "go cold", "migrate", "remove"),
    "cold": ("go cold", "migrate"),
    "on disk": ("go cold", "migrate"),
    "error": ("refuse", "activate"),
}
"""Residency -> actions of the decisions that lead to it."""
_MEANS = {
    "hibernating": "its engine waits, its weights are in host memory",
    "cold": "its weights are in host memory, it has no engine",
    "on disk": "neither its weights nor an engine are in memory",
}


def account(known: Mapping[str, Any]) -> list[str]:
    """What `explain` knows of a model, as sentences: where it is, why, what waits, what a request would meet, and which
    processes do not answer without which no model comes up or leaves."""
    return [*_where(known), *_why(known), *_waiting(known), *_prospect(known), *known["silent"]]


def _where(known: Mapping[str, Any]) -> Iterator[str]:
    model, state = known["model"], known["state"]
    if base := known["base"]:
        yield f"{model} is an adapter of {base}, and is where that is"
    if known["error"]:
        yield f"{model} cannot be served: {fault(known)}"
    elif not known["places"]:
        means = f": {_MEANS[state]}" if state in _MEANS else ""
        yield f"{base or model} is on no group, {state}{means}"
    for place in known["places"]:
        if not place["answers"]:
            yield f"{base or model} was last seen on {place['group']}, which does not answer"
            if place["problem"]:
                yield place["problem"]
            continue
        yield f"{base or model} is {place['state']} on {place['group']}" + "".join(
            f"; {each}" for each in _facts(place)
        )
    yield from _without_image(known)


def _without_image(known: Mapping[str, Any]) -> Iterator[str]:
    whys = [place["no_image"] for place in known["places"] if place["answers"]]
    if why := known["no_image"] or next(filter(None, whys), ""):
        yield f"it has no image: {why}; asleep it would keep neither its engine nor its weights"


def _facts(place: Mapping[str, Any]) -> Iterator[str]:
    state = place["state"]
    if state == "active":
        came = f" in {place['came_s']:.2f} s" if place["came_s"] else ""
        sources = " and ".join(dict.fromkeys(place["weights_from"]))
        yield f"it came up{came} {place['active_s']:.0f} s ago" + (f", weights from {sources}" if sources else "")
        yield f"it holds {size(place['weights_bytes'])} of weights and {size(place['kv_held_bytes'])} of KV"
        if not place["waiting"] and not place["running"]:
            yield f"it has been idle for {place['idle_s']:.0f} s"
    elif state in _MEANS:
        yield _MEANS[state] + (f", waking took {place['wake_s']:.2f} s" if place["wake_s"] else "")
    if place["compiling"]:
        what = f"compiling kernels, {place['kernels_compiled']} so far"
        yield f"{what if place['kernels_compiled'] else 'waiting for the first engine'}: once for this machine"
    if place["reason"] and state != "error":  # the error was said first
        yield str(place["reason"])


def _why(known: Mapping[str, Any]) -> Iterator[str]:
    actions = _BROUGHT.get(known["state"], ())
    brought = [each for each in known["decisions"] if each["action"] in actions]
    here = [place["group"] for place in known["places"] if place["answers"] and place["state"] == known["state"]]
    if len(here) > 1:  # each of the groups has a reason of its own
        newest_of = (next((each for each in brought if each["group"] == group), None) for group in here)
        told = [each for each in newest_of if each is not None]
    else:
        told = brought[:1]
    if known["kept"] and len(here) > 1:
        yield "an operator asked for it on several groups (replicate): it leaves none as not needed"
    for each in told:
        on = f" on {each['group']}" if each["group"] else ""
        yield f"why: {each['action']}{on} {each['age_s']:.0f} s ago, {each['outcome']}: {each['reason']}"
    if not told:
        return
    found, newest = max(told, key=lambda each: -each["age_s"]), known["decisions"][0]
    if newest is not found and newest["action"] == "refuse":
        yield f"since then: refused {newest['age_s']:.0f} s ago: {newest['reason']}"


def _waiting(known: Mapping[str, Any]) -> Iterator[str]:
    kinds = Counter(_kind(each["place"]) for each in known["requests"])
    if kinds:
        yield "requests: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    waiting = [each for each in known["requests"] if not each["place"].startswith("running")]
    if waiting:
        longest = max(each["waiting_s"] for each in waiting)
        yield f"{len(waiting)} of them {agreeing(len(waiting), 'waits', 'wait')}, the longest for {longest:.1f} s"
    for place in known["places"]:
        if place["answers"] and place["kv_lacking_bytes"]:
            yield f"on {place['group']} they lack {size(place['kv_lacking_bytes'])} of KV memory"


def _prospect(known: Mapping[str, Any]) -> Iterator[str]:
    prospect = known["prospect"]
    if prospect is None:
        return
    if prospect["waiting_s"]:
        yield f"a model has been waiting for memory for {prospect['waiting_s']:.1f} s"
    if prospect["group"] is None:
        yield f"a request now would wait: {prospect['reason']}"
        return
    yield f"a request now would bring it up on {prospect['group']}: {prospect['reason']}"
    for each in prospect["leaving"]:
        yield f"for that {each['model']} would become {each['to']}: {each['reason']}"


def _kind(place: str) -> str:
    """The kind in "on time 3, model waking"; its number in the plan is left out."""
    of, _, waking = place.partition(", ")
    return of.rstrip(" 0123456789") + (" (the model wakes)" if waking else "")
