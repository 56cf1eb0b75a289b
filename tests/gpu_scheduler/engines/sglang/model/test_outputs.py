"""Tokens that an engine sends of a request which is stopped: those that are there, and none if it wants no answer."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

STOPPED = """
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from gpu_scheduler.engines.sglang.base.request_table import RequestTable
from gpu_scheduler.engines.sglang.model.outputs import Outputs


def told(most):
    table, sent = RequestTable(), []
    request = SimpleNamespace(
        rid=table.add("1", 3, 0).rid,
        finished_output=False,
        finished_reason=FINISH_ABORT(),
        finished_len=None,
        output_ids=[0],
        send_token_offset=0,
        cached_tokens=0,
        return_logprob=False,
        sampling_params=SimpleNamespace(max_new_tokens=most),
    )
    Outputs(table, sent.append, lambda *_: None).stream([request])
    (chunk,) = sent[0].tokens.chunks
    return list(chunk.token_ids)


assert told(5) == [0]
assert told(0) == [], "a request that wants no answer gets none"
"""


@pytest.mark.sglang
def test_stopped_request_gets_the_tokens_that_are_there_unless_it_wants_none(imported: Imported) -> None:
    imported.run(STOPPED)
