"""What is told while engines start, by groups that say what they are told to."""

import asyncio

import pytest

from deploy.local import warming
from deploy.local.warming import Warming, WatchedGroup, doing
from gpu_scheduler.server import NAME
from protos import common_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services.rpc import rpc
from services.runtime import tasks
from testing.patience import PATIENCE_S

State, Resident = gpu_scheduler_pb2.GroupState, gpu_scheduler_pb2.Resident


class Group(gpu_scheduler_pb2_grpc.GpuSchedulerServicer):
    """Tells one state after the other, each when it is let."""

    def __init__(self, folder, name):
        self.name = name
        self.log = folder / f"{name}.log"
        self.server = rpc.Server(f"unix:{folder}/{name}.sock")
        self.server.add(gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, self, NAME)
        self.states = asyncio.Queue()

    def tell(self, **state):
        self.states.put_nowait(State(group=self.name, **state))

    async def Watch(self, request, context):
        while True:
            yield await self.states.get()

    @property
    def watched(self):
        return WatchedGroup(self.name, self.server.address, self.log)


@pytest.fixture
async def groups(tmp_path):
    groups = [Group(tmp_path, name) for name in ("g0", "g1")]
    for group in groups:
        await group.server.start()
    yield groups
    for group in groups:
        await group.server.stop(0)


class Heard:
    """What is said."""

    def __init__(self):
        self.lines = []
        self._more = asyncio.Event()

    def __call__(self, text):
        self.lines.append(text)
        self._more.set()

    async def line(self, *words):
        """The first that has all of these, when there is one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for text in self.lines:
                    if all(word in text for word in words):
                        return text
                self._more.clear()
                await self._more.wait()


@pytest.fixture
async def heard(groups, monkeypatch):
    """Of a warming of both groups."""
    monkeypatch.setattr(warming, "EVERY_S", 0.01)
    heard = Heard()
    heard.warming = Warming([group.watched for group in groups], heard)
    heard.running = tasks.spawn(heard.warming.run(), "warm")
    yield heard
    await tasks.cancel(heard.running)


def test_stages_of_starting_engines_are_listed_with_their_count():
    assert doing(State(starting=["importing SGLang"])) == "importing SGLang"
    assert doing(State(starting=["compiling kernels", "importing SGLang"])) == "compiling kernels, importing SGLang"
    assert doing(State(starting=["importing SGLang"] * 2)) == "importing SGLang (2 engines)"
    assert doing(State()) == "no engine is on its way"


def test_model_that_took_the_first_engine_is_listed_with_its_step():
    coming = Resident(model="8b", residency=common_pb2.WAKING, progress={"step": "capturing CUDA graphs"})
    assert doing(State(residents=[coming])) == "8b: capturing CUDA graphs"
    assert doing(State(residents=[coming], starting=["importing SGLang"])).startswith("importing SGLang, 8b: ")
    assert doing(State(residents=[Resident(model="8b", residency=common_pb2.WAKING)])) == "8b comes up"


async def test_warming_ends_when_a_model_answers_though_no_engine_was_seen_warm(groups, heard):
    one, other = groups
    one.tell(warm_engines=1)
    other.tell(residents=[Resident(model="8b", residency=common_pb2.WAKING)])
    assert await heard.line("g1: 8b comes up, ")
    other.tell(residents=[Resident(model="8b", residency=common_pb2.ACTIVE)])
    assert await heard.line("g1 has a model that answers (")
    async with asyncio.timeout(PATIENCE_S):
        await heard.running
    assert heard.warming.problems == {}


async def test_warming_ends_when_every_group_has_a_warm_engine(groups, heard):
    one, other = groups
    one.tell(warm_engines=1)
    assert await heard.line("g0 has a warm engine (")
    other.tell(starting=["importing SGLang"])
    other.tell(warm_engines=1)
    async with asyncio.timeout(PATIENCE_S):
        await heard.running
    assert heard.warming.problems == {}
    assert await heard.line("g1 has a warm engine (")


async def test_warming_repeats_one_line_for_all_groups_at_the_same_stage(groups, heard):
    one, other = groups
    for group in groups:
        group.tell(starting=["importing SGLang"])
    await heard.line("g0, g1: importing SGLang, ", " s")
    one.tell(starting=["compiling kernels"])
    await heard.line("g0: compiling kernels, ")
    await heard.line("g1: importing SGLang, ")
    for group in groups:
        group.tell(warm_engines=1)
    async with asyncio.timeout(PATIENCE_S):
        await heard.running


async def test_engine_that_dies_while_warming_is_reported_once_with_its_log(groups, heard):
    one, other = groups
    one.log.write_text('{"event": "ready"}\nTraceback (most recent call last):\nImportError: libcudart\n')
    for _ in range(2):
        one.tell(engines_error="engine 5 died", starting=["importing SGLang"])
    assert await heard.line("g0: engine 5 died; another one is started") == (
        f"g0: engine 5 died; another one is started (log: {one.log})"
    )
    one.tell(engines_error="engine 6 died", engines_given_up=True)
    why = f"engines do not start: engine 6 died; its log is {one.log}"
    said = await heard.line("engine 6 died")
    assert said == f"g0: {why}\n    Traceback (most recent call last):\n    ImportError: libcudart"
    other.tell(warm_engines=1)
    async with asyncio.timeout(PATIENCE_S):
        await heard.running
    assert heard.warming.problems == {"g0": why}
    assert sum("engine 5 died" in line for line in heard.lines) == 1


async def test_warming_past_its_longest_time_is_a_problem_of_the_group(groups, monkeypatch):
    monkeypatch.setattr(warming, "LONGEST_S", 0.0)
    heard = Heard()
    warm = Warming([group.watched for group in groups], heard)
    await warm.run()
    assert {*warm.problems} == {"g0", "g1"}
    assert await heard.line("g1: no engine is warm after 0 s: its gpu_scheduler does not answer; its log is ")
