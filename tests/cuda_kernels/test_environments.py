"""The kernels in other processes: generic CPU, workqueue threads; and what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMOKE = """
import numpy as np, cuda_kernels
from cuda_kernels.attention.spec import SPEC
def once(rng, dtype="float32", kv_dtype=None):
    a = SPEC.make_inputs(rng, dtype=dtype, kv_dtype=kv_dtype, seq_lens=[2100, 300, 0, 17],
        query_lens=[1, 300, 1, 5], num_heads=8, num_kv_heads=4, head_dim=128, value_dim=64,
        block_size=16, softcap=20.0, alibi=np.full(8, 0.01, np.float32))
    cuda_kernels.paged_attention(**a)
    return a
def check(a):
    from cuda_kernels.dtypes import bits_to_float
    error = np.abs(bits_to_float(a["out"], a["dtype"]) - SPEC.reference(a)[0]).max()
    assert error <= 5 * SPEC.tolerance[a["dtype"]], error
"""

EVERY_DTYPE = (
    SMOKE
    + """
for dtype in ("float32", "bfloat16", "float16"):
    for kv_dtype in (None, "fp8_e4m3"):
        check(once(np.random.default_rng(3), dtype, kv_dtype))
from cuda_kernels.cache_write.spec import SPEC as WRITE
for dtype in ("float32", "bfloat16", "float16"):
    a = WRITE.make_inputs(np.random.default_rng(3), dtype=dtype, kv_dtype="fp8_e4m3",
        num_tokens=40, num_kv_heads=3, head_dim=80, value_dim=7, block_size=16)
    expected = WRITE.reference(a)
    cuda_kernels.write_kv(**a)
    assert np.array_equal(a["arena"], expected)
"""
)

SMALL = """
import numpy as np, cuda_kernels
from cuda_kernels.attention.spec import SPEC
from cuda_kernels.cache_write.spec import SPEC as WRITE
rng = np.random.default_rng(3)
for dtype in ("float32", "bfloat16"):
    a = SPEC.make_inputs(rng, dtype=dtype, kv_dtype="fp8_e4m3", seq_lens=[5], query_lens=[1],
        num_heads=2, num_kv_heads=1, head_dim=8, value_dim=4, block_size=4)
    cuda_kernels.paged_attention(**a)
    from cuda_kernels.dtypes import bits_to_float
    error = np.abs(bits_to_float(a["out"], dtype) - SPEC.reference(a)[0]).max()
    assert error <= 5 * SPEC.tolerance[dtype], error
    a = WRITE.make_inputs(rng, dtype=dtype, kv_dtype="fp8_e4m3", num_tokens=9, num_kv_heads=2,
        head_dim=5, value_dim=7, block_size=4)
    expected = WRITE.reference(a)
    cuda_kernels.write_kv(**a)
    assert np.array_equal(a["arena"], expected)
"""

# Where the processor has no vectors of 16, LLVM makes two of each: the same code, slower.
SIXTEEN_LANES = (
    """
from numba.core.registry import cpu_target
codegen = cpu_target.target_context.codegen()
triple, name, features = codegen.magic_tuple()
codegen.magic_tuple = lambda: (triple, name, features + ",+avx512f")
from cuda_kernels import vectors
assert vectors.LANES == 16
"""
    + EVERY_DTYPE
)

WORKQUEUE = (
    SMOKE
    + """
import threading, numba
results, failures = {}, []
def work(name):
    try:
        for k in range(8):
            results[name, k] = once(np.random.default_rng(k))
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not failures, failures
assert numba.threading_layer() == "workqueue", numba.threading_layer()
for k in range(8):
    assert np.array_equal(results[0, k]["out"], results[1, k]["out"])
check(results[0, 3])
"""
)

MOVES = """
import numpy as np
from cuda_kernels import move_frames
rng = np.random.default_rng(0)
for frame_bytes in (1, 64, 1000, 4096):
    source = rng.integers(0, 256, (7, frame_bytes), np.uint8)
    target = np.full((9, frame_bytes), 255, np.uint8)
    expected = target.copy()
    expected[[8, 2]] = source[[3, 6]]
    move_frames(target, np.array([8, 2]), source, np.array([3, 6]))
    assert np.array_equal(target, expected), frame_bytes
"""

IMPORT = """
import sys
import cuda_kernels
from cuda_kernels.attention import spec
assert not [m for m in sys.modules if m.split(".")[0] in ("numba", "torch", "kvmem")]
"""


def run_python(source: str, **environment: str) -> None:
    """Run a script in a fresh interpreter; on failure show what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_generic_cpu() -> None:
    """No fused multiply-add, no AVX, no conversion of float16: other roundings, same tolerances."""
    run_python(EVERY_DTYPE, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")


def test_sixteen_lanes() -> None:
    """What processors with AVX-512 run, on any processor; Numba's cache can't tell the two."""
    run_python(SIXTEEN_LANES, NUMBA_CACHE_DIR=os.environ["NUMBA_CACHE_DIR"] + "-sixteen")


@pytest.mark.parametrize("threads", ["2"])
def test_two_python_threads_under_workqueue(threads: str) -> None:
    """Two threads inside workqueue's parallel code abort the process; the lock keeps them out."""
    run_python(WORKQUEUE, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS=threads)


@pytest.mark.parametrize(
    "environment",
    [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {"NUMBA_DISABLE_JIT": "1"}],
    ids=["generic", "python"],
)
def test_moves_without_the_instructions_of_this_processor(environment: dict[str, str]) -> None:
    run_python(MOVES, **environment)


def test_fp8_as_plain_python() -> None:
    """Under NUMBA_DISABLE_JIT the plain twin attends, and NumPy narrows."""
    run_python(SMALL, NUMBA_DISABLE_JIT="1")


def test_import_loads_neither_numba_nor_torch() -> None:
    run_python(IMPORT)
