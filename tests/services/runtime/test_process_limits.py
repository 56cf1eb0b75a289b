import subprocess
import sys

import pytest

ARENAS = """
import threading
{before}
together = threading.Barrier(12)

def work():
    together.wait()
    blocks = [bytearray(100_000) for _ in range(50)]
    together.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# A thread's heap begins at a multiple of 64 MiB; that of the process has a name.
starts = [int(line.split("-")[0], 16) for line in open("/proc/self/maps") if line.split()[1].startswith("rw")]
print(sum(start % (64 << 20) == 0 for start in starts))
"""


def arenas(before: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS.format(before=before)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_threads_of_a_service_share_the_heap():
    free, few = arenas(""), arenas("from services.runtime import process_limits; process_limits.few_arenas()")
    assert few <= 1 < free, (few, free)
