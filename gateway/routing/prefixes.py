"""Groups that have computed the beginning of a prompt, as far as this gateway sent it there.

If several groups serve a model, a request does best at the group that has its prefix in its cache. Groups do not say
what they cache. Prompts that were sent to a group of late stand for its cache as long as the model is there: a model
that leaves or sleeps, or whose engine died, comes back without its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

BLOCK_TOKENS = 128
"""Tokens of a prefix are counted in whole blocks of so many."""
MOST_BLOCKS = 65_536
"""Blocks that are remembered, about 10 MB; those that were sent longest ago are forgotten first."""


class SentPrefixes:
    """Prefixes of the prompts that were sent to groups."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._sent: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        """(address of the group, number of the model's stay there, hash of the prefix), the one that was sent longest
        ago first."""
        self._stays: dict[tuple[str, str], tuple[int, bool]] = {}
        """(address of a group, model that has a place there) -> (number of its stay, whether it is active)."""
        self._numbers = count(1)

    def keep(self, places: Iterable[tuple[str, str, bool]]) -> None:
        """Takes all places as they are now: address of the group, model, whether it is active there. Prompts that were
        sent to a model count no more once the model has left its place, or is not active there."""
        stays: dict[tuple[str, str], tuple[int, bool]] = {}
        for address, model, active in places:
            number, was_active = self._stays.get((address, model), (0, False))
            goes_on = number and (active or not was_active)
            stays[address, model] = number if goes_on else next(self._numbers), active
        self._stays = stays

    def _stay(self, address: str, model: str) -> int:
        return self._stays.get((address, model), (0, False))[0]

    def add(self, address: str, model: str, token_ids: Sequence[int]) -> None:
        """Notes that the prompt is sent to the group at `address`."""
        stay = self._stay(address, model)
        # The longest first: what is forgotten of a prompt is its end.
        for prefix in reversed(list(_prefixes(model, token_ids))):
            self._sent[address, stay, prefix] = None
            self._sent.move_to_end((address, stay, prefix))
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)

    def longest(self, addresses: Sequence[str], model: str, token_ids: Sequence[int]) -> dict[str, int]:
        """Tokens at the beginning of the prompt that were sent to each of the groups before; 0 for one that got
        none."""
        found = dict.fromkeys(addresses, 0)
        left = [(address, self._stay(address, model)) for address in addresses]
        for number, prefix in enumerate(_prefixes(model, token_ids), start=1):
            left = [stay for stay in left if (*stay, prefix) in self._sent]
            if not left:
                break
            found.update(dict.fromkeys((address for address, _ in left), number * BLOCK_TOKENS))
        return found


def _prefixes(model: str, token_ids: Sequence[int]) -> Iterator[int]:
    """Hashes of the prompt's prefixes of one block, of two, and so on."""
    prefix = hash(model)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        prefix = hash((prefix, tuple(token_ids[end - BLOCK_TOKENS : end])))
        yield prefix
