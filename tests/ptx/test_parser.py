"""Parsing: what is understood, and that everything else raises."""

from __future__ import annotations

import pytest

from tests.ptx.errors import UnknownPtx
from tests.ptx.handmade import module
from tests.ptx.machine import Kernel
from tests.ptx.program import Address, Immediate, Register, Symbol, Vector, parse


def test_a_module() -> None:
    program = parse(
        """
        // a comment; with a semicolon
        .version 9.0
        .target sm_90, texmode_independent
        .address_size 64
        .common .global .align 8 .u64 environment;
        .visible .shared .align 16 .b8 tile[256];
        .visible .entry kernel(.param .u64 a, .param .f32 b)
        .maxntid 128, 1, 1
        .minnctapersm 4
        {
            .reg .pred %p<2>;
            .reg .b32 %r<3>;
            .shared .align 4 .b8 inner[8];
            /* another
               comment */
            $L__BB0_1:
            .pragma "nounroll";
            .loc 1 2 3
            @!%p1 bra.uni $L__BB0_1;
            ld.global.nc.L1::no_allocate.v2.u32 {%r1, %r2}, [%r1+-8];
            mov.b32 %r1, 0f3F800000;
            ret;
        }
        """
    )
    assert (program.name, program.version, program.target) == ("kernel", "9.0", "sm_90")
    assert program.parameters == {"a": "u64", "b": "f32"}
    assert program.shared == {"tile": (16, 256), "inner": (4, 8)}
    assert program.max_threads == 128
    assert program.labels == {"$L__BB0_1": 0}
    branch, load, move, _ = program.code
    assert (branch.guard, branch.negated) == (Register("%p1"), True)
    assert (branch.opcode, branch.modifiers) == ("bra", ("uni",))
    assert branch.operands == (Symbol("$L__BB0_1"),)
    assert load.modifiers == ("global", "nc", "L1::no_allocate", "v2", "u32")
    assert load.operands == (
        Vector((Register("%r1"), Register("%r2"))),
        Address(Register("%r1"), -8),
    )
    assert move.operands[1] == Immediate(0x3F800000, 32)


def test_names_in_braces_are_their_own() -> None:
    """Inline assembly opens blocks whose names may be those outside."""
    program = parse(
        module("{ .reg .b32 t; mov.u32 t, 1; } { .reg .b64 t; mov.u64 t, 2; } mov.u32 %r2, %r1;")
    )
    names = {ins.operands[0] for ins in program.code[-4:-2]}
    assert len(names) == 2
    assert sorted(program.registers[r.name] for r in names if isinstance(r, Register)) == [
        "b32", "b64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.b32 %r1, %r2;",
        "call.uni other;",
        "add.s32.sat %r1, %r2, %r3;",
        "add.sat.s32 %r1, %r2, %r3;",
        "add.s128 %r1, %r2, %r3;",
        "mul.s32 %r1, %r2, %r3;",
        "ld.volatile.global.u32 %r1, [%rd1];",
        "ld.global.L3::keep.u32 %r1, [%rd1];",
        "ld.local.u32 %r1, [%rd1];",
        "ld.u32 %r1, [%rd1];",
        "ld.global.v2.u32 %r1, [%rd1];",
        "ld.global.v4.u64 {%rd3, %rd4, %rd5, %rd6}, [%rd1];",
        "ld.shared.nc.u32 %r1, [%r1];",
        "st.local.u32 [%rd1], %r1;",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;",
        "cvt.s32.f32 %r1, %f1;",
        "setp.near.s32 %p1, %r1, %r2;",
        "setp.lo.s32 %p1, %r1, %r2;",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
        "shfl.sync.round.b32 %r1, %r2, 1, 31, -1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3},"
        " {%f1,%f2,%f3,%f4};",
        "activemask.b32 %r1;",
        "atom.global.sub.u32 %r1, [%rd1], %r2;",
        "atom.add.u32 %r1, [%rd1], %r2;",
        "bar.sync 1;",
        "bar.sync 0, 32;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "mbarrier.init.shared.b64 [%r1], 1;",
        "bra nowhere;",
        "mov.u32 %r1, %clock;",
        "mov.u32 %r1, tile;",
        "vote.sync.ballot.pred %p1, %p2, -1;",
        "prefetch.local.L2 [%rd1];",
        ".local .b8 depot[16];",
        "mov.u32 %r1, ?;",
        "add.u32 %r1, %r2;",
    ],
)
def test_what_is_unknown_raises(body: str) -> None:
    """At decoding, or (a name nobody declared) when the instruction is met."""
    from tests.ptx.handmade import run, words

    with pytest.raises(UnknownPtx):
        run(f"mov.u32 %r2, 1; mov.u32 %r3, 1; {body}", words([0] * 32), words([0] * 32))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".version 9.0 .func other() { ret; }",
        ".extern .func printf;",
        ".global .align 4 .b8 table[4];",
        ".visible .entry k(.param .align 8 .b8 s[16]) { ret; }",
        ".visible .entry a() { ret; } .visible .entry b() { ret; }",
        ".address_size 32",
        ".visible .entry k() { ret;",
        ".visible .entry k() .noreturn { ret; }",
    ],
)
def test_modules_that_are_not_understood(text: str) -> None:
    with pytest.raises(UnknownPtx):
        Kernel(text)
