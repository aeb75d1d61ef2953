"""`paged_attention` against the float64 reference, and what its results must not depend on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention import cpu, plain
from cuda_kernels.attention.spec import SPEC, scale_of, stored_as
from cuda_kernels.dtypes import STORAGE_DTYPES, bits_to_float, float_to_bits, nan_pattern

HEAD_DIMS = (1, 8, 16, 24, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (1, 2, 3, 8, 16, 32, 64)
GROUPS = ((1, 1), (4, 2), (9, 3), (4, 1), (5, 1), (12, 2), (7, 1), (16, 1), (5, 5), (33, 1))
LAYOUTS = ("HND", "NHD")
FEATURES = ("plain", "window", "alibi", "softcap", "scale", "sinks", "all")
NUM_SHAPES = 400
#: What is computed in, and what K and V are stored as where that is another.
DTYPES = (*STORAGE_DTYPES, *(f"{name} over fp8_e4m3" for name in STORAGE_DTYPES))


def dtypes_of(name: str) -> dict[str, Any]:
    """The arguments that say so."""
    dtype, _, kv_dtype = name.partition(" over ")
    return {"dtype": dtype, "kv_dtype": kv_dtype or None}


def rules_of(rng: np.random.Generator, feature: str, num_heads: int) -> dict[str, Any]:
    """Keyword arguments that switch a feature on, or all of them."""
    slopes = (2.0 ** -rng.uniform(1, 8, num_heads)).astype(np.float32)
    everything = {
        "window": int(rng.integers(1, 90)),
        "alibi": slopes,
        "softcap": float(rng.uniform(1, 40)),
        "scale": float(rng.uniform(0.02, 0.3)),
        "sinks": rng.normal(0, 3, num_heads).astype(np.float32),
    }
    if feature == "all":
        return everything
    return {} if feature == "plain" else {feature: everything[feature]}


def lengths_of(rng: np.random.Generator, block_size: int) -> list[int]:
    """Row lengths around the edges of blocks and of the kernel's tiles, 0 and 1 among them."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2, 63, 64, 65, 200]
    return [int(n) for n in rng.choice(edges, int(rng.integers(1, 5)))]


def cover(rng: np.random.Generator) -> list[tuple[Any, ...]]:
    """Shapes in which each pair of values of any two axes meets; the rest is random."""
    axes = (HEAD_DIMS, BLOCK_SIZES, GROUPS, FEATURES, DTYPES, LAYOUTS)
    missing = {
        (i, a, j, b)
        for (i, left), (j, right) in itertools.combinations(enumerate(axes), 2)
        for a, b in itertools.product(range(len(left)), range(len(right)))
    }
    shapes = []
    while missing or len(shapes) < NUM_SHAPES:
        candidates = [[int(rng.integers(len(axis))) for axis in axes] for _ in range(6)]
        best = max(candidates, key=lambda c: len(pairs(c) & missing))
        missing -= pairs(best)
        shapes.append(tuple(axis[k] for axis, k in zip(axes, best, strict=True)))
    return shapes


def pairs(choice: list[int]) -> set[tuple[int, int, int, int]]:
    """The pairs of values that a choice of one value an axis covers."""
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(choice), 2)}


def with_plain_twin(arguments: dict[str, Any]) -> None:
    """Run the call by the second twin, of independent arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "attend", plain.attend)
        cuda_kernels.paged_attention(**arguments)


def check_against_reference(arguments: dict[str, Any], plain_too: bool = False) -> None:
    """Run the kernel; compare out and log-sum-exp with the reference at the spec's tolerance."""
    expected = SPEC.reference(arguments)
    cuda_kernels.paged_attention(**arguments)
    compare(arguments, *expected)
    if plain_too:
        arguments["out"][:] = 0
        arguments["lse"][:] = np.nan
        with_plain_twin(arguments)
        compare(arguments, *expected)


def compare(arguments: dict[str, Any], expected: np.ndarray, expected_lse: np.ndarray) -> None:
    """Compare what a run left in out and lse with the reference."""
    out = bits_to_float(arguments["out"], arguments["dtype"])
    values = np.abs(bits_to_float(arguments["arena"], stored_as(arguments)))
    scale = float(scale_of(arguments, "value_scale").max())
    largest = max(1.0, float(np.nanmax(values, initial=0)) * scale)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max(initial=0) <= SPEC.tolerance[arguments["dtype"]] * largest
    empty = np.isneginf(expected_lse)
    assert np.array_equal(empty, np.isneginf(arguments["lse"]))
    wrong = np.abs(np.where(empty, 0, arguments["lse"]) - np.where(empty, 0, expected_lse))
    assert wrong.max(initial=0) <= 2e-5 * max(1.0, np.abs(expected_lse[~empty]).max(initial=0))


def test_generated_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = cover(rng)
    assert len(shapes) >= 300
    for number, (head_dim, block_size, groups, feature, dtype, layout) in enumerate(shapes):
        num_heads, heads = groups
        seq_lens = lengths_of(rng, block_size)
        query_lens = [int(rng.choice([min(n, 1), rng.integers(0, n + 1)])) for n in seq_lens]
        value_dim = head_dim if rng.random() < 0.7 else int(rng.integers(1, 140))
        arguments = SPEC.make_inputs(
            rng,
            **dtypes_of(dtype),
            seq_lens=seq_lens,
            query_lens=query_lens,
            num_heads=num_heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            value_dim=value_dim,
            block_size=block_size,
            layout=layout,
            **rules_of(rng, feature, num_heads),
        )
        try:
            check_against_reference(arguments, plain_too=number % 4 == 0)
        except AssertionError as error:
            raise AssertionError(
                f"shape {number}: {dtype} {feature} {num_heads}/{heads} x {head_dim}, "
                f"{value_dim}, blocks of {block_size} {layout}, lengths {seq_lens}, "
                f"tokens {query_lens}"
            ) from error


@pytest.mark.parametrize("head_dim", [1, 3, 17, 40, 63])
def test_head_dims_that_fit_no_vector(seed: int, head_dim: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype in DTYPES:
        check_against_reference(make(rng, dtype=dtype, head_dim=head_dim, value_dim=head_dim))


@pytest.mark.parametrize("length", [1023, 1024, 1025, 4097, 32768])
def test_long_contexts(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    for feature in ("plain", "all") if length < 32768 else ("plain",):
        check_against_reference(
            make(
                rng,
                dtype="float32",
                seq_lens=[length, 5],
                query_lens=[2, 1],
                num_heads=2,
                num_kv_heads=1,
                **rules_of(rng, feature, 2),
            )
        )


def make(rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    """A mixed batch of the usual kind, with changes."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "seq_lens": [70, 1, 0, 17, 130, 33],
        "query_lens": [70, 1, 1, 1, 40, 0],
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "value_dim": 48,
        "block_size": 16,
    }
    changes |= dtypes_of(changes.get("dtype", "float32"))
    return SPEC.make_inputs(rng, **(settings | changes))


def run(arguments: dict[str, Any], **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run on fresh outputs; return their bits."""
    fresh = {"out": np.zeros_like(arguments["out"]), "lse": np.zeros_like(arguments["lse"])}
    merged = arguments | fresh | changes
    cuda_kernels.paged_attention(**merged)
    return merged["out"].view(np.uint8), merged["lse"].view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_length_rows_give_zeros(seed: int, dtype: str) -> None:
    """Case 75: each row reads its own table, and a row of length 0 gives zeros."""
    arguments = make(np.random.default_rng(seed), dtype=dtype)
    cuda_kernels.paged_attention(**arguments)
    token = int(arguments["query_start"][2])
    assert not arguments["out"][token].any()
    assert np.isneginf(arguments["lse"][token]).all()
    check_against_reference(arguments)


def test_empty_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for lens, tokens in ([], []), ([0], [0]), ([9], [0]):
        arguments = make(rng, seq_lens=lens, query_lens=tokens)
        cuda_kernels.paged_attention(**arguments)
        assert arguments["out"].size == 0


def test_tokens_past_query_start_are_left_alone(seed: int) -> None:
    for dtype in STORAGE_DTYPES:
        arguments = make(np.random.default_rng(seed), dtype=dtype)
        padded = {
            name: np.concatenate([arguments[name], np.full_like(arguments[name][:3], 7)])
            for name in ("out", "query", "lse")
        }
        cuda_kernels.paged_attention(**(arguments | padded))
        assert (padded["out"][-3:] == 7).all()
        assert (padded["lse"][-3:] == 7).all()
        assert np.array_equal(padded["out"][:-3].view(np.uint8), run(arguments)[0])


def test_poison_reaches_nothing(seed: int) -> None:
    """Case 67: NaN or Inf past the lengths and in free frames changes no bit; -1 is never read."""
    rng = np.random.default_rng(seed)
    for dtype, length in itertools.product(DTYPES, (1, 2, 15, 16, 17)):
        arguments = make(rng, dtype=dtype, seq_lens=[length, 40], query_lens=[1, 3])
        expected = run(arguments)
        stored = stored_as(arguments)
        unused = arguments["arena"] == nan_pattern(stored).view(arguments["arena"].dtype)
        if dtype == "float32":
            unused = np.isnan(arguments["arena"])
        for filler in (0.0, np.inf, 1e30):
            arena = arguments["arena"].copy()
            arena[unused] = float_to_bits(np.array([filler]), stored)[0]
            for got, want in zip(run(arguments, arena=arena), expected, strict=True):
                assert np.array_equal(got, want)
        table = np.concatenate([arguments["table"], np.full(5, -1, np.int32)])
        for got, want in zip(run(arguments, table=table), expected, strict=True):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_of_one_position_stays_with_those_who_see_it(
    seed: int, dtype: str, group: int
) -> None:
    """NaN in K and V at position p reaches the queries that attend to p, and no other."""
    rng = np.random.default_rng(seed)
    arguments = make(
        rng, dtype=dtype, seq_lens=[90], query_lens=[90], num_heads=2 * group, window=20
    )
    expected = run(arguments)[0].view(arguments["out"].dtype)
    poison = nan_pattern(stored_as(arguments)).view(arguments["arena"].dtype)
    bad = 50
    for offset, dims in (("key_offset", "head_dim"), ("value_offset", "value_dim")):
        arena = arguments["arena"].copy()
        size, width = arguments["block_size"], arguments[dims]
        for head in range(arguments["num_kv_heads"]):
            start = arguments[offset] + (head * size + bad % size) * width
            arena[arguments["table"][bad // size], start : start + width] = poison
        out = run(arguments, arena=arena)[0].view(arguments["out"].dtype)
        seen = np.arange(90)
        seen = (seen >= bad) & (seen < bad + 20)
        assert np.isnan(bits_to_float(out[seen], arguments["dtype"])).all()
        assert np.array_equal(out[~seen], expected[~seen])


def test_nan_in_a_query_is_not_hidden(seed: int) -> None:
    arguments = make(np.random.default_rng(seed), seq_lens=[70], query_lens=[70])
    arguments["query"][30] = np.nan
    out = run(arguments)[0].view(np.float32).reshape(arguments["out"].shape)
    assert np.isnan(out[30]).all()
    assert np.isfinite(np.delete(out, 30, axis=0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_frames_may_lie_anywhere(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    arguments = make(rng, dtype=dtype, window=50)
    order = rng.permutation(arguments["arena"].shape[0])
    arena = np.empty_like(arguments["arena"])
    arena[order] = arguments["arena"]
    table = order[arguments["table"]].astype(np.int32)
    moved = run(arguments, arena=arena, table=table)
    for got, want in zip(moved, run(arguments), strict=True):
        assert np.array_equal(got, want)


def alone(arguments: dict[str, Any], row: int, first: int, count: int) -> tuple[Any, Any]:
    """Run `count` tokens of one row from its token `first`, without the other rows."""
    start = int(arguments["query_start"][row])
    later = int(arguments["query_start"][row + 1]) - start - first - count
    tokens = slice(start + first, start + first + count)
    return run(
        arguments,
        query=arguments["query"][tokens],
        out=np.zeros_like(arguments["out"][tokens]),
        lse=np.zeros_like(arguments["lse"][tokens]),
        table_start=arguments["table_start"][row : row + 1],
        seq_lens=arguments["seq_lens"][row : row + 1] - later,
        query_start=np.array([0, count]),
    )


@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_equals_the_row_in_a_batch(seed: int, dtype: str, feature: str) -> None:
    rng = np.random.default_rng(seed)
    arguments = make(
        rng,
        dtype=dtype,
        seq_lens=[2100, 70, 300],
        query_lens=[1, 70, 33],
        **rules_of(rng, feature, 6),
    )
    whole = run(arguments)
    assert all(np.array_equal(a, b) for a, b in zip(whole, run(arguments), strict=True))
    for row, count in enumerate((1, 70, 33)):
        tokens = slice(int(arguments["query_start"][row]), int(arguments["query_start"][row + 1]))
        got = alone(arguments, row, 0, count)
        assert np.array_equal(got[0], whole[0][tokens])
        assert np.array_equal(got[1], whole[1][tokens])


@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 5])
def test_chunks_equal_the_whole(seed: int, feature: str, dtype: str, group: int) -> None:
    """A token's bits don't depend on how the prompt was cut into steps, down to decode."""
    rng = np.random.default_rng(seed)
    arguments = make(
        rng,
        dtype=dtype,
        seq_lens=[70, 1200],
        query_lens=[70, 90],
        num_heads=2 * group,
        head_dim=int(rng.integers(1, 140)),
        **rules_of(rng, feature, 2 * group),
    )
    whole = run(arguments)
    for row, chunks in ((0, (1, 13, 1, 55)), (1, (37, 1, 52))):
        first = 0
        for count in chunks:
            got = alone(arguments, row, first, count)
            start = int(arguments["query_start"][row]) + first
            assert np.array_equal(got[0], whole[0][start : start + count])
            assert np.array_equal(got[1], whole[1][start : start + count])
            first += count


def test_threads_change_no_bit(seed: int) -> None:
    import numba

    rng = np.random.default_rng(seed)
    arguments = make(
        rng, seq_lens=[5000, 300], query_lens=[1, 120], num_heads=8, num_kv_heads=4, head_dim=128
    )
    before = numba.get_num_threads()
    try:
        results = []
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            results.append(run(arguments))
    finally:
        numba.set_num_threads(before)
    for result in results:
        assert np.array_equal(result[0], results[0][0])
        assert np.array_equal(result[1], results[0][1])


def test_splits_as_tasks_change_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(np.random.default_rng(seed), seq_lens=[4097, 3000], query_lens=[2, 9])
    by_split = run(arguments)
    monkeypatch.setattr(cpu, "ENOUGH_TASKS", 0)
    for got, want in zip(run(arguments), by_split, strict=True):
        assert np.array_equal(got, want)


def test_strides_are_free(seed: int) -> None:
    for dtype in STORAGE_DTYPES:
        arguments = make(np.random.default_rng(seed), dtype=dtype)
        expected = run(arguments)
        query = np.ascontiguousarray(arguments["query"].transpose(1, 0, 2)).transpose(1, 0, 2)
        tokens, heads, dims = arguments["out"].shape
        out = np.zeros((heads, tokens, dims + 3), query.dtype)[:, :, :dims].transpose(1, 0, 2)
        lse = np.zeros((heads, tokens), np.float32).T
        cuda_kernels.paged_attention(**(arguments | {"query": query, "out": out, "lse": lse}))
        assert np.array_equal(np.ascontiguousarray(out).view(np.uint8), expected[0])
        assert np.array_equal(np.ascontiguousarray(lse).view(np.uint8), expected[1])


def test_alibi_bias_of_the_newest_key_is_zero(seed: int) -> None:
    """Case 63: with equal keys the weights show the bias: exp(-slope * distance)."""
    for dtype, length in itertools.product(("float32", "float16"), (1, 2, 17, 40)):
        slopes = (2.0 ** -np.arange(1.0, 9.0)).astype(np.float32)
        arguments = make(
            np.random.default_rng(seed),
            dtype=dtype,
            seq_lens=[length],
            query_lens=[1],
            num_heads=8,
            alibi=slopes,
        )
        arguments["query"][:] = 0
        cuda_kernels.paged_attention(**arguments)
        distance = np.arange(length)
        expected = np.log(np.exp(-slopes[:, None].astype(np.float64) * distance).sum(axis=1))
        assert np.allclose(arguments["lse"][0], expected, atol=1e-5)
        check_against_reference(arguments)


@pytest.mark.parametrize("head_dim", [80, 96, 112])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_alibi_with_head_dims_of_no_power_of_two(seed: int, head_dim: int, length: int) -> None:
    """Case 65."""
    rng = np.random.default_rng(seed)
    for slopes in (None, np.full(6, 0.3, np.float32)):
        check_against_reference(
            make(rng, seq_lens=[length], query_lens=[length], head_dim=head_dim, alibi=slopes)
        )


def test_both_layouts_give_the_same_bits(seed: int) -> None:
    for dtype in DTYPES:
        for block_size in (1, 16, 64):
            both = [
                make(np.random.default_rng(seed), dtype=dtype, block_size=block_size, layout=layout)
                for layout in LAYOUTS
            ]
            assert not np.array_equal(both[0]["arena"], both[1]["arena"]) or block_size == 1
            for left, right in zip(run(both[0]), run(both[1]), strict=True):
                assert np.array_equal(left, right)


def test_sinks_are_in_the_log_sum_exp(seed: int) -> None:
    """With a sink far above the scores, lse is the sink and out goes to 0; -inf is no sink."""
    arguments = make(np.random.default_rng(seed), sinks=np.full(6, 60, np.float32))
    out, lse = run(arguments)
    assert np.allclose(lse.view(np.float32)[lse.view(np.float32) > -1e30], 60)
    assert np.abs(out.view(np.float32)).max() < 1e-15
    none = run(arguments, sinks=np.full(6, -np.inf, np.float32))
    for got, want in zip(none, run(arguments, sinks=None), strict=True):
        assert np.array_equal(got, want)


def test_window_leaves_released_blocks_unread(seed: int) -> None:
    """Columns wholly behind every query's window may hold anything."""
    arguments = make(
        np.random.default_rng(seed), seq_lens=[200], query_lens=[3], window=20, block_size=16
    )
    expected = run(arguments)
    table = arguments["table"].copy()
    table[: (200 - 3 - 19) // 16] = -1
    for got, want in zip(run(arguments, table=table), expected, strict=True):
        assert np.array_equal(got, want)


def test_extreme_scores_stay_finite(seed: int) -> None:
    arguments = make(np.random.default_rng(seed), scale=3000.0)
    check_shape = run(arguments)[0].view(np.float32)
    assert np.isfinite(check_shape).all()
