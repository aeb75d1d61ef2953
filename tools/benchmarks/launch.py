"""What a kernel launch costs in Python, against a driver that does nothing; alone:

PYTHONPATH=.:tools python -m benchmarks.launch

The driver is `stub_driver.c`, so no GPU is needed and none is measured: a real driver adds its own
microseconds. A process of its own finds it as libcuda.so.1, for the path is read at its start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, figure

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub_driver.c")
BATCH = 500  # launches in one timing: the clock costs as much as a tenth of one
NUMBA = "Numba's dispatcher"
ALONE = "cuda.core.launch alone"


def build_stub(folder: Path) -> None:
    """Compile the driver into a folder; RuntimeError without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler (cc) to build the stub driver with")
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(STUB)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip


def under_stub(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the stub driver in place of a real one."""
    paths = [str(ROOT), str(ROOT / "tools")]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": ":".join(paths)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def bench_launch(repeats: int) -> list[Figure]:
    """Launches of two kernels; nothing where the CUDA packages or a C compiler are missing."""
    with tempfile.TemporaryDirectory() as name:
        try:
            build_stub(Path(name))
        except RuntimeError as error:
            print(f"launch: left out, {error}", file=sys.stderr)
            return []
        done = under_stub(["-m", "benchmarks.launch", "--child", str(repeats)], Path(name))
    if done.returncode:
        print(f"launch: left out, {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return []
    figures = []
    for row in json.loads(done.stdout):
        made = figure("launch", row["name"], "us", 1e6, row["ours"], row["peer"], row["other"])
        figures.append(made.at_most(3) if row["gate"] else made)
    return figures


# -- in the process with the stub -----------------------------------------------------------------


def turns(sides: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds a call of each side, in turns, BATCH calls at a time."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, run in enumerate(sides):
            begin = time.perf_counter()
            for _ in range(BATCH):
                run()
            seconds[side].append((time.perf_counter() - begin) / BATCH)
    return seconds


def child(repeats: int) -> list[dict[str, Any]]:
    """Time `GpuDevice.launch`, `cuda.core.launch` and Numba's dispatcher with equal arguments."""
    import cuda.core
    import numba.cuda
    import numpy as np

    import cuda_kernels
    from cuda_kernels.cache_write.cuda_call import KERNELS
    from cuda_kernels.cuda.array import DeviceArray
    from cuda_kernels.cuda.kernel import Launch
    from cuda_kernels.cuda.launch import GpuDevice

    device = GpuDevice()
    source, numbers = KERNELS[8], tuple(range(1, 20))
    launch = Launch(source, (64, 2, 1), numbers)
    kernel = cuda.core.ObjectCode.from_cubin(_machine_code(device, source)).get_kernel(source.name)
    config = cuda.core.LaunchConfig(grid=(64, 2, 1), block=(128, 1, 1))
    queue = cuda.core.Stream.from_handle(0x5550)

    def nineteen(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t):  # type: ignore[no-untyped-def]
        pass

    slow = numba.cuda.jit(nineteen)[(64, 2, 1), (128, 1, 1)]

    def rows(shape: tuple[int, ...], kind: str) -> DeviceArray:
        return DeviceArray(0x7F0000000000, shape, np.dtype(kind), device)

    arena, new = rows((64, 2 * 8 * 16 * 128), "u2"), rows((64, 8, 128), "u2")
    slots = rows((64,), "i8")

    def public() -> None:
        cuda_kernels.write_kv(
            arena, new, new, dtype="bfloat16", key_offset=0, value_offset=8 * 16 * 128,
            block_size=16, num_kv_heads=8, head_dim=128, value_dim=128, slot_mapping=slots,
            check=False, stream=0x5550,
        )  # fmt: skip

    sides: list[Callable[[], Any]] = [
        lambda: device.launch(launch, 0x5550),
        lambda: cuda.core.launch(queue, config, kernel, *numbers),
        lambda: slow(*numbers),
        public,
    ]
    for side in sides:
        side()
    ours, alone, dispatcher, whole = turns(sides, max(10, repeats // 2))
    name = "a launch of 19 arguments, stub driver"
    return [
        {"name": name, "ours": ours, "peer": NUMBA, "other": dispatcher, "gate": True},
        {"name": name, "ours": ours, "peer": ALONE, "other": alone, "gate": False},
        {"name": "write_kv(check=False), stub driver", "ours": whole, "peer": ALONE,
         "other": alone, "gate": False},
    ]  # fmt: skip


def _machine_code(device: Any, source: Any) -> bytes:
    from cuda_kernels.cuda.compile import compile_kernel

    return compile_kernel(source, device.capability).cubin


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(int(sys.argv[2]))))
    else:
        print(*bench_launch(200), sep="\n")
