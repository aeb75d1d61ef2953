"""Memory: bounds, alignment, permissions, initialisation, races. Each planted fault is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.errors import (
    Misaligned,
    OutOfBounds,
    PtxError,
    Race,
    ReadOnly,
    Stuck,
    Uninitialised,
)
from tests.ptx.handmade import IN, OUT, each, module, run, words
from tests.ptx.machine import Buffer, Kernel

SHARED = ".visible .shared .align 16 .b8 tile[512];\n.shared .align 4 .b8 other[4];"
SLOT = "mov.u32 %r3, tile; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4;"


def refused(error: type[PtxError], body: str, **options: int | str | bool) -> str:
    """Run a body that must raise; the message and what it says of the instruction."""
    target = words(np.arange(64))
    before = target.copy()
    with pytest.raises(error) as found:
        run(body, words(np.arange(64)), target, shared=SHARED, **options)  # type: ignore[arg-type]
    assert np.array_equal(target, before), "buffers changed"
    notes = getattr(found.value, "__notes__", [])
    assert any("at instruction" in note for note in notes) or error is Stuck
    return str(found.value)


# -- bounds, alignment, permissions ---------------------------------------------------------------


def test_four_words_at_once() -> None:
    source = np.arange(128, dtype=np.uint32).reshape(32, 4)
    target = np.zeros_like(source)
    run(
        "ld.global.nc.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3];"
        "st.global.v4.u32 [%rd4], {%r5, %r4, %r3, %r2};",
        source,
        target,
    )
    assert np.array_equal(target, source[:, ::-1])


def test_bytes_and_halves_are_extended() -> None:
    values = np.array([0xFF80] * 32)
    assert each("ld.global.s8 %h1, [%rd3]; cvt.s32.s16 %r2, %h1; st.global.u32 [%rd4], %r2;",
                values)[0] == 0xFFFFFF80  # fmt: skip
    assert each("ld.global.u16 %h1, [%rd3]; cvt.u32.u16 %r2, %h1; st.global.u32 [%rd4], %r2;",
                values)[0] == 0xFF80  # fmt: skip


def test_a_load_of_four_words_at_an_odd_address_is_refused() -> None:
    message = refused(
        Misaligned, "add.s64 %rd3, %rd3, 4; ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3];"
    )
    assert "16 bytes" in message


def test_a_misaligned_store_to_shared_memory_is_refused() -> None:
    refused(Misaligned, f"{SLOT} st.shared.v2.u32 [%r5+4], {{%r1, %r1}};")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("ld.global.u32 %r2, [%rd3+1024];", "source"),
        ("ld.global.u32 %r2, [%rd1+-4];", "inside no buffer"),
        ("mov.u64 %rd3, 0; ld.global.u32 %r2, [%rd3];", "inside no buffer"),
        ("st.global.u32 [%rd4+1024], %r1;", "target"),
        (f"{SLOT} st.shared.u32 [%r5+448], %r1;", "other of 4"),
        ("st.shared.u32 [%rd1], %r1;", "32 bits"),
    ],
)
def test_what_lies_outside_is_refused(body: str, word: str) -> None:
    assert word in refused(OutOfBounds, body)


def test_a_store_to_what_is_only_read_is_refused() -> None:
    assert "source" in refused(ReadOnly, "st.global.u32 [%rd3], %r1;")


def test_threads_that_are_not_active_access_nothing() -> None:
    """Only thread 3's address is any good; the others don't use theirs."""
    target = words([0] * 32)
    run(
        "setp.eq.u32 %p1, %r1, 3; @!%p1 mov.u64 %rd3, 0; @!%p1 mov.u64 %rd4, 0;"
        "@%p1 ld.global.u32 %r2, [%rd3]; @%p1 st.global.u32 [%rd4], %r2;",
        words(np.arange(32) + 100),
        target,
    )
    assert target[3, 0] == 103
    assert target.sum() == 103


# -- initialisation -------------------------------------------------------------------------------


def test_shared_memory_that_nothing_wrote_is_not_read() -> None:
    message = refused(Uninitialised, f"{SLOT} ld.shared.u32 %r2, [%r5];")
    assert "never written" in message


def test_half_a_word_written_is_not_enough() -> None:
    refused(Uninitialised, f"{SLOT} cvt.u16.u32 %h1, %r1; st.shared.u16 [%r5], %h1;"
            "ld.shared.u32 %r2, [%r5];")  # fmt: skip


def test_each_block_has_its_own_shared_memory() -> None:
    """Block 0 writes, block 1 reads: what it finds is not what block 0 wrote."""
    refused(
        Uninitialised,
        f"{SLOT} mov.u32 %r6, %ctaid.x; setp.eq.u32 %p1, %r6, 0;"
        "@%p1 st.shared.u32 [%r5], %r1; @!%p1 ld.shared.u32 %r2, [%r5];",
        blocks=2,
    )


def test_output_that_nothing_wrote_is_not_read() -> None:
    with pytest.raises(Uninitialised):
        run("ld.global.u32 %r2, [%rd4];", words([0] * 32), words([0] * 32), initialised=False)


def test_what_a_launch_wrote_the_next_may_read() -> None:
    """And nothing else: of a buffer that both are given, the first writes the first half."""
    known = np.zeros(64 * 16, np.bool_)
    source = Buffer("source", IN, words([0] * 64))
    target = Buffer("target", OUT, words([0] * 64), True, False, known)

    def launch(body: str, threads: int) -> None:
        Kernel(module(body)).run((1, 1, 1), (threads, 1, 1), (IN, OUT), (source, target))

    read = "ld.global.u32 %r2, [%rd4];"
    with pytest.raises(Uninitialised):
        launch(read, 32)
    launch("st.global.u32 [%rd4], %r1;", 32)
    assert known.reshape(64, 16)[:32, :4].all() and known.sum() == 32 * 4
    launch(read, 32)
    with pytest.raises(Uninitialised):
        launch(read, 64)


def test_registers_that_nothing_wrote_are_not_read() -> None:
    refused(Uninitialised, "add.u32 %r2, %r9, 1;")
    refused(Uninitialised, "setp.lt.u32 %p1, %r1, 7; @%p1 mov.u32 %r9, 1; add.u32 %r2, %r9, 1;")
    target = words([0] * 32)
    run(
        "setp.lt.u32 %p1, %r1, 7; @%p1 mov.u32 %r9, 1; @!%p1 mov.u32 %r9, 2;"
        "st.global.u32 [%rd4], %r9;",
        words([0] * 32),
        target,
    )
    assert target[:, 0].tolist() == [1] * 7 + [2] * 25


# -- races ----------------------------------------------------------------------------------------

READ_NEXT = """
    add.u32 %r6, %r1, 1; and.b32 %r6, %r6, 63; shl.b32 %r6, %r6, 2; add.s32 %r6, %r3, %r6;
    ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd4], %r7;
"""


def test_a_barrier_orders_the_threads_of_a_block() -> None:
    target = words([0] * 64)
    run(f"{SLOT} st.shared.u32 [%r5], %r1; bar.sync 0; {READ_NEXT}",
        words([0] * 64), target, threads=64, shared=SHARED)  # fmt: skip
    assert target[:, 0].tolist() == [(i + 1) % 64 for i in range(64)]


def test_without_a_barrier_it_is_a_race() -> None:
    """The schedule here would give the right result; it is refused all the same."""
    message = refused(Race, f"{SLOT} st.shared.u32 [%r5], %r1; {READ_NEXT}", threads=64)
    assert "no barrier" in message


def test_a_barrier_of_the_warp_is_not_enough_for_two_warps() -> None:
    body = f"{SLOT} st.shared.u32 [%r5], %r1; bar.warp.sync 0xffffffff; "
    refused(Race, body + READ_NEXT, threads=64)
    target = words([0] * 64)
    within = READ_NEXT.replace("and.b32 %r6, %r6, 63;", "xor.b32 %r6, %r1, 1;")
    run(body + within, words([0] * 64), target, threads=64, shared=SHARED)
    assert target[:, 0].tolist() == [i ^ 1 for i in range(64)]


def test_a_store_after_others_have_read_is_a_race() -> None:
    """Write, barrier, read the neighbour's, write one's own: the second barrier is missing."""
    body = f"{SLOT} st.shared.u32 [%r5], %r1; bar.sync 0; {READ_NEXT}"
    refused(Race, f"{body} st.shared.u32 [%r5], %r1;", threads=64)
    run(f"{body} bar.sync 0; st.shared.u32 [%r5], %r1;",
        words([0] * 64), words([0] * 64), threads=64, shared=SHARED)  # fmt: skip


def test_two_threads_that_store_to_one_place() -> None:
    refused(Race, "st.global.u32 [%rd2], %r1;")
    refused(Race, "st.global.u32 [%rd2], 7;")  # equal values are a race too


@pytest.mark.parametrize("wave_threads", [32, 8192])
def test_two_blocks_that_store_to_one_place(wave_threads: int) -> None:
    """Whether the blocks run together or one after the other."""
    refused(Race, "st.global.u32 [%rd4], %r1;", blocks=2, wave_threads=wave_threads)


@pytest.mark.parametrize("wave_threads", [32, 8192])
def test_a_block_that_reads_what_another_wrote(wave_threads: int) -> None:
    body = """
        mov.u32 %r6, %ctaid.x; setp.eq.u32 %p1, %r6, 0;
        @%p1 st.global.u32 [%rd4], %r1; bar.sync 0; @!%p1 ld.global.u32 %r2, [%rd4];
    """
    refused(Race, body, blocks=2, wave_threads=wave_threads)


def test_the_read_only_path_meets_no_store() -> None:
    """`ld.global.nc` may give old bytes where the kernel writes, even to the thread itself."""
    refused(Race, "ld.global.nc.u32 %r2, [%rd4]; bar.sync 0; st.global.u32 [%rd4], %r2;")
    refused(Race, "st.global.u32 [%rd4], %r1; bar.sync 0; ld.global.nc.u32 %r2, [%rd4];")
    run("ld.global.u32 %r2, [%rd4]; st.global.u32 [%rd4], %r2;", words([0] * 32), words([0] * 32))


def test_narrow_and_wide_accesses_of_one_place() -> None:
    """A byte of a word that another thread stores is a race; a byte beside it isn't."""
    narrow = "cvt.u16.u32 %h1, %r1; add.s64 %rd6, %rd2, {}; sub.s64 %rd6, %rd6, %rd7;"
    byte = "cvt.u64.u32 %rd7, %r1; " + narrow + " st.global.u8 [%rd6], %h1;"
    refused(Race, "st.global.u32 [%rd4], %r1; " + byte.format(34))
    target = words([0] * 32)
    run(byte.format(31), words([0] * 32), target)
    assert target.view(np.uint8).reshape(-1)[:32].tolist() == list(range(31, -1, -1))


# -- atomics --------------------------------------------------------------------------------------


def test_atomics_add_up_and_give_what_was_there() -> None:
    target = words([5] * 64)
    run(
        "red.global.add.u32 [%rd2], %r1; add.s64 %rd3, %rd2, 16;"
        "atom.global.add.u32 %r2, [%rd3], 1; st.global.u32 [%rd4+512], %r2;",
        words([0] * 32),
        target,
    )
    assert target[0, 0] == 5 + sum(range(32))
    assert target[1, 0] == 5 + 32
    assert sorted(target[32:64, 0]) == list(range(5, 37))


def test_compare_and_swap_lets_one_win() -> None:
    target = words([0] * 32)
    run(
        "atom.global.cas.b32 %r2, [%rd2], 0, 77; setp.eq.u32 %p1, %r2, 0;"
        "@%p1 st.global.u32 [%rd2+16], %r1;",
        words([0] * 32),
        target,
    )
    assert target[0, 0] == 77


def test_an_atomic_and_a_plain_load_race() -> None:
    refused(Race, "red.global.add.u32 [%rd2], 1; ld.global.u32 %r2, [%rd2];")
    refused(Race, "red.global.add.u32 [%rd2], 1; st.global.u32 [%rd4], %r1;")
    # Other blocks may still be adding, whatever barrier this one has passed.
    refused(Race, "red.global.add.u32 [%rd2], 1; bar.sync 0; ld.global.u32 %r2, [%rd2];")


def test_an_atomic_in_shared_memory_is_ordered_by_a_barrier() -> None:
    target = words([0] * 32)
    run(
        "mov.u32 %r3, other; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r3], 0; bar.sync 0;"
        "atom.shared.add.u32 %r4, [%r3], 2; bar.sync 0; ld.shared.u32 %r5, [%r3];"
        "st.global.u32 [%rd4], %r5;",
        words([0] * 32),
        target,
        shared=SHARED,
    )
    assert target[:, 0].tolist() == [64] * 32


def test_an_endless_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ptx.machine.MAX_STEPS", 1000)
    refused(Stuck, "AGAIN: add.u32 %r1, %r1, 1; bra AGAIN;")
