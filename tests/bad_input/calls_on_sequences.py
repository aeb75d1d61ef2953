"""Bad calls that have to do with sequences and tokens; see test_bad_input.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import kvmem
from tests.bad_input.world import SECRET_NAME, Case


def generator() -> Any:
    yield 1


TOKENS: list[tuple[str, Any, type[Exception], str]] = [
    ("none", None, TypeError, "tokens must be .*NoneType"),
    ("str", "abc", TypeError, "tokens must be .*str"),
    ("bytes", b"abc", TypeError, "tokens must be .*bytes"),
    ("int", 5, TypeError, "tokens must be .*int"),
    ("generator", generator(), TypeError, "tokens must be .*generator"),
    ("dict", {1: 2}, TypeError, "tokens must be .*dict"),
    ("set", {1}, TypeError, "tokens must be .*set"),
    ("2-D", np.zeros((1, 2), np.int32), ValueError, r"tokens .*2 dimensions.*\(1, 2\).*1"),
    ("0-D", np.array(3), ValueError, "tokens .*0 dimensions"),
    ("list of lists", [[1]], TypeError, r"tokens\[0\] is a list.*int"),
    ("float array", np.zeros(2), TypeError, "tokens .*float64.*int32"),
    ("float tensor", torch.zeros(2), TypeError, "tokens .*float32.*integers"),
    (
        "bfloat16 tensor",
        torch.zeros(2, dtype=torch.bfloat16),
        TypeError,
        "tokens .*bfloat16.*int32",
    ),
    ("complex tensor", torch.zeros(2, dtype=torch.complex64), TypeError, "tokens .*complex64"),
    ("bool array", np.zeros(2, bool), TypeError, "tokens .*bool.*int32"),
    ("object array", np.array([1, None]), TypeError, "tokens .*object"),
    ("float in a list", [1, 2.0], TypeError, r"tokens\[1\] is a float.*int"),
    ("NaN in a list", [1, math.nan], TypeError, r"tokens\[1\] is a float"),
    ("bool in a list", [1, True], TypeError, r"tokens\[1\] is a bool"),
    ("str in a list", [1, 2, "x"], TypeError, r"tokens\[2\] is a str"),
    ("None in a list", [None], TypeError, r"tokens\[0\] is a NoneType"),
    ("negative", [1, 2, -3], ValueError, r"tokens\[2\] .*0 to 2\*\*31 - 1"),
    ("negative array", np.array([0, -1], np.int32), ValueError, r"tokens\[1\] .*2\*\*31"),
    ("2**31", [2**31], ValueError, r"tokens\[0\] .*2\*\*31 - 1"),
    ("2**31 array", np.array([0, 2**31]), ValueError, r"tokens\[1\] .*2\*\*31 - 1"),
    ("2**63", [1, 2**63], ValueError, r"tokens\[1\] .*2\*\*31 - 1"),
    ("2**64 array", np.array([2**64 - 1], np.uint64), ValueError, r"tokens\[0\] .*2\*\*31 - 1"),
    ("meta tensor", torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "meta.*cpu"),
    ("sparse tensor", torch.tensor([1, 0]).to_sparse(), TypeError, "tokens .*sparse"),
]

CASES: list[Case] = [
    *(
        (f"create tokens {name}", lambda w, t=tokens: w.m.create(t), kind, text)
        for name, tokens, kind, text in TOKENS
    ),
    *(
        (f"match tokens {name}", lambda w, t=tokens: w.m.match(t), kind, text)
        for name, tokens, kind, text in TOKENS[:9]
    ),
    *(
        (f"append tokens {name}", lambda w, t=tokens: w.m.append([w.seq], t), kind, text)
        for name, tokens, kind, text in TOKENS
    ),
    *(
        (
            f"pin tokens {name}",
            lambda w, t=tokens: w.m.pin(t),
            kind,
            text.replace("tokens", "seq_or_tokens"),
        )
        for name, tokens, kind, text in TOKENS[:6]
    ),
    *(
        (f"can_fit tokens {name}", lambda w, t=tokens: w.m.can_fit(tokens=t), kind, text)
        for name, tokens, kind, text in TOKENS[1:6]
    ),
    # --- create ---
    (
        "namespace int",
        lambda w: w.m.create([1], namespace=3),
        TypeError,
        "namespace .*str, bytes.*int",
    ),
    ("namespace list", lambda w: w.m.match([1], [SECRET_NAME]), TypeError, "namespace .*list"),
    ("can_fit namespace", lambda w: w.m.can_fit(tokens=[1], namespace=1), TypeError, "namespace"),
    ("pin namespace", lambda w: w.m.pin([1], namespace=1.0), TypeError, "namespace .*float"),
    ("reset namespace", lambda w: w.m.reset(5), TypeError, "namespace .*int"),
    ("create positional", lambda w: w.m.create([1], "x"), TypeError, "positional"),
    ("create keyword", lambda w: w.m.create([1], salt="x"), TypeError, "salt"),
    ("priority float", lambda w: w.m.create([1], priority=1.5), TypeError, "priority .*1.5"),
    ("priority huge", lambda w: w.m.create([1], priority=2**40), ValueError, "priority=.*at most"),
    ("priority bool", lambda w: w.m.create([1], priority=True), TypeError, "priority .*True"),
    ("publish int", lambda w: w.m.create([1], publish=1), TypeError, "publish .*True or False"),
    ("max_cached -1", lambda w: w.m.create([1], max_cached=-1), ValueError, "max_cached=-1.*>= 0"),
    ("max_cached str", lambda w: w.m.create([1], max_cached="4"), TypeError, "max_cached .*'4'"),
    ("extras None", lambda w: w.m.create([1], extras=None), TypeError, "extras .*NoneType"),
    ("extras entry", lambda w: w.m.create([1], extras=[5]), TypeError, r"extras\[0\] is 5.*digest"),
    ("extras pair", lambda w: w.m.create([1], extras=[(0, 1)]), TypeError, r"extras\[0\]"),
    (
        "extras digest str",
        lambda w: w.m.create([1], extras=[(0, 1, "d" * 16)]),
        TypeError,
        r"extras\[0\] digest is a str.*bytes",
    ),
    (
        "extras digest short",
        lambda w: w.m.create([1], extras=[(0, 1, b"short")]),
        ValueError,
        r"extras\[0\] digest has 5 bytes.*16",
    ),
    (
        "extras length 0",
        lambda w: w.m.create([1], extras=[(0, 0, b"d" * 16)]),
        ValueError,
        r"extras\[0\] length=0.*>= 1",
    ),
    (
        "extras start -1",
        lambda w: w.m.create([1], extras=[(-1, 1, b"d" * 16)]),
        ValueError,
        r"extras\[0\] start=-1",
    ),
    (
        "extras past the end",
        lambda w: w.m.create([1, 2], extras=[(1, 2, b"d" * 16)]),
        ValueError,
        "positions 1 to 2.*inside the 2 tokens",
    ),
    (
        "extras overlap",
        lambda w: w.m.create([1] * 9, extras=[(0, 4, b"d" * 16), (3, 2, b"e" * 16)]),
        ValueError,
        "overlap at position 3",
    ),
    # --- sequences given to each method ---
    *(
        (
            f"{name} freed",
            lambda w, f=call: f(w, [w.seq, w.freed]),
            kvmem.UnknownSequence,
            r"\[1\].*freed",
        )
        for name, call in (
            ("append", lambda w, s: w.m.append(s, [1, 2])),
            ("accept", lambda w, s: w.m.accept(s, [0, 0], [1, 2])),
            ("truncate", lambda w, s: w.m.truncate(s, 0)),
            ("free", lambda w, s: w.m.free(s)),
            ("step", lambda w, s: w.m.step(s)),
            ("swap_out", lambda w, s: w.m.swap_out(s)),
            ("swap_in", lambda w, s: w.m.swap_in(s)),
            ("prefetch", lambda w, s: w.m.prefetch(s)),
            ("make_room", lambda w, s: w.m.make_room(s)),
            ("can_fit", lambda w, s: w.m.can_fit(seqs=s)),
        )
    ),
    *(
        (
            f"{name} foreign",
            lambda w, f=call: f(w, [w.foreign]),
            kvmem.UnknownSequence,
            r"\[0\].*another Manager",
        )
        for name, call in (
            ("append", lambda w, s: w.m.append(s, [1])),
            ("accept", lambda w, s: w.m.accept(s, [0], [1])),
            ("truncate", lambda w, s: w.m.truncate(s, 0)),
            ("free", lambda w, s: w.m.free(s)),
            ("step", lambda w, s: w.m.step(s)),
            ("step some", lambda w, s: w.m.step(s, fit="some")),
            ("swap_out", lambda w, s: w.m.swap_out(s, how="auto")),
            ("swap_in", lambda w, s: w.m.swap_in(s)),
            ("prefetch", lambda w, s: w.m.prefetch(s)),
            ("make_room", lambda w, s: w.m.make_room(s)),
            ("can_fit", lambda w, s: w.m.can_fit(seqs=s)),
        )
    ),
    *(
        (
            f"{name} twice",
            lambda w, f=call: f(w, [w.seq, w.waiting, w.seq]),
            ValueError,
            r"\[2\] .*twice.*once",
        )
        for name, call in (
            ("append", lambda w, s: w.m.append(s, [1, 2, 3])),
            ("accept", lambda w, s: w.m.accept(s, 0, [1, 2, 3])),
            ("truncate", lambda w, s: w.m.truncate(s, 0)),
            ("free", lambda w, s: w.m.free(s)),
            ("step", lambda w, s: w.m.step(s)),
            ("swap_out", lambda w, s: w.m.swap_out(s)),
            ("swap_in", lambda w, s: w.m.swap_in(s)),
            ("make_room", lambda w, s: w.m.make_room(s)),
            ("can_fit", lambda w, s: w.m.can_fit(seqs=s)),
        )
    ),
    *(
        (
            f"{name} not a list",
            lambda w, f=call: f(w, w.seq),
            TypeError,
            "seqs must be a list of Sequence, not Sequence",
        )
        for name, call in (
            ("append", lambda w, s: w.m.append(s, [1])),
            ("truncate", lambda w, s: w.m.truncate(s, 0)),
            ("free", lambda w, s: w.m.free(s)),
            ("step", lambda w, s: w.m.step(s)),
            ("swap_out", lambda w, s: w.m.swap_out(s)),
            ("prefetch", lambda w, s: w.m.prefetch(s)),
            ("make_room", lambda w, s: w.m.make_room(s)),
            ("can_fit", lambda w, s: w.m.can_fit(seqs=s)),
        )
    ),
    (
        "step of ids",
        lambda w: w.m.step([1, 2]),
        TypeError,
        r"seqs\[0\] must be a Sequence, not int",
    ),
    ("free None", lambda w: w.m.free(None), TypeError, "seqs must be a list.*NoneType"),
    ("fork freed", lambda w: w.m.fork(w.freed), kvmem.UnknownSequence, "seq.*freed"),
    ("fork foreign", lambda w: w.m.fork(w.foreign), kvmem.UnknownSequence, "another Manager"),
    ("fork a list", lambda w: w.m.fork([w.seq]), TypeError, "seq must be a Sequence, not list"),
    ("fork 0", lambda w: w.m.fork(w.seq, 0), ValueError, "n=0.*>= 1"),
    ("fork -1", lambda w: w.m.fork(w.seq, -1), ValueError, "n=-1"),
    ("fork 1.0", lambda w: w.m.fork(w.seq, 1.0), TypeError, "n must be.*1.0"),
    ("fork too many", lambda w: w.m.fork(w.seq, 2**40), ValueError, "n=.*at most"),
    ("fork open", lambda w: w.m.fork(w.busy), RuntimeError, "end the step first"),
    ("field of freed", lambda w: w.freed.num_tokens, kvmem.UnknownSequence, "freed"),
    ("tokens of freed", lambda w: w.freed.tokens, kvmem.UnknownSequence, "freed"),
    ("blocks of freed", lambda w: w.freed.block_ids, kvmem.UnknownSequence, "freed"),
    # --- append, accept, truncate ---
    (
        "append too few",
        lambda w: w.m.append([w.seq, w.waiting], [1]),
        ValueError,
        "1 entries.* 2 .*2 seq",
    ),
    (
        "append too many",
        lambda w: w.m.append([w.seq], [1, 2]),
        ValueError,
        "tokens has 2 .* 1 over 1",
    ),
    ("append nobody", lambda w: w.m.append([], [1]), ValueError, "tokens has 1 .* 0 over 0"),
    (
        "counts sum",
        lambda w: w.m.append([w.seq], [1, 2], counts=[3]),
        ValueError,
        "tokens has 2 .* 3",
    ),
    (
        "counts length",
        lambda w: w.m.append([w.seq], [1], counts=[1, 0]),
        ValueError,
        r"counts .*\(2,\).*\(1,\)",
    ),
    ("counts int", lambda w: w.m.append([w.seq], [1], counts=-1), ValueError, "counts=-1.*0 to"),
    (
        "counts 2**70",
        lambda w: w.m.append([w.seq], [1], counts=2**70),
        ValueError,
        "counts=.*2.*31",
    ),
    (
        "counts wrap",
        lambda w: w.m.append([w.seq, w.waiting], [], counts=[2**63, 2**63]),
        ValueError,
        r"counts\[0\]",
    ),
    (
        "counts ragged",
        lambda w: w.m.append([w.seq], [1], counts=[[1], [1, 2]]),
        ValueError,
        "counts is ragged",
    ),
    (
        "counts bfloat16",
        lambda w: w.m.append([w.seq], [1], counts=torch.ones(1, dtype=torch.bfloat16)),
        TypeError,
        "counts .*bfloat16",
    ),
    (
        "counts meta",
        lambda w: w.m.append([w.seq], [1], counts=torch.ones(1, dtype=torch.int32, device="meta")),
        TypeError,
        "counts ",
    ),
    (
        "counts negative",
        lambda w: w.m.append([w.seq, w.waiting], [], counts=[1, -1]),
        ValueError,
        r"counts\[1\] is -1",
    ),
    (
        "counts float",
        lambda w: w.m.append([w.seq], [1], counts=[1.0]),
        TypeError,
        "counts .*float64",
    ),
    ("counts str", lambda w: w.m.append([w.seq], [1], counts="1"), TypeError, "counts is '1'"),
    ("counts bool", lambda w: w.m.append([w.seq], [1], counts=True), TypeError, "counts .*bool"),
    (
        "counts 2-D",
        lambda w: w.m.append([w.seq], [1], counts=[[1]]),
        ValueError,
        r"counts .*\(1, 1\)",
    ),
    (
        "counts huge",
        lambda w: w.m.append([w.seq], [1], counts=[2**62]),
        ValueError,
        r"counts\[0\] is .*2\*\*31",
    ),
    (
        "counts 2**64",
        lambda w: w.m.append([w.seq], [1], counts=[2**64]),
        (TypeError, ValueError),
        "counts",
    ),
    ("draft int", lambda w: w.m.append([w.seq], [1], draft=1), TypeError, "draft .*True or False"),
    (
        "append on drafts",
        lambda w: w.m.append([w.drafted], [1]),
        ValueError,
        "unaccepted drafts.*accept",
    ),
    (
        "accept too many",
        lambda w: w.m.accept([w.drafted], [3], [1]),
        ValueError,
        r"num_accepted\[0\] .*2.*0 to 2",
    ),
    (
        "accept none there",
        lambda w: w.m.accept([w.seq], [1], [1]),
        ValueError,
        r"num_accepted\[0\] .*0",
    ),
    (
        "accept negative",
        lambda w: w.m.accept([w.drafted], [-1], [1]),
        ValueError,
        r"num_accepted\[0\] is -1",
    ),
    (
        "accept length",
        lambda w: w.m.accept([w.drafted], [0, 0], [1]),
        ValueError,
        r"num_accepted .*\(2,\)",
    ),
    (
        "accept tokens",
        lambda w: w.m.accept([w.drafted], [0], [1, 2]),
        ValueError,
        "tokens has 2 .* 1 seq",
    ),
    (
        "accept float",
        lambda w: w.m.accept([w.drafted], [0.5], [1]),
        TypeError,
        "num_accepted .*float",
    ),
    ("accept open", lambda w: w.m.accept([w.busy], [0], [1]), RuntimeError, "end the step first"),
    ("truncate -1", lambda w: w.m.truncate([w.seq], -1), ValueError, "num_tokens=-1.*0 to"),
    (
        "truncate one -1",
        lambda w: w.m.truncate([w.seq, w.waiting], [1, -1]),
        ValueError,
        r"num_tokens\[1\] is -1",
    ),
    (
        "truncate longer",
        lambda w: w.m.truncate([w.waiting, w.seq], [3, 8]),
        ValueError,
        r"num_tokens\[1\] is 8.*0 to 7",
    ),
    ("truncate float", lambda w: w.m.truncate([w.seq], 2.0), TypeError, "num_tokens is 2.0"),
    ("truncate None", lambda w: w.m.truncate([w.seq], None), TypeError, "num_tokens is None"),
    (
        "truncate length",
        lambda w: w.m.truncate([w.seq], [1, 2]),
        ValueError,
        r"num_tokens .*\(2,\)",
    ),
    (
        "truncate open",
        lambda w: w.m.truncate([w.seq, w.busy], 0),
        RuntimeError,
        "row 1.*end the step first",
    ),
]
