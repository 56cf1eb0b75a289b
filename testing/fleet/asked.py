"""`python -m testing.fleet.asked ADDRESS`: prints a line for each model of a gpu_scheduler: its name, its requests, the
tokens that it made."""

import asyncio
import sys

from gpu_scheduler.client import GpuSchedulerClient


async def main() -> None:
    for resident in (await GpuSchedulerClient(sys.argv[1]).state()).residents:
        print(resident.model, resident.running + resident.waiting, resident.decode_tokens)


if __name__ == "__main__":
    asyncio.run(main())
