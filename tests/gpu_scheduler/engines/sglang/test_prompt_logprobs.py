"""Log-probabilities of prompts, from a real engine: Transformers' own, each told once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_scheduler.engines.sglang.hooks import logprobs as hooks_logprobs
from protos import common_pb2
from testing.engines.harness import Answer, EngineEnd, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS
from tests.gpu_scheduler.engines.sglang.shared import Engines
from tests.gpu_scheduler.engines.sglang.test_engine import FLOOR, move_limit

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEAR = 1e-3
SCORED: dict[str, Any] = {"logprobs": True, "prompt_logprobs_from": 1, "ignore_eos": True}
ALONE: dict[str, Any] = {**SCORED, "prompt_only": True}
LABELS = [7, 900, 7, 5]
LABELLED: dict[str, Any] = {"prompt_only": True, "label_token_ids": LABELS}


class Right:
    """What Transformers says of some prompts and of what follows them."""

    def __init__(
        self,
        model: Path,
        prompts: Sequence[list[int]],
        said: Sequence[list[int]],
        alone: Sequence[list[int]] = (),
    ) -> None:
        """`said`: the answers to `prompts`. `alone`: prompts without one, which come behind these."""
        self.prompts, self.said = [*prompts, *alone], [*said, *([] for _ in alone)]
        self.answered = range(len(prompts))
        texts = [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.said, strict=True)]
        self._rows = checkpoints.logprobs(model, texts)

    def check(self, i: int, answer: Answer, new_tokens: int = 0, top: int = 0, first: int = 1) -> None:
        """An answer to the `i`th prompt, of which tokens from `first` on were asked for."""
        prompt = self.prompts[i]
        assert (answer.finish, answer.error, answer.parked) == (common_pb2.LENGTH, "", False)
        assert answer.tokens == self.said[i][:new_tokens] and len(answer.logprobs) == new_tokens
        assert answer.prompt_tokens in (0, len(prompt))
        assert len(answer.prompt_logprobs) == len(prompt) - first
        told = [*answer.prompt_logprobs, *answer.logprobs]
        rows = self._rows[i][first - 1 : len(prompt) + new_tokens - 1]
        tokens = torch.tensor([*prompt, *answer.tokens][first:])
        right = rows.gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(torch.tensor([one.logprob for one in told]), right, atol=NEAR)
        assert all(len(one.top) == top for one in told)
        if top:
            values = torch.tensor([[best.logprob for best in one.top] for one in told])
            ids = torch.tensor([[best.token_id for best in one.top] for one in told])
            assert torch.allclose(values, rows.topk(top, dim=1).values, atol=NEAR)
            assert torch.allclose(values, rows.gather(1, ids), atol=NEAR)

    def check_labels(self, i: int, answer: Answer, cut: int = 0) -> None:
        """An answer to the `i`th prompt without its last `cut` tokens, of which only the labels were asked for."""
        assert (answer.finish, answer.error, answer.tokens) == (common_pb2.LENGTH, "", [])
        row = self._rows[i][len(self.prompts[i]) - 1 - cut]
        assert torch.allclose(torch.tensor(answer.label_logprobs), row[LABELS], atol=NEAR)


@pytest.fixture(scope="module")
def right(models: dict[str, Path], prompts: list[list[int]], said: dict[str, list[list[int]]]) -> Right:
    long = [[2 + (7 * number + 3 * i) % 1000 for i in range(CONTEXT - number)] for number in (0, 30)]
    return Right(models["qwen"], prompts, said["qwen"], long)


async def together(end: EngineEnd, tag: str, right: Right, new_tokens: int = 5) -> None:
    """All prompts that have answers in six ways, beside one another in the same steps."""
    ways: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "scored": (new_tokens, SCORED, {"new_tokens": new_tokens}),
        "best": (new_tokens, {**SCORED, "top_logprobs": 3}, {"new_tokens": new_tokens, "top": 3}),
        "alone": (1, ALONE, {}),
        "best alone": (1, {**ALONE, "top_logprobs": 20}, {"top": 20}),
    }
    for i in right.answered:
        for way, (new, asked, _) in ways.items():
            end.ask(f"{tag}-{i}-{way}", right.prompts[i], new, **asked)
        end.ask(f"{tag}-{i}-labels", right.prompts[i], 1, **LABELLED)
        end.ask(f"{tag}-{i}-plain", right.prompts[i], new_tokens, ignore_eos=True)
    for i in right.answered:
        for way, (_, _, checked) in ways.items():
            right.check(i, await end.answer(f"{tag}-{i}-{way}"), **checked)
        right.check_labels(i, await end.answer(f"{tag}-{i}-labels"))
        plain = await end.answer(f"{tag}-{i}-plain")
        assert plain.tokens == right.said[i][:new_tokens] and not plain.prompt_logprobs


@pytest.mark.parametrize(
    "options",
    [{"chunked_prefill_size": 300}, {"chunked_prefill_size": 48, "page_size": 16, "overlap": 1}],
    ids=["as on a CPU", "with pages and overlap as on a GPU"],
)
async def test_prompts_have_transformers_log_probabilities(
    tmp_path: Path, engines: Engines, models: dict[str, Path], right: Right, options: dict[str, int]
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR)
        await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT, **options))
        await together(end, "still", right)
        await _one_by_one(end, right)
        await _refused(end)
        mover = asyncio.get_running_loop().create_task(move_limit(at, end, "qwen", [16, 20, 24, 40, 200]))
        await together(end, "moving", right, NEW_TOKENS)
        mover.cancel()
        await end.until(lambda: not end.stats.running)
        assert end.stats.retractions > 0


async def _one_by_one(end: EngineEnd, right: Right) -> None:
    """What fills the context takes several steps; what was computed is not computed again for what goes on, and is for
    what asks for all."""
    for i in range(len(right.answered), len(right.prompts)):
        whole, prompt = len(right.prompts[i]), right.prompts[i]
        for name in ("first", "again"):
            end.ask(f"{name}-{i}", prompt, 1, **ALONE, top_logprobs=2)
            right.check(i, await end.answer(f"{name}-{i}"), top=2)
            assert end.answers[f"{name}-{i}"].cached_tokens == 0
        end.ask(f"rest-{i}", prompt, 1, **{**ALONE, "prompt_logprobs_from": 401}, top_logprobs=2)
        right.check(i, await end.answer(f"rest-{i}"), top=2, first=401)
        assert end.answers[f"rest-{i}"].cached_tokens == 400
        end.ask(f"labels-{i}", prompt[:-1], 1, **LABELLED)
        right.check_labels(i, await end.answer(f"labels-{i}"), cut=1)
        end.ask(f"last-{i}", prompt, 1, **{**ALONE, "prompt_logprobs_from": whole - 1})
        right.check(i, await end.answer(f"last-{i}"), first=whole - 1)
    end.ask("one", [7], 1, logprobs=True, prompt_only=True)
    end.ask("unscored", prompt, 1, prompt_only=True)
    end.ask("formed", prompt, 1, prompt_only=True, regex="[0-9]+")
    for name in ("one", "unscored", "formed"):
        answer = await end.answer(name)
        assert (answer.finish, answer.tokens, answer.logprobs) == (common_pb2.LENGTH, [], [])
    assert end.answers["unscored"].cached_tokens > 0


async def _refused(end: EngineEnd) -> None:
    end.ask("zeroth", [5, 6], 1, logprobs=True, prompt_logprobs_from=0)
    end.ask("behind", [5, 6], 1, logprobs=True, prompt_logprobs_from=2)
    end.ask("unasked", [5, 6], 1, prompt_logprobs_from=1)
    for name in ("zeroth", "behind", "unasked"):
        answer = await end.answer(name)
        assert answer.finish == common_pb2.REJECTED and "no log-probabilities of token" in answer.error
    end.ask("unknown", [5, 6], 1, prompt_only=True, label_token_ids=[1 << 20])
    end.ask("sampled", [5, 6], 1, label_token_ids=[5])
    for name in ("unknown", "sampled"):
        answer = await end.answer(name)
        assert answer.finish == common_pb2.REJECTED and "label token" in answer.error


async def test_prompt_logprobs_of_a_request_skip_the_rows_of_one_retracted_before_it() -> None:
    told: list[int] = []

    def original(_processor: Any, *, i: int, logprob_pt: int, **_: Any) -> int:
        told.append(logprob_pt)
        return logprob_pt

    lengths = {"extend_input_len_per_req": [10, 7, 4], "extend_logprob_start_len_per_req": [0, 7, 1]}
    for i in (0, 2):
        hooks_logprobs.own_rows(original, None, i=i, logprob_pt=0, **lengths)
    assert told == [0, 10]
