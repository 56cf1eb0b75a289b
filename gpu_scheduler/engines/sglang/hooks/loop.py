"""Hooks on SGLang's event loop: reading, sleeping, forming batches, retracting.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
Scheduler.init_idle_sleeper           An idle engine sleeps in `StepLoop.sleep`  SGLang polls sockets that do not exist
SchedulerRequestReceiver              Requests come from `StepLoop.pull`         no request, command or reclaim arrives
._pull_raw_reqs
SchedulerRequestReceiver              The ranks have agreed on the messages of   rank 0's requests go to the other ranks
._broadcast_reqs_across_ranks         the step already                           a second time, and all wait for that
Scheduler.get_next_batch_to_run       No decode step while another engine goes   decode steps of neighbours do not give
                                      first, and none whose every request is     way; a stop waits for one more step
                                      about to end
Scheduler.get_new_batch_prefill       Prefill steps keep to turn, throttle,      prefills slow down neighbours' decodes,
                                      limit and memory                           and start without memory
Scheduler                             Results that are here go out before the    first tokens wait 5 to 30 ms for the
.is_disable_overlap_for_batch         next prefill step is launched              host
PrefillAdder.add_one_req              KV memory grows before SGLang admits a     requests wait although memory could
                                      request, and once more if it refuses       grow, or cached prefixes are evicted
                                                                                 first
Scheduler.update_running_batch        Before a decode step, memory over the      the engine stays over its limit while
                                      limit leaves, and the step may give way    it decodes, and never gives way
ScheduleBatch.retract_decode          Retractions are reported; a request that   pauses have no reason in the log, and
                                      does not fit even alone goes back to the   SGLang aborts the one that does not fit
                                      shared queue
Scheduler.run_batch                   Steps are counted and reported as they     pauses, bids and claims have no step to
                                      begin                                      count from
Scheduler.process_batch_result        The end of each step is noted              pauses never end; claims are not
                                                                                 released
SchedulerOutputStreamer               Tokens go out in one message a step        no tokens are sent: SGLang gathers some
._stream_output_generation                                                       forty lists for processes that do not
                                                                                 exist here
SchedulerOutputStreamer               Embeddings go out in one message a step    embeddings are not sent
._stream_output_embedding
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.model.stats import prefilled
from gpu_scheduler.engines.sglang.step import current
from protos import engine_pb2


class _Sleeper:
    """The idle sleeper, in place of the one that polls SGLang's sockets."""

    def maybe_sleep(self) -> None:
        current.loop().sleep()


def idle_sleeper(scheduler: Any) -> None:
    """Puts an idle engine to sleep in `StepLoop.sleep`."""
    scheduler.idle_sleeper = _Sleeper()


def pull_requests(_receiver: Any) -> list[Any]:
    """The requests of `StepLoop.pull`, in place of those from SGLang's sockets."""
    return current.loop().pull()


def heard_by_all(_receiver: Any, requests: Any) -> Any:
    """Returns the requests as they are: the ranks have agreed on them already."""
    return requests


def new_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Forms a prefill batch unless it is another engine's turn, memory is over the limit or missing, or decodes are
    behind; with no more tokens than the throttle allows. Decoding goes on."""
    # Done here, because SGLang would start a request whose grammar is ready without asking whether it may.
    if scheduler.grammar_manager.has_waiting_grammars():
        for request in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)
    provisioning, loop = current.model().provisioning, current.loop()
    if not scheduler.waiting_queue and scheduler.chunked_req is None:
        provisioning.asked = False
        return original(scheduler, running_batch)
    if not loop.may_prefill(running_batch):
        return _nothing(running_batch)
    whole = scheduler.chunked_prefill_size
    if whole is not None:  # an encoder's prompts cannot be computed in parts
        scheduler.chunked_prefill_size = loop.chunk_tokens()
    try:
        if not provisioning.asked:
            _ask_ahead(scheduler, running_batch.reqs)
        plan = original(scheduler, running_batch)
        if plan.batch_to_run is not None:
            _ask_ahead(scheduler, [*plan.running_batch.reqs, *plan.batch_to_run.reqs])
        return plan
    finally:
        scheduler.chunked_prefill_size = whole


def _ask_ahead(scheduler: Any, running: list[Any]) -> None:
    """Requests memory for the next prefill step, while these requests run. With several ranks it does nothing: they
    request memory together, and wait for one another."""
    from sglang.srt.managers import schedule_policy

    model = current.model()
    if model.ranks.size > 1:
        return
    waiting = scheduler.waiting_queue if scheduler.get_num_allocatable_reqs(len(running)) > 0 else ()
    model.provisioning.ask_ahead(
        scheduler.tree_cache,
        running,
        scheduler.chunked_req,
        waiting,
        schedule_policy.CLIP_MAX_NEW_TOKENS,
        scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        scheduler.new_token_ratio_tracker.current,
    )


class _GivesWay(Exception):
    """Unwinds SGLang's choice of a batch: the decode step of `batch` waits."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def next_batch(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Chooses the next batch, but no step whose every request ends with the results of the one before it, since a stop
    would wait for that step. And no decode step while another engine goes first: results of the step before go out
    meanwhile, and a prompt may come."""
    if scheduler.enable_overlap and not scheduler.waiting_queue and last_batch and last_batch.forward_mode.is_decode():
        ending = bool(running_batch.reqs) and all(request.to_finish is not None for request in running_batch.reqs)
        if ending and scheduler.chunked_req is None:
            return _nothing(running_batch)
    try:
        return original(scheduler, running_batch, last_batch)
    except _GivesWay as left:
        return _nothing(left.batch)


def _nothing(running_batch: Any) -> Any:
    """The plan with no batch to run."""
    from sglang.srt.managers.scheduler import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def results_first(original: Callable[..., Any], scheduler: Any, batch: Any, last_batch: Any) -> Any:
    """Whether the results of the last step go out before the next one is launched. They do where both are prefill steps
    and the results are here already: the host needs 5 ms to launch a step with a graph and 12 to 30 without, which may
    be more than the devices needed for the one before, and first tokens would wait for nothing."""
    if original(scheduler, batch, last_batch):
        return True
    both = batch and last_batch and batch.forward_mode.is_extend() and last_batch.forward_mode.is_extend()
    if not both or not scheduler.result_queue:
        return False
    _, result = scheduler.result_queue[0]
    return current.loop().results_first(result.copy_done)


def add_request(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """Admits a request after growing memory for it, and tries once more when SGLang refuses for lack of tokens: SGLang
    knows best how many it needs."""
    from sglang.srt.managers import schedule_policy

    if has_chunked_req:
        # A prompt that is half computed took the memory that was here. SGLang relies on nothing more being here for
        # another prompt, which would be the second one half computed.
        return schedule_policy.AddReqResult.OTHER
    provisioning = current.model().provisioning
    provisioning.prefer_growth(adder, req, schedule_policy.CLIP_MAX_NEW_TOKENS)
    admitted = len(adder.can_run_list)
    result = original(adder, req, has_chunked_req, truncation_align_size)
    refused = result is schedule_policy.AddReqResult.NO_TOKEN and len(adder.can_run_list) == admitted
    if refused and provisioning.grow_for(adder, req, schedule_policy.CLIP_MAX_NEW_TOKENS):
        return original(adder, req, has_chunked_req, truncation_align_size)
    return result


def before_decode(_scheduler: Any, batch: Any) -> None:
    """Makes memory over the limit leave before a decode step. Raises _GivesWay if the step has to wait."""
    loop = current.loop()
    loop.before_decode(batch)
    if loop.gives_way(batch):
        raise _GivesWay(batch)


def after_retraction(result: Any, _batch: Any, *_args: Any) -> Any:
    """Counts and reports the requests that SGLang has retracted, and parks the one that it would abort because it does
    not fit even alone: it goes back to the shared queue."""
    retracted, ratio, given_up = result
    model = current.model()
    for request in retracted:
        model.retracted(request, "no KV memory for the running batch")
    model.counters.retractions += len(given_up)
    for request in given_up:
        current.loop().parked(request)
    return retracted, ratio, []


def before_step(_scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Counts a step as it begins, and reports the progress of its prompts."""
    model = current.model()
    counters = model.counters
    counters.forward_steps += 1
    if batch.forward_mode.is_decode():
        current.loop().decode_begins()
        counters.decode_tokens += len(batch.reqs)
    elif batch.forward_mode.is_extend():
        current.loop().prefill_begins(len(batch.reqs))
        counters.prefill_tokens += batch.extend_num_tokens
        if prompts := prefilled(batch.reqs, model.request_table):
            model.channel.send(prefilled=engine_pb2.Prefilled(prompts=prompts))


def after_results(result: Any, _scheduler: Any, batch: Any, *_args: Any) -> Any:
    """Notes that the results of a step are here."""
    if batch.forward_mode.is_decode():
        current.loop().decode_ended()
    elif batch.forward_mode.is_extend():
        current.loop().prefill_ended()
    return result


def stream_output(_streamer: Any, reqs: list[Any], _return_logprob: bool, skip_req: Any = None, **_: Any) -> None:
    """Sends the tokens of a step. SGLang would gather some forty lists, for processes that do not exist here."""
    current.model().outputs.stream(reqs, skip_req)


def stream_embeddings(_streamer: Any, reqs: list[Any]) -> None:
    """Sends the embeddings of a step."""
    current.model().outputs.embeddings(reqs)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PARTS = "sglang.srt.managers.scheduler_components"
HOOKS = [
    Hook(f"{_SCHEDULER}.init_idle_sleeper", idle_sleeper, "REPLACE"),
    Hook(f"{_PARTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", pull_requests, "REPLACE"),
    Hook(f"{_PARTS}.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks", heard_by_all, "REPLACE"),
    Hook(f"{_SCHEDULER}.get_next_batch_to_run", next_batch, "AROUND"),
    Hook(f"{_SCHEDULER}.get_new_batch_prefill", new_prefill, "AROUND"),
    Hook(f"{_SCHEDULER}.is_disable_overlap_for_batch", results_first, "AROUND"),
    Hook("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", add_request, "AROUND"),
    Hook(f"{_SCHEDULER}.update_running_batch", before_decode, "BEFORE"),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", after_retraction, "AFTER"),
    Hook(f"{_SCHEDULER}.run_batch", before_step, "BEFORE"),
    Hook(f"{_SCHEDULER}.process_batch_result", after_results, "AFTER"),
    Hook(f"{_PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_generation", stream_output, "REPLACE"),
    Hook(f"{_PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_embedding", stream_embeddings, "REPLACE"),
]
