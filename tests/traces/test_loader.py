"""The trace loader: what it reads, and what it says of files that are not what they have to be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem import traces
from kvmem.errors import FormatError
from kvmem.traces import read_trace

FOLDER = Path(__file__).parent
GOOD: dict[str, Any] = {
    "timestamp": 27,
    "input_length": 1025,
    "output_length": 3,
    "hash_ids": [0, 7, 2**40],
}


def line(**changes: Any) -> bytes:
    """A good line with other fields; None leaves one out."""
    fields = {**GOOD, **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not None}).encode() + b"\n"


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("name", "first_ids"), [("conversation", 14), ("synthetic", 79)])
def test_the_samples(name: str, first_ids: int) -> None:
    requests = list(read_trace(FOLDER / f"mooncake_{name}_60.jsonl.gz"))
    assert len(requests) == 60
    assert len(requests[0].hash_ids) == first_ids
    times = [r.timestamp_ms for r in requests]
    assert times == sorted(times)
    for r in requests:
        assert r.hash_ids.dtype == np.int64
        assert len(r.hash_ids) == -(-r.input_length // 512)


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    data = line() + line(timestamp=0.5) + line(input_length=0, hash_ids=[]).rstrip(b"\n")
    plain = list(read_trace(written(tmp_path, data)))
    packed = tmp_path / "named.otherwise"
    packed.write_bytes(gzip.compress(data))
    again = list(read_trace(str(packed)))
    assert [r.timestamp_ms for r in plain] == [r.timestamp_ms for r in again] == [27.0, 0.5, 27.0]
    assert [r.hash_ids.tolist() for r in again] == [[0, 7, 2**40], [0, 7, 2**40], []]
    assert (plain[0].input_length, plain[0].output_length) == (1025, 3)


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert list(read_trace(written(tmp_path, b""))) == []
    packed = tmp_path / "empty.gz"
    packed.write_bytes(gzip.compress(b""))
    assert list(read_trace(packed)) == []


def test_fields_beyond_the_known_are_passed_over(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, line(chat_id=5, type="text", turn=1)))
    assert request.input_length == 1025


def test_the_bailian_layout(tmp_path: Path) -> None:
    """Seconds, and blocks of 16 tokens."""
    path = written(tmp_path, line(timestamp=61.25, input_length=33, chat_id=1, parent_chat_id=-1))
    (request,) = read_trace(path, layout="bailian")
    assert request.timestamp_ms == 61250.0
    with pytest.raises(FormatError, match=r"line 1: 3 hash_ids for input_length=33; 1 blocks"):
        list(read_trace(path))


def test_a_line_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, line() + line() + b"no JSON\n"))
    next(requests)
    next(requests)
    with pytest.raises(FormatError, match=r"line 3: no JSON"):
        next(requests)


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'timestamp': 1}\n", r"no JSON"),
    "cut off": (line()[:30] + b"\n", r"no JSON"),
    "an empty line": (b"\n" + line(), r"no JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}\n', r"no JSON \(UnicodeDecodeError\)"),
    "zeros": (b"\0" * 50, r"no JSON"),
    "too deep": (b"[" * 200_000 + b"\n", r"no JSON \(RecursionError\)"),
    "a number too long": (line().replace(b"27", b"9" * 5000), r"no JSON"),
    "a list": (b"[1, 2]\n", r"a JSON list; allowed: one object"),
    "null": (b"null\n", r"a JSON NoneType"),
    "no timestamp": (line(timestamp=None), r"'timestamp' is missing"),
    "no input_length": (line(input_length=None), r"'input_length' is missing"),
    "no output_length": (line(output_length=None), r"'output_length' is missing"),
    "no hash_ids": (line(hash_ids=None), r"'hash_ids' is missing"),
    "a time in words": (line(timestamp="27"), r"timestamp: '27' is no number"),
    "a true time": (line(timestamp=True), r"timestamp: True is no number"),
    "a time before the start": (line(timestamp=-1), r"timestamp: -1 is out of range"),
    "an endless time": (line(timestamp=1e400), r"no JSON"),
    "a time far out": (line(timestamp=1e300), r"timestamp: 1e\+300 is out of range"),
    "NaN": (line(timestamp=float("nan")), r"no JSON"),
    "a length in words": (line(input_length="1025"), r"input_length: '1025' is no integer"),
    "half a token": (line(input_length=1024.5), r"input_length: 1024.5 is no integer"),
    "a true length": (line(output_length=True), r"output_length: True is no integer"),
    "a negative prompt": (line(input_length=-1), r"input_length: -1 is out of range"),
    "a negative answer": (line(output_length=-3), r"output_length: -3 is out of range"),
    "a length far out": (line(output_length=2**31), r"output_length: 2147483648 is out of range"),
    "ids as a string": (line(hash_ids="0 7 9"), r"hash_ids is a str; allowed: a list"),
    "ids as an object": (line(hash_ids={"0": 1}), r"hash_ids is a dict"),
    "too few ids": (line(hash_ids=[0, 7]), r"2 hash_ids for input_length=1025; 3 blocks of 512"),
    "too many ids": (line(hash_ids=[0, 7, 9, 11]), r"4 hash_ids for input_length=1025"),
    "a huge prompt without ids": (
        line(input_length=2**31 - 1),
        r"3 hash_ids for input_length=2147",
    ),
    "an id in words": (line(hash_ids=[0, "7", 9]), r"hash_ids: '7' is no integer"),
    "half an id": (line(hash_ids=[0, 7.5, 9]), r"hash_ids: 7.5 is no integer"),
    "a negative id": (line(hash_ids=[0, -7, 9]), r"hash_ids: -7 is out of range"),
    "an id of 65 bits": (line(hash_ids=[0, 2**64, 9]), r"hash_ids: 18446744073709551616 is out"),
    "a list as id": (line(hash_ids=[0, [7], 9]), r"hash_ids: \[7\] is no integer"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines(name: str, tmp_path: Path) -> None:
    data, what = BAD_LINES[name]
    with pytest.raises(FormatError, match=rf"^'trace.jsonl', line 2: .*{what}") as caught:
        list(read_trace(written(tmp_path, line() + data)))
    assert len(str(caught.value)) <= 300


def test_a_line_too_long_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 200)
    whole = line().rstrip(b"\n").ljust(199) + b"\n"
    assert len(list(read_trace(written(tmp_path, whole)))) == 1
    for data in (b" " + whole, gzip.compress(b" " * 10_000_000)):
        with pytest.raises(FormatError, match=r"line 1: longer than 200 bytes"):
            list(read_trace(written(tmp_path, data)))


def test_packed_data_cut_off_or_damaged(tmp_path: Path) -> None:
    data = b"".join(line(timestamp=i) for i in range(2000))
    packed = gzip.compress(data)
    with pytest.raises(FormatError, match=r"line \d+: the gzip data end too early"):
        list(read_trace(written(tmp_path, packed[: len(packed) // 2])))
    with pytest.raises(FormatError, match=r"line \d+: the gzip data end too early"):
        list(read_trace(written(tmp_path, packed[:-4])))
    for at in (12, len(packed) - 6):  # in the data, and in the checksum
        damaged = bytearray(packed)
        damaged[at] ^= 0xFF
        with pytest.raises(FormatError, match=r"line \d+: the gzip data are damaged"):
            list(read_trace(written(tmp_path, bytes(damaged))))


def test_an_unknown_layout_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layout='moonkake'.*did you mean 'mooncake'"):
        read_trace(written(tmp_path, line()), layout="moonkake")
    with pytest.raises(FileNotFoundError):
        next(read_trace(tmp_path / "absent"))
