"""Branches, barriers, shuffles, votes and matrix products, straight and divergent."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_kernels.dtypes import bits_to_float, float_to_bits
from tests.ptx.errors import (
    Divergent,
    Misaligned,
    PtxError,
    Race,
    Stuck,
    Uninitialised,
    UnknownPtx,
)
from tests.ptx.handmade import each, run, words


def test_a_loop_with_another_number_of_turns_in_each_thread() -> None:
    found = each(
        """
        mov.u32 %r2, 0; mov.u32 %r3, 0;
        TOP: setp.ge.u32 %p1, %r3, %r1; @%p1 bra DONE;
        add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1; bra TOP;
        DONE: st.global.u32 [%rd4], %r2;
        """,
        np.zeros(32),
    )
    assert found.tolist() == [i * (i - 1) // 2 for i in range(32)]


def test_both_sides_of_a_branch_meet_again() -> None:
    found = each(
        """
        and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
        mov.u32 %r3, 10; bra JOIN;
        EVEN: mov.u32 %r3, 20;
        JOIN: shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1; st.global.u32 [%rd4], %r4;
        """,
        np.zeros(32),
    )
    assert found.tolist() == [10, 20] * 16


# -- shuffles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("down", 3, 31, lambda i: i + 3 if i + 3 < 32 else i),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("idx", 7, 31, lambda i: 7),
        ("idx", 2, 0x181F, lambda i: i // 8 * 8 + 2),
        ("down", 3, 0x181F, lambda i: i + 3 if i % 8 + 3 < 8 else i),
        ("up", 3, 0x1800, lambda i: i - 3 if i % 8 >= 3 else i),
    ],
)
def test_shuffles(mode: str, by: int, clamp: int, source: object) -> None:
    assert callable(source)
    values = np.arange(32) * 3 + 1
    found = each(
        f"ld.global.u32 %r2, [%rd3]; shfl.sync.{mode}.b32 %r3|%p1, %r2, {by}, {clamp}, -1;"
        "@!%p1 add.u32 %r3, %r3, 1000; st.global.u32 [%rd4], %r3;",
        values,
    )
    for lane in range(32):
        origin = source(lane)
        outside = origin == lane and mode in ("up", "down")
        assert found[lane] == values[origin] + 1000 * outside


def test_a_shuffle_by_half_a_warp_is_refused() -> None:
    for body in (
        "setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        "setp.lt.u32 %p1, %r1, 16; @!%p1 bra OUT; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; OUT:",
        "setp.lt.u32 %p1, %r1, 16; @!%p1 ret; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
    ):
        with pytest.raises(Divergent):
            run(body, words([0] * 32), words([0] * 32))


def test_a_shuffle_by_the_lanes_it_names() -> None:
    target = words([9] * 32)
    run(
        "setp.lt.u32 %p1, %r1, 16; @!%p1 bra OUT;"
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0x0000ffff; st.global.u32 [%rd4], %r2; OUT:",
        words([0] * 32),
        target,
    )
    assert target[:, 0].tolist() == [i ^ 1 for i in range(16)] + [9] * 16


def test_a_lane_outside_its_own_mask_is_refused() -> None:
    with pytest.raises(Divergent, match="doesn't name it"):
        run("shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff;", words([0] * 32), words([0] * 32))


def test_a_shuffle_from_a_lane_that_does_not_take_part_is_refused() -> None:
    with pytest.raises(Divergent):
        run(
            "setp.lt.u32 %p1, %r1, 16; @!%p1 bra OUT;"
            "shfl.sync.bfly.b32 %r2, %r1, 16, 31, 0x0000ffff; OUT:",
            words([0] * 32),
            words([0] * 32),
        )


def test_lanes_wait_for_those_that_come_later() -> None:
    """A loop in which one lane goes round once more before all meet at the shuffle."""
    found = each(
        """
        mov.u32 %r2, 0; setp.eq.u32 %p1, %r1, 4;
        TOP: @!%p1 bra MEET;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; bra TOP;
        MEET: shfl.sync.idx.b32 %r3, %r2, 4, 31, -1; st.global.u32 [%rd4], %r3;
        """,
        np.zeros(32),
    )
    assert found.tolist() == [3] * 32


def test_votes() -> None:
    ballot = each(
        "setp.lt.u32 %p1, %r1, 5; vote.sync.ballot.b32 %r2, %p1, -1; st.global.u32 [%rd4], %r2;",
        np.zeros(32),
    )
    assert ballot.tolist() == [31] * 32
    for mode, bound, expected in (("all", 32, 1), ("all", 31, 0), ("any", 1, 1), ("any", 0, 0)):
        found = each(
            f"setp.lt.u32 %p1, %r1, {bound}; vote.sync.{mode}.pred %p2, %p1, -1;"
            "selp.u32 %r2, 1, 0, %p2; st.global.u32 [%rd4], %r2;",
            np.zeros(32),
        )
        assert found.tolist() == [expected] * 32


# -- barriers -------------------------------------------------------------------------------------


def test_a_barrier_in_some_lanes_of_a_warp_is_refused() -> None:
    with pytest.raises(Divergent, match="barrier"):
        run("setp.lt.u32 %p1, %r1, 9; @%p1 bar.sync 0;", words([0] * 32), words([0] * 32))


def test_a_barrier_that_a_warp_never_reaches() -> None:
    with pytest.raises(Stuck, match="never reach"):
        run("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0;", words([0] * 64), words([0] * 64),
            threads=64)  # fmt: skip


def test_a_branch_called_uniform_that_is_not() -> None:
    with pytest.raises(Divergent, match=r"bra\.uni"):
        run("setp.lt.u32 %p1, %r1, 9; @%p1 bra.uni OUT; OUT:", words([0] * 32), words([0] * 32))


# -- matrices -------------------------------------------------------------------------------------


def test_a_matrix_is_transposed() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8) * 7
    found = each(
        "ld.global.u32 %r2, [%rd3]; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;"
        "st.global.u32 [%rd4], %r3;",
        matrix.view(np.uint32).reshape(-1),
    )
    halves = np.ascontiguousarray(found).view(np.uint16).reshape(8, 8)
    assert np.array_equal(halves, matrix.T)


MMA = """
    ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3];
    ld.global.v2.u32 {%r6, %r7}, [%rd3+512];
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3+1024];
    GUARD mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32
        {%f5, %f6, %f7, %f8}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f1, %f2, %f3, %f4};
    st.global.v4.f32 [%rd4], {%f5, %f6, %f7, %f8};
"""


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_a_matrix_product(seed: int, kind: str, dtype: str) -> None:
    """The fragments as the PTX manual draws them, written down by hand once more."""
    rng = np.random.default_rng(seed)
    a, b = (float_to_bits(rng.normal(size=shape), dtype) for shape in ((16, 16), (16, 8)))
    c = rng.normal(size=(16, 8)).astype(np.float32)
    source = np.zeros((96, 4), np.uint32)
    for lane in range(32):
        group, quad = divmod(lane, 4)
        corners = ((group, 2 * quad), (group + 8, 2 * quad))
        for i, (row, column) in enumerate([*corners, *((r, k + 8) for r, k in corners)]):
            source[lane, i] = int(a[row, column]) | int(a[row, column + 1]) << 16
        for i, row in enumerate((2 * quad, 2 * quad + 8)):
            source[32 + lane, i] = int(b[row, group]) | int(b[row + 1, group]) << 16
        for i, (row, column) in enumerate(corners):
            source[64 + lane, 2 * i : 2 * i + 2] = c[row, column : column + 2].view(np.uint32)
    target = np.zeros((32, 4), np.float32)
    run(MMA.replace("KIND", kind).replace("GUARD", ""), source, target)
    expected = bits_to_float(a, dtype).astype(np.float64) @ bits_to_float(b, dtype) + c
    for lane in range(32):
        group, quad = divmod(lane, 4)
        rows = (expected[group], expected[group + 8])
        want = [row[2 * quad + e] for row in rows for e in range(2)]
        assert np.allclose(target[lane], want, rtol=0, atol=1e-5)


def test_a_matrix_product_in_half_a_warp_is_refused() -> None:
    source, target = np.zeros((96, 4), np.uint32), np.zeros((32, 4), np.float32)
    body = MMA.replace("KIND", "bf16").replace("GUARD", "setp.lt.u32 %p1, %r1, 16; @%p1")
    with pytest.raises(Divergent, match="mma in 16 of 32 lanes"):
        run(body, source, target)


MATRICES = """
    mov.u32 %r3, tile; shl.b32 %r4, %r1, 4; add.s32 %r5, %r3, %r4;
    ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd3]; st.shared.v4.u32 [%r5], {%r6, %r7, %r8, %r9};
"""
LOAD_MATRICES = (
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r6, %r7, %r8, %r9}, [%r5];"
    "st.global.v4.u32 [%rd4], {%r6, %r7, %r8, %r9};"
)
TILE = ".shared .align 16 .b8 tile[1024];"


def test_four_matrices_are_loaded_and_transposed(seed: int) -> None:
    """Row j of matrix i lies where lane 8 * i + j says; here in another order."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 2**16, (64, 8), dtype=np.uint16)
    target = np.zeros((64, 4), np.uint32)
    other = "xor.b32 %r4, %r1, 13; shl.b32 %r4, %r4, 4; add.s32 %r5, %r3, %r4; bar.sync 0;"
    run(MATRICES + other + LOAD_MATRICES, rows, target, threads=64, shared=TILE)
    matrices = rows[np.arange(64) ^ 13].reshape(2, 4, 8, 8)
    for thread in range(64):
        warp, lane = divmod(thread, 32)
        row, quad = divmod(lane, 4)
        for i in range(4):
            pair = matrices[warp, i, 2 * quad : 2 * quad + 2, row]
            assert target[thread, i] == int(pair[0]) | int(pair[1]) << 16


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (LOAD_MATRICES, Race),  # what other lanes stored, with no barrier
        (f"setp.lt.u32 %p1, %r1, 16; @%p1 {LOAD_MATRICES}", Divergent),
        (f"bar.sync 0; add.s32 %r5, %r5, 4; {LOAD_MATRICES}", Misaligned),
        (f"bar.sync 0; add.s32 %r5, %r5, 512; {LOAD_MATRICES}", Uninitialised),
        (LOAD_MATRICES.replace("x4", "x2"), UnknownPtx),
        (LOAD_MATRICES.replace(".trans", ""), UnknownPtx),
        (LOAD_MATRICES.replace(", %r9}", "}"), UnknownPtx),
    ],
)
def test_matrices_that_cannot_be_loaded(body: str, error: type[PtxError]) -> None:
    crossed = "xor.b32 %r4, %r1, 1; shl.b32 %r4, %r4, 4; add.s32 %r5, %r3, %r4;"
    with pytest.raises(error):
        run(MATRICES + crossed + body, words([0] * 32), words([0] * 32), shared=TILE)


def test_a_trap_is_told() -> None:
    with pytest.raises(PtxError, match="trap"):
        run("trap;", words([0] * 32), words([0] * 32))
