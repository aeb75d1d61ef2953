"""Arithmetic of single instructions against Python's own integers and float64."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx.errors import PtxError
from tests.ptx.handmade import run, words

EDGES = (0, 1, 2, 5, 31, 32, 33, 63, 64, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def drawn(rng: np.random.Generator, bits: int) -> list[int]:
    """32 integers of some width: edges, small ones, random ones."""
    found = [e for e in EDGES if e < 2**bits] + [2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1]
    while len(found) < 32:
        found.append(int(rng.integers(0, 2**bits, dtype=np.uint64)) >> int(rng.integers(0, bits)))
    return [int(x) for x in rng.permutation(np.array(found[:32], np.uint64))]


def signed(value: int, bits: int) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def evaluate(opcode: str, rows: list[tuple[int, ...]], bits: int, result: int) -> list[int]:
    """Run an opcode on rows of integers given as bits; results as bits."""
    size, names = f"u{bits // 8}", {16: "h", 32: "r", 64: "rd"}
    loads = ""
    for i in range(len(rows[0])):
        register = f"%{names[bits]}{10 + i}"
        loads += f"ld.global.u{bits} {register}, [%rd1 + {i * bits // 8}];"
    source = np.array(rows, np.uint64).astype(size)
    padded = np.zeros((32, 32 // source.itemsize), source.dtype)
    padded[:, : source.shape[1]] = source
    operands = ", ".join(f"%{names[bits]}{10 + i}" for i in range(len(rows[0])))
    target = words([0] * 32, f"u{result // 8}")
    prologue = "add.s64 %rd1, %rd1, %rd5; add.s64 %rd1, %rd1, %rd5;"
    run(
        f"{prologue} {loads} {opcode} %{names[result]}9, {operands};"
        f"st.global.u{result} [%rd4], %{names[result]}9;",
        padded,
        target,
    )
    return [int(x) for x in target[:, 0]]


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


TWO: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("opcode", list(TWO))
def test_integers(seed: int, opcode: str, kind: str) -> None:
    rng, bits = np.random.default_rng(seed), int(kind[1:])
    left, right = drawn(rng, bits), drawn(rng, bits)
    if opcode in ("div", "rem"):
        right = [b or 3 for b in right]
    read = (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x)
    expected = [TWO[opcode](read(a), read(b)) % 2**bits for a, b in zip(left, right, strict=True)]
    rows = list(zip(left, right, strict=True))
    assert evaluate(f"{opcode}.{kind}", rows, bits, bits) == expected


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_products_of_twice_the_width(seed: int, kind: str) -> None:
    rng, bits = np.random.default_rng(seed), int(kind[1:])
    rows = list(zip(drawn(rng, bits), drawn(rng, bits), strict=True))
    read = (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x)
    expected = [read(a) * read(b) % 2 ** (2 * bits) for a, b in rows]
    assert evaluate(f"mul.wide.{kind}", rows, bits, 2 * bits) == expected


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_upper_halves_of_products(seed: int, kind: str) -> None:
    rng, bits = np.random.default_rng(seed), int(kind[1:])
    rows = list(zip(drawn(rng, bits), drawn(rng, bits), strict=True))
    read = (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x)
    expected = [(read(a) * read(b) >> bits) % 2**bits for a, b in rows]
    assert evaluate(f"mul.hi.{kind}", rows, bits, bits) == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_multiply_add(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    rows = list(zip(drawn(rng, bits), drawn(rng, bits), drawn(rng, bits), strict=True))
    expected = [(a * b + c) % 2**bits for a, b, c in rows]
    assert evaluate(f"mad.lo.s{bits}", rows, bits, bits) == expected


@pytest.mark.parametrize("kind", ["b32", "u32", "s32"])
def test_shifts_by_the_width_and_more(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    rows = [(a, b % 70) for a, b in zip(drawn(rng, 32), drawn(rng, 32), strict=True)]
    if kind == "b32":
        expected = [(a << b) % 2**32 for a, b in rows]
        assert evaluate("shl.b32", rows, 32, 32) == expected
        return
    read = (lambda x: signed(x, 32)) if kind[0] == "s" else (lambda x: x)
    assert evaluate(f"shr.{kind}", rows, 32, 32) == [(read(a) >> b) % 2**32 for a, b in rows]


def test_logic_and_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = list(zip(drawn(rng, 32), drawn(rng, 32), strict=True))
    assert evaluate("and.b32", rows, 32, 32) == [a & b for a, b in rows]
    assert evaluate("or.b32", rows, 32, 32) == [a | b for a, b in rows]
    assert evaluate("xor.b32", rows, 32, 32) == [a ^ b for a, b in rows]
    ones = [(a,) for a, _ in rows]
    assert evaluate("not.b32", ones, 32, 32) == [2**32 - 1 - a for (a,) in ones]
    assert evaluate("popc.b32", ones, 32, 32) == [a.bit_count() for (a,) in ones]
    assert evaluate("neg.s32", ones, 32, 32) == [-a % 2**32 for (a,) in ones]


@pytest.mark.parametrize("bits", [32, 64])
def test_bits_are_inserted(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    edges = (0, 1, 5, bits - 5, bits - 1, bits, bits + 3)
    rows = [
        (a, b, int(rng.choice(edges)), int(rng.choice(edges)))
        for a, b in zip(drawn(rng, bits), drawn(rng, bits), strict=True)
    ]
    expected = []
    for a, b, position, length in rows:
        for i in range(length):
            if position + i < bits:
                b = b & ~(1 << (position + i)) | (a >> i & 1 if i < bits else 0) << (position + i)
        expected.append(b)
    assert evaluate(f"bfi.b{bits}", rows, bits, bits) == expected


def test_bytes_are_permuted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        (a, b, int(rng.integers(0, 0x10000)))
        for a, b in zip(drawn(rng, 32), drawn(rng, 32), strict=True)
    ]
    expected = []
    for a, b, selector in rows:
        pool, word = a.to_bytes(4, "little") + b.to_bytes(4, "little"), 0
        for i in range(4):
            pick = selector >> (4 * i) & 15
            byte = pool[pick & 7]
            word |= ((255 if byte & 128 else 0) if pick & 8 else byte) << (8 * i)
        expected.append(word)
    assert evaluate("prmt.b32", rows, 32, 32) == expected


def bits_of(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits))[0])


FLOATS = (0.0, -0.0, 1.0, -1.0, 0.1, 3e38, -3e38, 1e-40, math.inf, -math.inf, math.nan)


def float_rows(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    """Rows of float32 bits: edges and random ones."""
    rows = []
    for _ in range(32):
        row = [
            float(rng.choice(FLOATS)) if rng.random() < 0.3 else float(rng.normal() * 10)
            for _ in range(count)
        ]
        rows.append(tuple(bits_of(x) for x in row))
    return rows


def flushed(value: float) -> float:
    """Zero of the same sign for what is subnormal in float32."""
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def same_floats(found: list[int], expected: list[float]) -> None:
    """The same bits, or both NaN."""
    for got, want in zip(found, expected, strict=True):
        if math.isnan(want):
            assert math.isnan(float_of(got))
        else:
            assert got == bits_of(want), (float_of(got), want)


@pytest.mark.parametrize(
    ("opcode", "count", "function"),
    [
        ("add.rn.f32", 2, lambda a, b: a + b),
        ("sub.f32", 2, lambda a, b: a - b),
        ("mul.f32", 2, lambda a, b: a * b),
        ("fma.rn.f32", 3, lambda a, b, c: a * b + c),
        ("neg.f32", 1, lambda a: -a),
        ("abs.f32", 1, abs),
        ("min.f32", 2, lambda a, b: b if math.isnan(a) else a if math.isnan(b) else min(a, b)),
        ("max.f32", 2, lambda a, b: b if math.isnan(a) else a if math.isnan(b) else max(a, b)),
        ("ex2.approx.f32", 1, lambda a: float(np.exp2(a))),
        ("lg2.approx.f32", 1, lambda a: float(np.log2(a))),
        ("rcp.approx.f32", 1, lambda a: float(1 / a)),
        ("rcp.approx.ftz.f32", 1, lambda a: flushed(float(1 / np.float64(flushed(a))))),
    ],
)
def test_floats(seed: int, opcode: str, count: int, function: Callable[..., float]) -> None:
    rows = float_rows(np.random.default_rng(seed), count)
    if opcode[:3] in ("min", "max"):  # of zeros of both signs either may come
        rows = [tuple(0 if x == 1 << 31 else x for x in row) for row in rows]
    with np.errstate(all="ignore"):
        expected = [
            float(np.float32(function(*(np.float64(float_of(x)) for x in row)))) for row in rows
        ]
    same_floats(evaluate(opcode, rows, 32, 32), expected)


def test_subnormals_are_flushed_where_asked() -> None:
    rows: list[tuple[int, ...]] = [(bits_of(1e-40), bits_of(1.0))] * 32
    assert evaluate("mul.f32", rows, 32, 32)[0] == bits_of(1e-40)
    assert evaluate("mul.ftz.f32", rows, 32, 32)[0] == 0


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("loose", [False, True])
def test_comparisons_with_nan(seed: int, name: str, loose: bool) -> None:
    rows = float_rows(np.random.default_rng(seed), 2)
    source = np.zeros((32, 4), np.uint32)
    source[:, :2] = rows
    target = words([0] * 32)
    run(
        f"ld.global.v2.f32 {{%f1, %f2}}, [%rd3];"
        f"setp.{name}{'u' if loose else ''}.f32 %p1, %f1, %f2;"
        "selp.u32 %r2, 1, 0, %p1; st.global.u32 [%rd4], %r2;",
        source,
        target,
    )
    order: dict[str, Callable[[Any, Any], bool]] = {
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    }  # fmt: skip
    for (a, b), got in zip(rows, target[:, 0], strict=True):
        x, y = float_of(a), float_of(b)
        odd = math.isnan(x) or math.isnan(y)
        assert got == (loose if odd else order[name](x, y))


@pytest.mark.parametrize(
    ("opcode", "value", "expected"),
    [
        ("cvt.rzi.s32.f32", 2.7, 2),
        ("cvt.rzi.s32.f32", -2.7, -2),
        ("cvt.rni.s32.f32", 2.5, 2),
        ("cvt.rmi.s32.f32", -2.1, -3),
        ("cvt.rpi.s32.f32", 2.1, 3),
        ("cvt.rzi.s32.f32", 3e30, 2**31 - 1),
        ("cvt.rzi.u32.f32", -5.0, 0),
        ("cvt.rzi.s32.f32", math.nan, 0),
    ],
)
def test_floats_to_integers(opcode: str, value: float, expected: int) -> None:
    found = evaluate(opcode, [(bits_of(value),)] * 32, 32, 32)
    assert found == [expected % 2**32] * 32


def test_integers_are_extended_by_their_sign() -> None:
    rows = [(0xFFFF8000,)] * 32
    assert evaluate("cvt.s64.s32", rows, 32, 64)[0] == 0xFFFFFFFFFFFF8000
    assert evaluate("cvt.u64.u32", rows, 32, 64)[0] == 0xFFFF8000
    assert evaluate("cvt.s32.s16", [(0x8000,)] * 32, 16, 32)[0] == 0xFFFF8000
    assert evaluate("cvt.rn.f32.s32", rows, 32, 32)[0] == bits_of(-32768.0)


def test_pairs_of_halves(seed: int) -> None:
    """Pack and unpack, against the project's own rounding."""
    from cuda_kernels.dtypes import float_to_bits

    rng = np.random.default_rng(seed)
    values = rng.normal(size=(32, 2)).astype(np.float32)
    ties = values[:16].view(np.uint32)
    ties[:] = ties & 0xFFFF0000 | 0x8000  # half way between two bfloat16
    source = np.zeros((32, 4), np.float32)
    source[:, :2] = values
    for name, dtype in (("bf16x2", "bfloat16"), ("f16x2", "float16")):
        target = words([0] * 32)
        run(
            f"ld.global.v2.f32 {{%f1, %f2}}, [%rd3]; cvt.rn.{name}.f32 %r2, %f2, %f1;"
            "st.global.u32 [%rd4], %r2;",
            source,
            target,
        )
        halves = np.ascontiguousarray(target[:, 0]).view(np.uint16).reshape(32, 2)
        assert np.array_equal(halves, float_to_bits(values, dtype))


def test_products_of_halves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    halves = rng.integers(0, 2**16, (32, 4)).astype(np.uint16)
    halves[:8] &= 0x83FF  # subnormal
    rows = [tuple(int(x) for x in row) for row in halves.view(np.uint32)]
    found = np.array(evaluate("mul.rn.f16x2", rows, 32, 32), np.uint32).view(np.float16)
    single = halves.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = (single[:, :2] * single[:, 2:]).astype(np.float16)
    assert np.array_equal(found.reshape(32, 2), expected, equal_nan=True)


def test_pairs_of_fp8_are_widened() -> None:
    """All patterns in both places, against the project's own table."""
    from cuda_kernels.dtypes import FP8_VALUES

    patterns = np.arange(256).astype(np.uint8)
    pairs = np.stack([patterns, patterns[::-1]], axis=1)
    for part in pairs.reshape(8, 32, 2):
        rows = [(int(word),) for word in part.view(np.uint16)[:, 0]]
        found = np.array(evaluate("cvt.rn.f16x2.e4m3x2", rows, 16, 32), np.uint32)
        wide = found.view(np.float16).reshape(32, 2).astype(np.float32)
        assert np.array_equal(wide, FP8_VALUES[part], equal_nan=True)
        assert np.array_equal(np.signbit(wide), part >= 128)


def test_a_quotient_that_is_nan_has_no_sign() -> None:
    rows: list[tuple[int, ...]] = [(0xFFC00001, bits_of(2.0)), (0, 0), (bits_of(-1.0), 0)] * 11
    found = evaluate("div.rn.f32", rows[:32], 32, 32)
    assert [math.isnan(float_of(x)) and x < 1 << 31 for x in found[:2]] == [True, True]
    assert found[2] == bits_of(-math.inf)


def test_division_by_zero_raises() -> None:
    with pytest.raises(PtxError, match="division by zero"):
        evaluate("div.u32", [(5, 0)] * 32, 32, 32)
