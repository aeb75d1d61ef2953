"""Device primitives: every piece of inline PTX in this package.

A primitive is one instruction (or two), with raw byte addresses as int64. `.nc` loads go by the
read-only path: the memory must not be written during the launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

U32, I32, I64, F32 = types.uint32, types.int32, types.int64, types.float32
_CODES = {U32: "r", I32: "r", I64: "l", F32: "f"}


def primitive(
    name: str,
    text: str,
    results: tuple[Any, ...],
    operands: tuple[Any, ...],
    *,
    effects: bool = False,
) -> Callable[..., Any]:
    """An instruction as a function for kernels.

    ``$0``, ``$1``, ... in ``text`` are the results, then the operands. With ``effects`` it is
    neither moved over other memory accesses nor left out; without, it may be, and batched.
    """
    codes = [f"={_CODES[t]}" for t in results] + [_CODES[t] for t in operands]
    constraints = ",".join(codes + (["~{memory}"] if effects else []))
    result: Any = types.void
    if results:
        result = (
            results[0] if len(results) == 1 else types.containers.UniTuple(results[0], len(results))
        )

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        inputs = [context.get_value_type(t) for t in operands]
        outputs = [context.get_value_type(t) for t in results]
        output: Any = ir.VoidType()
        if outputs:
            output = outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
        kind = ir.FunctionType(output, inputs)
        found = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=effects), values)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return found
        parts = [builder.extract_value(found, i) for i in range(len(results))]
        return cgutils.pack_array(builder, parts)

    def typed(typingctx: Any, *given: Any) -> Any:
        return result(*operands), build

    names = ["typingctx", *(f"operand{i}" for i in range(len(operands)))]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    typed.__name__ = name
    return intrinsic(typed)


def _load(name: str, kind: str, results: tuple[Any, ...], where: str = "global.nc") -> Any:
    count = len(results)
    target = "$0" if count == 1 else "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    text = f"ld.{where}.{kind} {target}, [${count}];"
    return primitive(name, text, results, (I64,))


def _store(name: str, kind: str, operands: tuple[Any, ...]) -> Any:
    count = len(operands)
    source = "$1" if count == 1 else "{" + ", ".join(f"${i + 1}" for i in range(count)) + "}"
    text = f"st.global.{kind} [$0], {source};"
    return primitive(name, text, (), (I64, *operands), effects=True)


# -- integers and bulk bytes -----------------------------------------------------------------------

load_int32 = _load("load_int32", "s32", (I32,))
load_int64 = _load("load_int64", "s64", (I64,))
load_byte = _load("load_byte", "u8", (U32,))
load_half = primitive(
    "load_half",
    "{ .reg .b16 half; ld.global.nc.u16 half, [$1]; cvt.u32.u16 $0, half; }",
    (U32,),
    (I64,),
)
load_word = _load("load_word", "u32", (U32,))
# Sixteen bytes at an address that is a multiple of 16; read once, so kept out of L1.
load_line = _load("load_line", "L1::no_allocate.v4.u32", (U32,) * 4)
# Eight bytes likewise.
load_pair = _load("load_pair", "L1::no_allocate.v2.u32", (U32,) * 2)

store_byte = _store("store_byte", "u8", (U32,))
store_half = primitive(
    "store_half",
    "{ .reg .b16 half; cvt.u16.u32 half, $1; st.global.u16 [$0], half; }",
    (),
    (I64, U32),
    effects=True,
)
store_word = _store("store_word", "u32", (U32,))
store_pair = _store("store_pair", "v2.u32", (U32,) * 2)
store_line = _store("store_line", "v4.u32", (U32,) * 4)

# Of two numbers below 2**32, the second above 0: a tenth of what 64 bits take.
quotient = primitive(
    "quotient",
    "{ .reg .u32 a, b; cvt.u32.u64 a, $1; cvt.u32.u64 b, $2; div.u32 a, a, b; cvt.u64.u32 $0, a; }",
    (I64,),
    (I64, I64),
)

# The number of this thread in its block, and of this block along x, read where it stands: what is
# computed from it isn't computed before a loop around, to hold registers all through it.
_NUMBER = "{ .reg .u32 number; mov.u32 number, NAME; cvt.u64.u32 $0, number; }"
thread_here = primitive("thread_here", _NUMBER.replace("NAME", "%tid.x"), (I64,), (), effects=True)
block_here = primitive("block_here", _NUMBER.replace("NAME", "%ctaid.x"), (I64,), (), effects=True)

# A number that doesn't change in a loop, made there anew: what is computed from it isn't computed
# before the loop, either.
number_here = primitive("number_here", "mov.b32 $0, $1;", (I32,), (I32,), effects=True)

# -- floats ----------------------------------------------------------------------------------------

load_float = _load("load_float", "f32", (F32,))
store_float = _store("store_float", "f32", (F32,))
# Of two values in one word, the lower half first.
widen_bfloat16 = primitive(
    "widen_bfloat16", "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", (F32, F32), (U32,)
)
widen_float16 = primitive(
    "widen_float16",
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
    (F32, F32),
    (U32,),
)
narrow_bfloat16 = primitive("narrow_bfloat16", "cvt.rn.bf16x2.f32 $0, $2, $1;", (U32,), (F32, F32))
narrow_float16 = primitive("narrow_float16", "cvt.rn.f16x2.f32 $0, $2, $1;", (U32,), (F32, F32))
as_float = primitive("as_float", "mov.b32 $0, $1;", (F32,), (U32,))
as_word = primitive("as_word", "mov.b32 $0, $1;", (U32,), (F32,))
# Rounded once, whatever options the compiler is given.
divide = primitive("divide", "div.rn.f32 $0, $1, $2;", (F32,), (F32, F32))
exp2 = primitive("exp2", "ex2.approx.ftz.f32 $0, $1;", (F32,), (F32,))
log2 = primitive("log2", "lg2.approx.f32 $0, $1;", (F32,), (F32,))
reciprocal = primitive("reciprocal", "rcp.approx.ftz.f32 $0, $1;", (F32,), (F32,))
maximum = primitive("maximum", "max.f32 $0, $1, $2;", (F32,), (F32, F32))
# a * b + c, rounded once: the same bits wherever it stands, which `a * b + c` doesn't promise.
multiply_add = primitive("multiply_add", "fma.rn.f32 $0, $1, $2, $3;", (F32,), (F32, F32, F32))
# The lower, or the upper, halves of two words in one: the first operand's is the lower one.
lower_halves = primitive("lower_halves", "prmt.b32 $0, $1, $2, 0x5410;", (U32,), (U32, U32))
upper_halves = primitive("upper_halves", "prmt.b32 $0, $1, $2, 0x7632;", (U32,), (U32, U32))
# Bytes of two words in turn, the first operand's before the second's: of their lower halves, of
# their upper halves; and of their lowest bytes only.
lower_bytes = primitive("lower_bytes", "prmt.b32 $0, $1, $2, 0x5140;", (U32,), (U32, U32))
upper_bytes = primitive("upper_bytes", "prmt.b32 $0, $1, $2, 0x7362;", (U32,), (U32, U32))
lowest_bytes = primitive("lowest_bytes", "prmt.b32 $0, $1, $2, 0x4440;", (U32,), (U32, U32))

# -- fp8_e4m3 --------------------------------------------------------------------------------------


def _widen_fp8(name: str, selector: str) -> Any:
    """Two bytes as two float16 in a word, exactly, NaN as NaN: by integers, for any architecture.

    A byte in the upper half of a float16's bits, all but its sign one place lower, is its number
    times 2**-8. Only 0x7F carries into the bit that makes it a NaN there.
    """
    text = (
        "{ .reg .b32 halves, size, odd, factor; "
        f"prmt.b32 halves, $1, 0, {selector}; "
        "shr.u32 size, halves, 1; and.b32 size, size, 0x3f803f80; "
        "add.u32 odd, size, 0x00800080; and.b32 odd, odd, 0x40004000; or.b32 size, size, odd; "
        "and.b32 halves, halves, 0x80008000; or.b32 size, size, halves; "
        "mov.b32 factor, 0x5c005c00; mul.rn.f16x2 $0, size, factor; }"
    )
    return primitive(name, text, (U32,), (U32,))


def _convert_fp8(name: str, half: str) -> Any:
    """The same by an instruction that sm_89 brought."""
    text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}"
    return primitive(name, text, (U32,), (U32,))


widen_lower_fp8 = _widen_fp8("widen_lower_fp8", "0x1404")
widen_upper_fp8 = _widen_fp8("widen_upper_fp8", "0x3424")
convert_lower_fp8 = _convert_fp8("convert_lower_fp8", "low")
convert_upper_fp8 = _convert_fp8("convert_upper_fp8", "high")

# A float32 as fp8_e4m3 in the lowest byte, rounded once, ties to even, saturated at 448; NaN stays
# NaN. The sign is that of the second operand: a division may have dropped that of a NaN. A carry
# moves the exponent; what will be subnormal (below 2**-6) is aligned to its quantum, 2**-9, by
# adding 2**14.
narrow_fp8 = primitive(
    "narrow_fp8",
    "{ .reg .b32 size, sign, word, tail; .reg .f32 sum; .reg .pred odd, small; "
    "mov.b32 sign, $2; shr.u32 sign, sign, 24; and.b32 sign, sign, 0x80; "
    "mov.b32 size, $1; and.b32 size, size, 0x7fffffff; setp.gt.u32 odd, size, 0x7f800000; "
    "min.u32 size, size, 0x43e00000; setp.lt.u32 small, size, 0x3c800000; "
    "mov.b32 sum, size; add.rn.f32 sum, sum, 0f46800000; "
    "mov.b32 tail, sum; sub.u32 tail, tail, 0x46800000; "
    "shr.u32 word, size, 20; and.b32 word, word, 1; add.u32 word, word, size; "
    "sub.u32 word, word, 0x3bf80001; shr.u32 word, word, 20; "
    "selp.b32 word, tail, word, small; selp.b32 word, 0x7f, word, odd; or.b32 $0, word, sign; }",
    (U32,),
    (F32, F32),
)

# -- warps -----------------------------------------------------------------------------------------

# The value of the lane whose number differs in the bits of the second operand; all 32 lanes.
shuffle_xor = primitive(
    "shuffle_xor",
    "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
    (F32,),
    (F32, I32),
    effects=True,
)
# The value of one lane, the same for all 32.
shuffle_from = primitive(
    "shuffle_from",
    "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
    (F32,),
    (F32, I32),
    effects=True,
)
shuffle_integer_from = primitive(
    "shuffle_integer_from",
    "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
    (I32,),
    (I32, I32),
    effects=True,
)
# Whether a word of one of the 32 lanes isn't 0, as 1 or 0.
any_lane = primitive(
    "any_lane",
    "{ .reg .pred one, some; setp.ne.b32 one, $1, 0; "
    "vote.sync.any.pred some, one, 0xffffffff; selp.u32 $0, 1, 0, some; }",
    (U32,),
    (U32,),
    effects=True,
)

# -- shared memory: addresses are int32; rows of 16 bytes at multiples of 16 -----------------------


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """Where a shared array begins, as the instructions below take it."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, value=values[0])
        pointer = builder.ptrtoint(found.data, ir.IntType(64))
        text = "{ .reg .u64 at; cvta.to.shared.u64 at, $1; cvt.u32.u64 $0, at; }"
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        return builder.call(ir.InlineAsm(kind, text, "=r,l"), [pointer])

    return I32(array), build


# Copy 16 bytes from global to shared memory: on its way until `await_copies` and a barrier. The
# last operand is how many bytes are read, 16 or 0; where none are, zeros are stored.
copy_line = primitive(
    "copy_line",
    "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
    (),
    (I32, I64, I32),
    effects=True,
)
# This thread's own copies are there for itself; for others, after a barrier.
await_copies = primitive("await_copies", "cp.async.wait_all;", (), (), effects=True)
load_shared_line = primitive(
    "load_shared_line",
    "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];",
    (U32,) * 4,
    (I32,),
    effects=True,
)
store_shared_line = primitive(
    "store_shared_line",
    "st.shared.v4.u32 [$0], {$1, $2, $3, $4};",
    (),
    (I32, *(U32,) * 4),
    effects=True,
)

# -- matrices of a warp: all 32 lanes, lane = 4 * row + quad ---------------------------------------


def _mma(name: str, kind: str) -> Any:
    """D[16][8] = A[16][16] B[16][8] + C, elements of two bytes, sums in float32.

    Operands: a0 to a3 (rows `row` and `row + 8`, columns 2 * quad and 2 * quad + 1; then 8
    columns on), b0 and b1 (rows 2 * quad and 2 * quad + 1, column `row`; then 8 rows on), c0 to
    c3 (row `row`, columns 2 * quad and 2 * quad + 1; then 8 rows on). Results lie as c0 to c3.
    """
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return primitive(name, text, (F32,) * 4, (U32,) * 6 + (F32,) * 4)


mma_bfloat16 = _mma("mma_bfloat16", "bf16")
mma_float16 = _mma("mma_float16", "f16")
# Four 8 x 8 matrices of two-byte elements from shared memory: lane 8 * i + j gives the address of
# row j of matrix i, and gets of each the elements (2 * quad, row) and (2 * quad + 1, row).
load_transposed = primitive(
    "load_transposed",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
    (U32,) * 4,
    (I32,),
    effects=True,
)
# An 8 x 8 matrix of two-byte elements, two of a row in each lane, transposed.
transpose_matrix = primitive(
    "transpose_matrix",
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    (U32,),
    (U32,),
    effects=True,
)
