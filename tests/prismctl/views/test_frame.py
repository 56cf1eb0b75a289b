"""Frames of `top` and `status`, from values as `Looking` gives them."""

from math import inf

import pytest

from prismctl.views.frame import bar, status, top

MIB = 1 << 20


def owner(model, **keys):
    known = dict.fromkeys(
        ("weights_bytes", "kv_bytes", "kv_used_bytes", "kv_cached_bytes", "kv_reserve_bytes", "private_bytes"), 0
    )
    return {"model": model, "limit_bytes": 32 * MIB} | known | keys


def device(name, *owners, capacity=32 * MIB, stranded=0, untold=0):
    leased = sum(each["weights_bytes"] + each["kv_bytes"] for each in owners) + untold
    private = sum(each["private_bytes"] for each in owners)
    return {
        "device": name,
        "capacity_bytes": capacity,
        "leased_bytes": leased,
        "private_bytes": private,
        "stranded_bytes": stranded,
        "free_bytes": capacity - leased - private - stranded,
        "owners": list(owners),
    }


def model(name, state="active", **keys):
    known = dict.fromkeys(("waiting", "late", "running", "weights_bytes", "kv_held_bytes"), 0)
    known |= {"kv_limit_bytes": -1, "idle_s": 3.0, "tokens_per_s": 12.0, "demand": 0.5}
    return {"model": name, "state": state} | known | keys


def group(name, devices, models, **keys):
    known = {
        "answers": True,
        "drained": False,
        "error": "",
        "engines_error": "",
        "pressure": 0.25,
        "address": f"unix:/{name}",
    }
    sums = {key: sum(each[key] for each in devices) for key in ("capacity_bytes", "free_bytes")}
    return {"group": name, "devices": devices, "models": models} | known | sums | keys


BUSY = owner(
    "meta-llama/Llama-3.1-8B-Instruct",
    weights_bytes=16 * MIB,
    kv_bytes=8 * MIB,
    kv_used_bytes=4 * MIB,
    kv_cached_bytes=2 * MIB,
    kv_reserve_bytes=2 * MIB,
    private_bytes=4 * MIB,
)


def seen(**keys):
    there = group("cpu:0", [device("cpu:0", BUSY)], [model(BUSY["model"], waiting=2, running=1)])
    catalogue = [
        {"model": BUSY["model"], "state": "active", "error": "", "base": ""},
        {"model": "away", "state": "cold", "error": "", "base": ""},
        {"model": "tuned", "state": "cold", "error": "", "base": "away"},
        {
            "model": "bad",
            "base": "",
            "state": "error",
            "error": "the weights lack lm_head.weight",
            "retry_s": 0.0,
            "path": "/m/bad",
        },
    ]
    return {
        "hint": None,
        "services": [{"service": "placement", "address": "unix:/p", "answers": True, "problem": None}],
        "groups": [there],
        "models": catalogue,
        "images": {"capacity_bytes": 256 * MIB, "used_bytes": 7 * MIB},
    } | keys


@pytest.mark.parametrize("frame", [top, status])
@pytest.mark.parametrize("width", [80, 200])
def test_frame_fits_the_width_of_the_terminal_and_shows_the_whole_system(frame, width):
    text = frame(seen(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "meta-llama/Llama-3.1-8B-Instruct  active" in text and "cpu:0: " in text and ", pressure 0.250" in text
    assert "on no group: away (cold)\n" in text and "adapters of away: tuned" in text
    assert "error: bad: the weights lack lm_head.weight" in text


def test_frame_of_a_wide_terminal_has_bytes_by_owner_and_the_queues():
    lines = top(seen(), 200).splitlines()
    assert lines[0] == (
        "1 group; 4 models (2 cold, 1 active, 1 error); 2 waiting; 1 running; 12 tokens/s; images 7.0 MiB of 256.0 MiB"
    )
    assert "cpu:0: 28.0 MiB of 32.0 MiB, 4.0 MiB free, pressure 0.250" in lines
    (row,) = (line for line in lines if "Llama" in line)
    assert row.split()[2:] == ("28.0 MiB 16.0 MiB 4.0 MiB 2.0 MiB 2.0 MiB 4.0 MiB 32.0 MiB 2 0 1 12 3 s".split())


def test_status_has_demand_in_units_and_no_power_of_ten():
    busy = model("m", tokens_per_s=1.0, demand=3.25e6)
    text = status(seen(groups=[group("g", [device("d", BUSY)], [busy], pressure=inf)]), 200)
    assert "3.1 MiB/s²" in text and ", pressure infinite" in text and "e+" not in text


def test_bar_is_in_proportion_and_shows_small_owners():
    assert bar(device("d", BUSY), 32) == "W" * 16 + "KKKKccrrpppp...."
    assert bar(device("d", owner("m", weights_bytes=1)), 10) == "W" + "." * 9
    assert bar(device("d", stranded=8 * MIB), 8) == "xx......"
    assert bar(device("d", untold=16 * MIB), 8) == "rrrr...."


@pytest.mark.parametrize("frame", [top, status])
def test_frame_names_services_that_do_not_answer_and_shows_the_rest(frame):
    services = [{"service": "loader", "address": "unix:/l", "answers": False, "problem": "its process 5 is stopped"}]
    there = group("g", [], [model("m", late=None, tokens_per_s=None, demand=None)], answers=False, pressure=None)
    text = frame(seen(services=services, groups=[there], models=None, images=None), 80)
    assert "does not answer: loader (unix:/l): its process 5 is stopped" in text and "g (away)" in text


@pytest.mark.parametrize("frame", [top, status])
def test_frame_without_a_system_begins_with_where_it_was_looked_for(frame):
    services = [{"service": "placement", "address": "unix:/p", "answers": False, "problem": "there is no such socket"}]
    text = frame(seen(hint="no system in /x", services=services, groups=[], models=None, images=None), 80)
    assert "no system in /x\ndoes not answer: placement" in text


def test_status_frame_names_all_services_that_answer():
    services = [{"service": name, "address": "", "answers": True, "problem": None} for name in ("placement", "g0")]
    assert status(seen(services=services), 80).startswith("all 2 services answer: placement, g0\n")
    assert status(seen(), 80).startswith("1 service answers: placement\n")


def test_frame_of_a_group_says_that_it_is_drained_and_has_errors_of_balloond_and_engines():
    there = group("g", [device("d")], [], drained=True, error="balloond is away", engines_error="engine 5 died")
    text = top(seen(groups=[there]), 80)
    assert "g (drained): 0 B of 32.0 MiB, 32.0 MiB free" in text and "g says: balloond is away" in text
    assert "g says: no engine is warm: engine 5 died" in text


def test_frame_of_a_group_of_devices_has_owners_on_each_and_queues_on_the_first():
    part = owner("m", weights_bytes=8 * MIB)
    there = group("a+b", [device("a", part), device("b", part)], [model("m", running=7), model("n", "waking")])
    lines = top(seen(groups=[there]), 200).splitlines()
    rows = [line.split() for line in lines if line.startswith("  m ") or line.startswith("  n ")]
    assert [(row[0], row[1], "7" in row) for row in rows] == [
        ("m", "active", True),
        ("n", "waking", False),
        ("m", "active", False),
    ]
    assert "a+b, pressure 0.250" in lines


def test_frame_shows_memory_of_a_model_that_left_the_group_as_leaving():
    there = group("g", [device("d", owner("gone", weights_bytes=MIB))], [])
    (row,) = (line for line in top(seen(groups=[there]), 80).splitlines() if "gone" in line)
    assert row.split()[:2] == ["gone", "leaving"]
