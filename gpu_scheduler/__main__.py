"""`python -m gpu_scheduler --config FILE`: the wiring of one group."""

from __future__ import annotations

from functools import partial

from balloond.client import BalloondClient
from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines import kinds, shared_board
from gpu_scheduler.engines.engine import Spawn
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.local import LocalServer
from gpu_scheduler.memory.devices import Devices
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.memory.memory_requests import MemoryRequests
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.observe import drop_left_over, follow_balloond, follow_loader, tell_demand
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.grammar_sandbox import GrammarSandbox
from gpu_scheduler.queue.intake import Intake
from gpu_scheduler.report import metrics
from gpu_scheduler.report.report import GroupReport
from gpu_scheduler.residency.activator import Activator
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.graceful_exit import GracefulExit
from gpu_scheduler.residency.handover import Handover
from gpu_scheduler.residency.residency import ResidencyController
from gpu_scheduler.residency.watchdog import watch_engines
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import Images, Resident, Residents
from gpu_scheduler.server import NAME, GpuSchedulerServicer
from loader.client import LoaderClient
from protos import gpu_scheduler_pb2_grpc
from services.rpc.watch import Watched
from services.service import Service, read_arguments, run
from services.telemetry import log, tracing

_LAST_ANSWERS_S = 0.2
"""Seconds that calls under way may take to end by themselves when the process stops."""


async def build(service: Service) -> None:
    config = service.config
    assert isinstance(config, GpuSchedulerConfig)
    log.bind(device="+".join(config.devices))
    if config.traces:
        service.on_stop(tracing.start(config.name, {"prism.group": config.group}))
    changes: Watched[None] = Watched(None)
    balloond = BalloondClient(config.balloond) if config.balloond else None
    loader = LoaderClient(config.loader) if config.loader else None
    devices = Devices(config.devices, balloond) if balloond is not None else None
    memory = GroupMemory(config.devices)
    images: Images = {}
    board_fd = shared_board.create()
    board = SharedBoard(board_fd)

    def resident_changed(resident: Resident) -> None:
        dispatcher.residency_changed(resident)
        changes.set(None)

    residents = Residents(resident_changed)
    # If limits are fixed, no memory of others helps a request.
    memory_requests = MemoryRequests(
        devices if config.elastic_kv else None,
        lambda request, granted: dispatcher.memory_answered(request, granted),
    )
    migrated_prefixes = MigratedPrefixes()
    dispatcher = Dispatcher(
        config.arbitration,
        residents,
        memory,
        board,
        lambda need: changes.set(None),
        lambda engine: residency.engine_died(engine),
        migrated_prefixes=migrated_prefixes,
        on_idle_or_busy=lambda: changes.set(None),
        request_memory=memory_requests.make,
    )
    engines = config.engines
    pools = {
        kind: WarmPool(
            Spawn(kind, engines.log_level, ranks=len(config.devices), start_timeout_s=engines.start_timeout_s),
            warm=engines.warm if kind == engines.kind else 0,
            limit=engines.limit,
            board_fd=board_fd,
            first_index=1 + 10_000 * number,
            # Memory that ranks open of each other's graphs by CUDA IPC is never closed: that of a model that left would
            # stay.
            one_model=len(config.devices) > 1 and config.devices[0].startswith("cuda:"),
        )
        for number, kind in enumerate(kinds.of_group(config.devices))
    }
    warm = WarmBooking(pools.values(), devices)
    bookings = Bookings(config, residents, devices, warm)
    weights = Weights(config, residents, loader, images)
    activation = Activator(config, residents, pools, bookings, weights)
    handover = Handover(residents, loader, migrated_prefixes)
    residency = ResidencyController(config, residents, dispatcher, activation, bookings, weights, handover, pools)
    report = GroupReport(config, residents, dispatcher, memory, pools, weights.why_no_image)
    leaving = GracefulExit(residents, dispatcher.all_requests, lambda: changes.set(None))

    def compiles(model: str) -> bool:
        adapter = residents.adapter(model)
        resident = residents.get(model if adapter is None else adapter.base)
        return resident is not None and bool(kinds.KINDS[activation.kind_of(resident)].grammar_sandbox)

    intake = Intake(dispatcher, GrammarSandbox(), compiles)
    servicer = GpuSchedulerServicer(
        devices, intake, dispatcher, residents, residency, handover, report, leaving, changes
    )
    service.add(gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, servicer, NAME)

    local = LocalServer(config.listen, intake, int(config.socket_mode, 8))
    await local.start()

    service.spawn(dispatcher.run(), "dispatcher")
    service.spawn(metrics.keep(report), "metrics")
    service.spawn(watch_engines(residents, dispatcher, engines.stall_timeout_s), "watch engines")
    if balloond is not None and devices is not None:
        service.spawn(follow_balloond(balloond, memory, dispatcher, changes, bookings.book_again), "follow balloond")
        service.spawn(drop_left_over(devices, memory, bookings.books, bookings.catch_up), "drop what is left over")
        service.spawn(warm.keep(), "book what idle engines keep")
        service.spawn(tell_demand(devices, memory, dispatcher.demand), "tell demand")
    if loader is not None:
        service.spawn(follow_loader(loader, images, residents, residency.files_read, changes), "follow loader")

    async def leave() -> None:
        if not service.failed:  # after a failure no plan is made any more, and there is nothing to wait for
            await leaving.leave()

    service.on_drain(leave)
    for pool in pools.values():
        pool.fill()
        service.on_stop(pool.close)
    # They run in reverse order: senders of requests learn that the group ends, and not that its engines died.
    service.on_stop(residency.close)
    service.on_stop(intake.close)
    service.on_stop(local.stop)
    service.on_stop(partial(service.server.stop, _LAST_ANSWERS_S))
    await service.ready()


def main() -> None:
    run(
        read_arguments(
            GpuSchedulerConfig, "The shared queue, the engines and the residencies of one group of devices."
        ),
        build,
    )


if __name__ == "__main__":
    main()
