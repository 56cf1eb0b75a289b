"""The prompts of a load: as long as was asked for, with a beginning that all share, and otherwise unlike."""

from benchmarks.gpu.windows import Shape


def test_prompts_share_as_many_tokens_as_was_asked_for_whatever_their_seed() -> None:
    prompts = [Shape(40, 8, 1000, shared_tokens=30).prompts(seed)() for seed in (1, 2, 1)]
    assert [len(prompt) for prompt in prompts] == [40, 40, 40]
    assert prompts[0][:30] == prompts[1][:30] and prompts[0][30:] != prompts[1][30:]
    assert prompts[2] == prompts[0]
    first, second = (Shape(40, 8, 1000).prompts(seed)() for seed in (1, 2))
    assert first[:4] != second[:4]
