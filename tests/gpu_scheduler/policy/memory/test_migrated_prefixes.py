"""What a queue knows of KV that came along with a model."""

from __future__ import annotations

from gpu_scheduler.policy.memory.migrated_prefixes import KEPT_S, MigratedPrefixes


def test_request_that_begins_with_a_migrated_prefix_has_it_cached() -> None:
    brought = MigratedPrefixes()
    brought.came("llama", [[1, 2, 3, 4], [1, 2], [9, 9, 9], []], now=10.0)
    assert brought.cached_tokens("llama", [1, 2, 3, 4, 5, 6], now=10.5) == 4
    assert brought.cached_tokens("llama", [1, 2, 7], now=10.5) == 2
    assert brought.cached_tokens("llama", [1, 2, 7, 4], now=10.5) == 2, "the same token at the end is not enough"
    assert brought.cached_tokens("llama", [9, 9], now=10.5) == 0, "the end of what came is another text's"
    assert brought.cached_tokens("qwen", [1, 2, 3, 4, 5, 6], now=10.5) == 0


def test_migrated_prefixes_are_forgotten_after_a_while_each_by_itself() -> None:
    brought = MigratedPrefixes()
    brought.came("llama", [[1, 2, 3]], now=10.0)
    brought.came("llama", [[4, 5]], now=12.0)
    assert brought.cached_tokens("llama", [1, 2, 3, 4], now=10.0 + KEPT_S) == 0
    assert brought.cached_tokens("llama", [4, 5, 6], now=10.0 + KEPT_S) == 2
    assert brought.cached_tokens("llama", [4, 5, 6], now=12.0 + KEPT_S) == 0
