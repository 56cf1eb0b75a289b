"""SGLang's Scheduler with methods of ours: a class below it, so that no hook is needed for what it does itself. Each
method marked `override` replaces one of SGLang's; `plugin.py` checks that SGLang still has all of them.

Imports SGLang: only the engine process may import this.

Method                                Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
init_ipc_channels                     Outputs go to `model/outputs.py`           SGLang opens sockets to tokenizer
                                                                                 processes that do not exist here
init_idle_sleeper                     An idle engine sleeps in `StepLoop.sleep`  SGLang polls sockets that do not exist
init_request_receiver                 Requests come from `StepLoop.pull`, where  no request, command or reclaim
                                      the ranks have agreed on them              arrives, or rank 0's arrive twice
get_output_streamer_class             What a step has made goes out in one       nothing is sent: SGLang gathers some
                                      message                                    forty lists for processes that do not
                                                                                 exist here
get_next_batch_to_run                 No decode step while another engine goes   decode steps do not give way to
                                      first, and none whose every request is     neighbours; a stop waits for one more
                                      about to end                               step
get_new_batch_prefill                 Prefill steps keep to turn, throttle,      prefills slow down neighbours' decodes,
                                      limit and memory                           and start without memory
get_num_allocatable_reqs              No more requests start than there is       SGLang dies where a request finds no
                                      room for states                            state
is_disable_overlap_for_batch          Results that are here go out before the    first tokens wait 5 to 30 ms for the
                                      next prefill step is launched              host
update_running_batch                  Before a decode step, memory over the      the engine stays over its limit while
                                      limit leaves, and the step may give way    it decodes, and never gives way
run_batch                             Steps are counted and reported as they     pauses, bids and claims have no step to
                                      begin                                      count from
process_batch_result                  The end of each step is noted              pauses never end; claims are not
                                                                                 released
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import schedule_policy
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_schedule
from typing_extensions import override

from gpu_scheduler.engines.sglang.model.stats import prefilled
from gpu_scheduler.engines.sglang.step import current
from protos import engine_pb2


class SocketlessScheduler(Scheduler):  # type: ignore[misc]
    """A Scheduler whose front is a `StepLoop`: requests come from it, an idle engine sleeps in it, and no socket is
    opened."""

    @override
    def init_ipc_channels(self, port_args: Any) -> None:
        """Puts the engine's outputs where SGLang has sockets to its tokenizer and detokenizer processes, which do not
        exist here."""
        outputs = current.model().outputs
        self.load_snapshot_writer = self.recv_from_tokenizer = None
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=outputs,
            send_to_detokenizer=outputs,
            send_metrics_from_scheduler=None,
        )

    @override
    def init_idle_sleeper(self) -> None:
        """Puts an idle engine to sleep in `StepLoop.sleep`."""
        self.idle_sleeper = _Sleeper()

    @override
    def init_request_receiver(self) -> None:
        """Takes requests from `StepLoop.pull`."""
        self.request_receiver = _Receiver()


class _Sleeper:
    """The idle sleeper, in place of the one that polls SGLang's sockets."""

    def maybe_sleep(self) -> None:
        current.loop().sleep()


class _Receiver:
    """The source of requests, in place of SGLang's sockets. With several ranks all of them have agreed on the requests,
    so that nothing is broadcast."""

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        """The requests of the next step, and those that SGLang makes itself to end others."""
        return [*current.loop().pull(), *(local_reqs or ())]


class EngineScheduler(SocketlessScheduler):
    """The Scheduler of an engine that shares its device."""

    chunked_prefill_size: int | None
    """Most prompt tokens of a prefill step, as in SGLang; None: every prompt is computed in one step."""

    most_admitted: int | None = None
    """Most requests of the prefill step that is being formed; None: as many as SGLang admits."""

    @override
    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return StepStreamer

    @override
    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        """Chooses the next batch. There is none if every request of it ends with the results of the step before, since
        a stop would wait for the batch. There is no decode step while another engine goes first: results of the step
        before go out meanwhile, and a prompt may come."""
        if self.enable_overlap and not self.waiting_queue and last_batch and last_batch.forward_mode.is_decode():
            ending = bool(running_batch.reqs) and all(request.to_finish is not None for request in running_batch.reqs)
            if ending and self.chunked_req is None:
                return _nothing(running_batch)
        try:
            return super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        except _GivesWay as left:
            return _nothing(left.batch)

    @override
    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """Forms a prefill batch of no more tokens than the throttle allows. No batch is formed, and decoding goes on,
        while it is another engine's turn, memory is over the limit or missing, or decodes are behind.

        The order: requests whose grammars are ready join the queue; states get memory; the step is cut if a state
        within its prompt is to be cached; tokens get memory, unless an earlier call has requested it; SGLang forms the
        batch; memory for the step after that is requested."""
        # Requests join the queue here, because SGLang would start one whose grammar is ready without asking whether it
        # may. Where no request waits, SGLang is not asked for a batch: it would look at the grammars again, and start a
        # request whose grammar has become ready meanwhile.
        if self.grammar_manager.has_waiting_grammars():
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)
        provisioning, loop = current.model().provisioning, current.loop()
        if not self.waiting_queue and self.chunked_req is None:
            provisioning.asked = False
            return _nothing(running_batch)
        if not loop.may_prefill(running_batch):
            return _nothing(running_batch)
        free_states = self._provide_states(running_batch)
        has_states, goes_on = self.most_admitted is not None, self.chunked_req is not None
        unthrottled = self.chunked_prefill_size
        if unthrottled is not None:  # an encoder's prompts cannot be computed in parts
            tokens = loop.chunk_tokens()
            self.chunked_prefill_size = self._until_shared(tokens) or tokens
        try:
            if not provisioning.asked:
                self._ask_ahead(running_batch.reqs)
            plan = super().get_new_batch_prefill(running_batch)
            if plan.batch_to_run is not None:
                self._ask_ahead([*plan.running_batch.reqs, *plan.batch_to_run.reqs])
                model = current.model()
                if free_states and (states := model.state_provisioning) is not None:
                    states.note_taken(free_states - states.available, model.ranks.now())
            return plan
        finally:
            self.chunked_prefill_size = unthrottled
            self.most_admitted, current.model().kv.promised = None, 0
            if has_states and goes_on:
                # No other prompt may begin beside one that goes on. The next step may have room for one all the same.
                running_batch.batch_is_full = False

    def _provide_states(self, running_batch: Any) -> int:
        """Makes room for the states of the requests that the next prefill step admits, and bounds their number: SGLang
        dies where a request finds none. Returns how many states are free for the step; 0 for models without states."""
        model = current.model()
        if model.state_provisioning is None:
            return 0
        self.most_admitted = 1
        # A prompt that is half computed has its state already, and no other one begins beside it. Looking for another
        # state could take the memory that was found for its tokens.
        if self.chunked_req is None:
            # SGLang sorts the queue when it forms the batch; which request is first has to be known here.
            schedule_policy.SchedulePolicy._sort_by_priority_and_fcfs(self.waiting_queue, self.policy.priority_sign)
            rows = max(0, super().get_num_allocatable_reqs(len(running_batch.reqs)))
            first = self.waiting_queue[: min(rows, get_schedule().prefill_max_requests or rows)]
            most = current.loop().chunk_tokens() or self.max_prefill_tokens
            cap = schedule_policy.CLIP_MAX_NEW_TOKENS
            ratio = self.new_token_ratio_tracker.current
            self.most_admitted = model.state_provisioning.provide(
                model.tree, first, running_batch.reqs, most, cap, ratio
            )
        return model.state_provisioning.available

    def _until_shared(self, most: int) -> int:
        """Number of tokens of the next prefill step, if the state behind them is to be cached for other requests that
        begin so (`StateProvisioning.until_shared`): the step has one prompt alone then. 0: it is not cut. `most`:
        tokens that the step could compute; 0: as many as SGLang's limit."""
        model = current.model()
        begins = self.chunked_req is None
        request = self.waiting_queue[0] if begins else self.chunked_req
        provisioning = model.state_provisioning
        if provisioning is None or begins and not self.most_admitted:
            return 0
        tokens = provisioning.until_shared(model.tree, request, most or self.max_prefill_tokens, begins=begins)
        if tokens and begins:
            self.most_admitted = 1
        return tokens

    @override
    def get_num_allocatable_reqs(self, *args: Any, **kwargs: Any) -> int:
        """Most requests of the next prefill step: SGLang's number, but no more than there is room for states."""
        most: int = super().get_num_allocatable_reqs(*args, **kwargs)
        return most if self.most_admitted is None else min(most, self.most_admitted)

    def _ask_ahead(self, running: list[Any]) -> None:
        """Requests memory for the next prefill step, while the `running` requests run. With several ranks it does
        nothing: ranks request memory together, and would wait for one another here."""
        model = current.model()
        if model.ranks.size > 1:
            return
        waiting = self.waiting_queue if self.get_num_allocatable_reqs(len(running)) > 0 else ()
        model.provisioning.ask_ahead(
            self.tree_cache,
            running,
            self.chunked_req,
            waiting,
            schedule_policy.CLIP_MAX_NEW_TOKENS,
            self.chunked_prefill_size or self.max_prefill_tokens,
            self.new_token_ratio_tracker.current,
        )

    @override
    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> Any:
        """Whether the results of the last step go out before the next one is launched. Results go out first if both are
        prefill steps and the results are here already. The host needs 5 ms to launch a step with a graph and 12 to 30
        ms without, which may be longer than the devices needed for the last step; first tokens would wait for that in
        vain."""
        if super().is_disable_overlap_for_batch(batch, last_batch):
            return True
        both = batch and last_batch and batch.forward_mode.is_extend() and last_batch.forward_mode.is_extend()
        if not both or not self.result_queue:
            return False
        _, result = self.result_queue[0]
        return current.loop().results_first(result.copy_done)

    @override
    def update_running_batch(self, batch: Any) -> Any:
        """Makes memory over the limit leave before a decode step. Raises _GivesWay if the step has to wait."""
        loop = current.loop()
        loop.before_decode(batch)
        if loop.gives_way(batch):
            raise _GivesWay(batch)
        return super().update_running_batch(batch)

    @override
    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a step as it begins, and reports the progress of its prompts."""
        step_begins(batch)
        return super().run_batch(batch, *args, **kwargs)

    @override
    def process_batch_result(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes that the results of a step are here."""
        done = super().process_batch_result(batch, *args, **kwargs)
        if batch.forward_mode.is_decode():
            current.loop().decode_ended()
        elif batch.forward_mode.is_extend():
            current.loop().prefill_ended()
        return done


class _GivesWay(Exception):
    """Raised within SGLang's choice of a batch, and caught around it: the decode step of `batch` has to wait."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def _nothing(running_batch: Any) -> Any:
    """A plan with no batch to run."""
    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def step_begins(batch: Any) -> None:
    """Counts a step as it begins, and reports the progress of its prompts. Tokens of the engine's own measurement are
    not counted: placement would take them for demand."""
    model = current.model()
    counters, measures = model.counters, model.probe is not None
    counters.forward_steps += 1
    if batch.forward_mode.is_decode():
        current.loop().decode_begins()
        counters.decode_tokens += 0 if measures else len(batch.reqs)
    elif batch.forward_mode.is_extend():
        current.loop().prefill_begins(len(batch.reqs))
        counters.prefill_tokens += 0 if measures else batch.extend_num_tokens
        if prompts := prefilled(batch.reqs, model.request_table):
            model.channel.send(prefilled=engine_pb2.Prefilled(prompts=prompts))


class StepStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """Sends what a step has made. SGLang would gather some forty lists, for processes that do not exist here."""

    @override
    def _stream_output_generation(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None, **_: Any) -> None:
        current.model().outputs.stream(reqs, skip_req)

    @override
    def _stream_output_embedding(self, reqs: list[Any]) -> None:
        current.model().outputs.embeddings(reqs)
