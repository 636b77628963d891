import platform
import sys

import pytest

from tests import warm

STEPS = """
import resource, sys, threading
import torch
from psc_core.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def steps(found):
    for step in range(16):
        if step == 8:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        layers = [torch.ones(int(sys.argv[2]) << 18) for _ in range(3)]
        del layers
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

torch.set_num_threads(1)
found = []
thread = threading.Thread(target=steps, args=(found,))
thread.start()
thread.join()
print(found[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize("mebibytes", [48, 96])  # glibc's arenas of threads hold blocks below 64 MiB
def test_large_tensors_fault_in_once(mebibytes: int) -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", STEPS, how, str(mebibytes)]
        return int(warm.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < 100 < faults("return")


RELEASE = """
import re
from pathlib import Path
import torch
from psc_core.allocator import keep_freed_memory, release_freed_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

keep_freed_memory()
large, later = torch.ones(64 << 18), torch.ones(1)
del large
print(resident_mib())
release_freed_memory()
print(resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_kept_memory_can_be_released() -> None:
    run = warm.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, check=True)
    kept, released = map(int, run.stdout.split())
    assert kept - released > 56
