"""What starting costs: the import, the first calls with a cold and with a warm cache; alone:

PYTHONPATH=.:tools python -m benchmarks.start
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.figure import Figure, figure

BASE = "import time, torch\nbegin = time.perf_counter()\n"
IMPORT = "import kvmem; kvmem.Config, kvmem.Manager\n"
# One prompt and one token more: what stands between a start and the first answer.
FIRST = """
import numpy as np
config = kvmem.Config(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", block_size=16,
                      device_blocks=64, host_blocks=64)
with kvmem.Manager(config) as m:
    seq = m.create(np.arange(100, dtype=np.int32))
    for _ in range(2):
        with m.step([seq]) as step:
            key = torch.zeros(step.num_tokens, 2, 64)
            step.write(0, key, key)
            step.attend(0, torch.zeros(step.num_tokens, 4, 64))
        m.append([seq], [1])
    m.free([seq])
"""
WARMUP = """
kvmem.warmup(kvmem.Config(num_layers=1, num_kv_heads=2, head_dim=64, device_blocks=1))
"""
TELL = "print(time.perf_counter() - begin)\n"


def seconds(code: str, cache: str) -> float:
    """What the code says it took in a process of its own, with its own cache folder."""
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", BASE + code + TELL],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def torch_alone() -> float:
    """Seconds of `import torch`, in a process of its own."""
    code = "import time; begin = time.perf_counter(); import torch\n" + TELL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def bench_start(repeats: int) -> list[Figure]:
    """Import, first steps with attention, warmup. A cold cache takes minutes on a busy machine."""
    torch, imports, cold, first, warmups = [], [], [], [], []
    for _ in range(1 if repeats < 100 else 2):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds(IMPORT + FIRST, cache))
            seconds(IMPORT + WARMUP, cache)
            for _ in range(3):
                torch.append(torch_alone())
                imports.append(seconds(IMPORT, cache))
                first.append(seconds(IMPORT + FIRST, cache))
                warmups.append(seconds(IMPORT + WARMUP, cache))
    sides = (
        ("import kvmem, after torch", imports),
        ("import and first steps, cold cache", cold),
        ("import and first steps, warm cache", first),
        ("import and warmup, warm cache", warmups),
    )
    return [figure("start", name, "s", 1, ours, "import torch", torch) for name, ours in sides]


if __name__ == "__main__":
    print(*bench_start(10), sep="\n")
