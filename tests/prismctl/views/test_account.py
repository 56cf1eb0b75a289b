"""What `explain` says of a model, from what is known of it."""

from prismctl.views.account import account


def place(state="active", **keys):
    known = {"group": "g0", "answers": True, "state": state, "reason": "", "waiting": 0, "running": 0, "idle_s": 3.0}
    known |= {"active_s": 9.0, "came_s": 0.5, "wake_s": 0.25, "weights_from": ["image"], "kv_lacking_bytes": 0}
    known |= {"no_image": "", "compiling": False, "kernels_compiled": 0}
    return known | {"weights_bytes": 2 << 20, "kv_held_bytes": 1 << 20} | keys


def decision(action, reason, age_s=9.0, group="g0", outcome="done in 0.50 s"):
    return {"action": action, "reason": reason, "age_s": age_s, "group": group, "outcome": outcome}


def told(state, places=(), **keys):
    known = {"model": "m", "state": state, "error": None, "places": places, "requests": [], "prospect": None}
    known |= {"retry_s": 0.0, "path": "", "base": "", "no_image": "", "decisions": [], "silent": []}
    known |= {"kept": False}
    return account(known | keys)


def test_account_of_an_adapter_is_that_of_its_base():
    first, second = told("active", [place()], base="b")
    assert first == "m is an adapter of b, and is where that is" and second.startswith("b is active on g0; it came up")


def test_account_of_an_active_model_has_its_source_and_the_decision():
    decisions = [decision("stay", "nothing better"), decision("activate", "pressure 0.1 on g0, the least of 2 groups")]
    assert told("active", [place()], decisions=decisions) == [
        "m is active on g0; it came up in 0.50 s 9 s ago, weights from image; "
        "it holds 2.0 MiB of weights and 1.0 MiB of KV; it has been idle for 3 s",
        "why: activate on g0 9 s ago, done in 0.50 s: pressure 0.1 on g0, the least of 2 groups",
    ]


def test_account_of_a_model_on_several_groups_has_the_decision_of_each():
    decisions = [
        decision("replicate", "its requests are late on g0", age_s=3.0, group="g1"),
        decision("hibernate", "its other groups can serve its requests", age_s=4.0, group="g2"),
        decision("replicate", "an earlier time", age_s=80.0, group="g1"),
        decision("activate", "the least pressure", age_s=90.0),
    ]
    lines = told("active", [place(), place(group="g1"), place("hibernating", group="g2")], decisions=decisions)
    assert [line for line in lines if line.startswith("why")] == [
        "why: activate on g0 90 s ago, done in 0.50 s: the least pressure",
        "why: replicate on g1 3 s ago, done in 0.50 s: its requests are late on g0",
    ]


def test_account_of_a_model_that_an_operator_keeps_on_several_groups_says_so():
    said = "an operator asked for it on several groups (replicate): it leaves none as not needed"
    assert said in told("active", [place(), place(group="g1")], kept=True)
    assert said not in told("active", [place(), place(group="g1")])
    assert said not in told("active", [place(), place("hibernating", group="g1")], kept=True), "it is on one"


def test_account_of_a_hibernating_model_says_what_a_request_would_meet():
    prospect = {
        "group": "g0",
        "reason": "the least pressure",
        "leaving": [{"model": "n", "to": "cold", "reason": "idle for 9 s"}],
        "waiting_s": 0.0,
    }
    lines = told("hibernating", [place("hibernating")], prospect=prospect, decisions=[decision("hibernate", "idle")])
    assert lines == [
        "m is hibernating on g0; its engine waits, its weights are in host memory, waking took 0.25 s",
        "why: hibernate on g0 9 s ago, done in 0.50 s: idle",
        "a request now would bring it up on g0: the least pressure",
        "for that n would become cold: idle for 9 s",
    ]


def test_account_of_a_waking_model_says_that_kernels_are_compiled():
    assert told("waking", [place("waking", compiling=True, kernels_compiled=3)]) == [
        "m is waking on g0; compiling kernels, 3 so far: once for this machine"
    ]
    assert told("waking", [place("waking", compiling=True, kernels_compiled=0)]) == [
        "m is waking on g0; waiting for the first engine: once for this machine"
    ]


def test_account_of_a_cold_model_without_room_says_why_a_request_would_wait():
    prospect = {"group": None, "reason": "no group has room now", "leaving": [], "waiting_s": 1.5}
    refused = decision("refuse", "no group has room now", age_s=2.0, group="", outcome="refused for now")
    assert told("cold", prospect=prospect, decisions=[refused, decision("go cold", "idle")]) == [
        "m is on no group, cold: its weights are in host memory, it has no engine",
        "why: go cold on g0 9 s ago, done in 0.50 s: idle",
        "since then: refused 2 s ago: no group has room now",
        "a model has been waiting for memory for 1.5 s",
        "a request now would wait: no group has room now",
    ]


def test_account_of_a_model_in_error_has_the_error():
    assert told("error", error="weights 9 + floor 0 = 9 bytes; the largest group, g0, has 8") == [
        "m cannot be served: weights 9 + floor 0 = 9 bytes; the largest group, g0, has 8"
    ]


def test_account_of_a_passing_error_has_the_time_to_the_next_try_and_the_path():
    (line,) = told("error", error="its folder does not exist", retry_s=8.0, path="/volume/m")
    assert line == "m cannot be served: its folder does not exist; it is tried again within 8 s (/volume/m)"
    lines = told("error", [place("error", reason="a: EIO")], error="a: EIO", retry_s=2.0)
    assert lines == ["m cannot be served: a: EIO; it is tried again within 2 s", "m is error on g0"]


def test_account_of_a_model_without_an_image_says_why_and_with_what_effect():
    sleeping = "asleep it would keep neither its engine nor its weights"
    lines = told("on disk", no_image="its weights take 513.0 MiB, all images 256.0 MiB")
    assert lines[1] == f"it has no image: its weights take 513.0 MiB, all images 256.0 MiB; {sleeping}"
    lines = told("active", [place(no_image="host memory is short")])
    assert lines[1] == f"it has no image: host memory is short; {sleeping}"


def test_account_of_a_model_on_a_silent_group_says_so():
    away = {"group": "g0", "answers": False, "problem": None}
    assert told("active", [away]) == ["m was last seen on g0, which does not answer"]
    why = "g0 at unix:/s does not answer; its process 5 is stopped"
    assert told("active", [away | {"problem": why}]) == ["m was last seen on g0, which does not answer", why]


def test_account_ends_with_the_services_of_the_node_that_do_not_answer():
    silent = "the loader at unix:/s does not answer; nobody listens there"
    assert told("cold", silent=[silent])[1:] == [silent]


def test_account_counts_requests_by_why_they_wait():
    places = ["running", "on time 1, model waking", "on time 12, model waking", "waiting"]
    requests = [{"place": each, "waiting_s": float(i)} for i, each in enumerate(places)]
    lines = told("active", [place(kv_lacking_bytes=3 << 20)], requests=requests)
    assert lines[1:] == [
        "requests: 2 on time (the model wakes), 1 running, 1 waiting",
        "3 of them wait, the longest for 3.0 s",
        "on g0 they lack 3.0 MiB of KV memory",
    ]


def test_account_of_one_waiting_request_is_in_the_singular():
    lines = told("active", [place()], requests=[{"place": "waiting", "waiting_s": 2.0}])
    assert lines[-1] == "1 of them waits, the longest for 2.0 s"
