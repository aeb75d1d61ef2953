"""Asynchronous copies to shared memory: what arrives, and each way of not waiting for it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx.errors import Misaligned, OutOfBounds, PtxError, Race, Uninitialised, UnknownPtx
from tests.ptx.handmade import module, run
from tests.ptx.machine import Kernel

SHARED = ".shared .align 16 .b8 tile[1024];"
#: %r5: this thread's 16 bytes; %r6: those of the next of 64 threads.
PLACES = """
    mov.u32 %r3, tile; shl.b32 %r4, %r1, 4; add.s32 %r5, %r3, %r4;
    add.u32 %r6, %r1, 1; and.b32 %r6, %r6, 63; shl.b32 %r6, %r6, 4; add.s32 %r6, %r3, %r6;
"""
COPY = "cp.async.cg.shared.global.L2::128B [%r5], [%rd3], 16, 16;"
WAIT, BARRIER = "cp.async.wait_all;", "bar.sync 0;"
OWN = "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5];"
NEXT = "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r6];"
STORE = "st.global.v4.u32 [%rd4], {%r10, %r11, %r12, %r13};"


def rows() -> NDArray[np.uint32]:
    return np.arange(256, dtype=np.uint32).reshape(64, 4) + 1


def result(*body: str) -> NDArray[np.uint32]:
    target = np.zeros_like(rows())
    run(PLACES + " ".join(body), rows(), target, threads=64, shared=SHARED)
    return target


def refused(error: type[PtxError], *body: str) -> None:
    with pytest.raises(error):
        result(*body)


def test_a_copy_arrives() -> None:
    """For the thread itself after its wait, for the others after a barrier that comes later."""
    assert np.array_equal(result(COPY, WAIT, OWN, STORE), rows())
    assert np.array_equal(result(COPY, WAIT, BARRIER, NEXT, STORE), np.roll(rows(), -1, axis=0))


def test_zeros_where_nothing_is_read() -> None:
    """Some threads read no byte; for them the source may be anywhere."""
    some = (
        "and.b32 %r7, %r1, 1; shl.b32 %r7, %r7, 4; setp.eq.u32 %p1, %r7, 0; @%p1 mov.u64 %rd3, 16;"
    )
    found = result(some, COPY.replace("16, 16;", "16, %r7;"), WAIT, OWN, STORE)
    assert np.array_equal(found, rows() * (np.arange(64) % 2)[:, None])


def test_only_some_threads_copy_and_wait() -> None:
    half = "setp.lt.u32 %p1, %r1, 40;"
    zeros = "st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};"
    found = result(half, f"@%p1 {COPY} @%p1 {WAIT} @!%p1 {zeros}", BARRIER, OWN, STORE)
    expected = rows()
    expected[40:] = np.arange(40, 64)[:, None]
    assert np.array_equal(found, expected)
    refused(Race, half, COPY, f"@%p1 {WAIT}", OWN, STORE)
    later = result(half, COPY, f"@%p1 {WAIT}", f"@!%p1 {WAIT}", OWN, STORE)
    assert np.array_equal(later, rows())


def test_nobody_touches_it_before_the_wait() -> None:
    for use in (OWN, NEXT, "st.shared.u32 [%r5], %r1;", COPY):
        refused(Race, COPY, use)
        refused(Race, COPY, BARRIER, use)


def test_others_need_a_barrier_after_the_wait() -> None:
    refused(Race, COPY, WAIT, NEXT)
    refused(Race, COPY, BARRIER, WAIT, NEXT)
    refused(Race, COPY, WAIT, COPY.replace("%r5", "%r6"))


def test_a_wait_is_for_earlier_copies_only() -> None:
    refused(Race, WAIT, COPY, OWN)
    result(COPY, WAIT, COPY, WAIT, OWN)


def test_a_copy_over_what_others_may_still_read() -> None:
    read = (COPY, WAIT, BARRIER, NEXT)
    refused(Race, *read, COPY)
    result(*read, BARRIER, COPY, WAIT)


def test_what_was_there_is_lost() -> None:
    """Also where the copy is refused later on: nothing is known of half a copy."""
    refused(Race, "st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};", COPY, OWN)
    refused(Uninitialised, OWN)


def test_the_source_is_checked() -> None:
    refused(OutOfBounds, "add.s64 %rd3, %rd3, 4096;", COPY)
    refused(Misaligned, "add.s64 %rd3, %rd3, 4;", COPY)
    refused(Misaligned, "add.s32 %r5, %r5, 8;", COPY)
    refused(OutOfBounds, "add.s32 %r5, %r5, 1024;", COPY)
    # Of what another thread stores to, before the copy or until the wait.
    own, other = "st.global.u32 [%rd4], %r1;", "xor.b32 %r7, %r1, 1; mul.wide.u32 %rd6, %r7, 16;"
    neighbours = other + "add.s64 %rd3, %rd2, %rd6;"
    refused(Race, own, neighbours, COPY)
    refused(Race, neighbours, COPY, own, WAIT)
    refused(Race, neighbours, COPY, BARRIER, own, WAIT)
    result(own, BARRIER, neighbours, COPY, WAIT)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.ca.shared.global [%r5], [%rd3], 16, 16;",
        "cp.async.cg.shared.global [%r5], [%rd3], 8, 8;",
        "cp.async.cg.shared.global [%r5], [%rd3], 16;",
        "cp.async.cg.shared.global.L3::128B [%r5], [%rd3], 16, 16;",
        "cp.async.commit_group;",
        "cp.async.wait_group 0;",
        "cp.async.bulk.prefetch.L2.global [%rd3], 16;",
    ],
)
def test_other_forms_are_not_known(text: str) -> None:
    with pytest.raises(UnknownPtx):
        Kernel(module(text, shared=SHARED))


def test_a_part_of_a_line_is_refused() -> None:
    refused(PtxError, COPY.replace("16, 16;", "16, 8;"))
