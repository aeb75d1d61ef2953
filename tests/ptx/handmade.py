"""Small kernels in PTX by hand: the frame around a body, and buffers that its results go to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.machine import Buffer, Counts, Kernel

IN, OUT = 0x7F0000010000, 0x7F0000020000

#: Loads of the parameters and the thread's number, in %rd1 (in), %rd2 (out), %r1 (thread),
#: %rd3 = in + 16 * thread, %rd4 = out + 16 * thread.
PROLOGUE = """
    ld.param.u64 %rd1, [source]; ld.param.u64 %rd2, [target];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 16;
    add.s64 %rd3, %rd1, %rd5;
    add.s64 %rd4, %rd2, %rd5;
"""


def module(body: str, *, shared: str = "", prologue: str = PROLOGUE) -> str:
    """A whole module around the statements of a kernel with two addresses."""
    return f"""
.version 9.0
.target sm_90
.address_size 64
{shared}
.visible .entry kernel(.param .u64 source, .param .u64 target)
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<32>;
    .reg .f32 %f<32>;
    .reg .b64 %rd<16>;
    .reg .f64 %fd<8>;
    {prologue}
    {body}
    ret;
}}
"""


def run(
    body: str,
    source: NDArray[Any],
    target: NDArray[Any],
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: str = "",
    initialised: bool = True,
    wave_threads: int = 8192,
) -> Counts:
    """Run a body; `source` is only read, `target` is changed in place."""
    return Kernel(module(body, shared=shared)).run(
        (blocks, 1, 1),
        (threads, 1, 1),
        (IN, OUT),
        (
            Buffer("source", IN, source),
            Buffer("target", OUT, target, writable=True, initialised=initialised),
        ),
        wave_threads=wave_threads,
    )


def words(values: Any, dtype: str = "u4") -> NDArray[Any]:
    """One value a thread, each at the start of 16 bytes, as the prologue's addresses have it."""
    column = np.asarray(values, dtype).reshape(-1)
    rows = np.zeros((column.size, 16 // column.itemsize), column.dtype)
    rows[:, 0] = column
    return rows


def each(body: str, values: Any, given: str = "u4", result: str = "u4") -> NDArray[Any]:
    """The result of a body in 32 threads: it finds its value at [%rd3] and stores to [%rd4]."""
    source = words(values, given)
    target = words(np.zeros(source.shape[0], result), result)
    run(body, source, target, threads=source.shape[0])
    return target[:, 0]
