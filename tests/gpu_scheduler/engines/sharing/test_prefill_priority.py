from gpu_scheduler.engines.sharing.prefill_priority import worth


def test_worth_of_many_requests_for_each_prompt_is_false() -> None:
    assert [worth(prompts, 32, 16) for prompts in (0, 1, 2, 3)] == [False, False, True, True]
    assert not worth(1, 17, 16) and worth(1, 16, 16)


def test_worth_without_a_bound_is_true_for_any_prompt() -> None:
    assert worth(1, 10_000, 0) and not worth(0, 1, 0)
