"""Launching, against a driver that does nothing: what arrives there is what was interpreted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_kernels.attention.cuda_call import KERNELS as ATTENTION
from cuda_kernels.cuda.compile import MissingLibrary, compile_kernel
from cuda_kernels.cuda.launch import GpuDevice
from cuda_kernels.frames.cuda_call import KERNELS
from tests.ptx.device import CACHE, needs_compiler

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import ctypes, hashlib, json, sys
from pathlib import Path
import numpy as np
import cuda_kernels
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.launch import GpuDevice

driver = ctypes.CDLL("libcuda.so.1")
for name, kind in (("argument", ctypes.c_uint64), ("stream", ctypes.c_void_p),
                   ("image", ctypes.c_void_p), ("grid", ctypes.c_uint), ("block", ctypes.c_uint)):
    getattr(driver, "stub_" + name).restype = kind
device = GpuDevice(0, Path(sys.argv[1]))
driver.stub_expect(10)
staging = DeviceArray(0x7000, (3, 40000), np.dtype("u1"), device)
arena = DeviceArray(2**40 + 64, (9, 50000), np.dtype("u1"), device)
ids = DeviceArray(0x9000, (3,), np.dtype("i4"), device)
cuda_kernels.gather_frames(staging, arena, ids, offset=4096, max_blocks=4, stream=0xABC0)
told = {
    "capability": device.capability,
    "launches": driver.stub_launches(),
    "arguments": [driver.stub_argument(i) for i in range(10)],
    "stream": driver.stub_stream(),
    "grid": [driver.stub_grid(i) for i in range(3)],
    "block": [driver.stub_block(i) for i in range(3)],
    "image": hashlib.sha256(ctypes.string_at(driver.stub_image(), int(sys.argv[2]))).hexdigest(),
}
for again in range(50):
    cuda_kernels.gather_frames(staging, arena, ids, offset=4096, max_blocks=1 + again % 7)
told["later"] = driver.stub_launches()
told["loaded"] = len(device._kernels)

# float32 parameters: what arrives are the bits of a float, in the place of the last two.
driver.stub_expect(41)
def array(address, shape, kind):
    return DeviceArray(address, shape, np.dtype(kind), device)
cuda_kernels.paged_attention(
    array(0x10000, (2, 1, 8), "f4"), array(0x20000, (2, 1, 8), "f4"),
    array(0x30000, (4, 512), "f4"), dtype="float32", key_offset=0, value_offset=128,
    block_size=16, num_kv_heads=1, head_dim=8, value_dim=8,
    table=array(0x40000, (2,), "i4"), table_start=array(0x50000, (2,), "i8"),
    seq_lens=array(0x60000, (2,), "i8"), query_start=array(0x70000, (3,), "i8"),
    scale=0.3, softcap=20.0, stream=0x10,
)
bits = np.array([driver.stub_argument(i) & 0xFFFFFFFF for i in (39, 40)], np.uint32)
told["floats"] = bits.view(np.float32).tolist()
told["attention_grid"] = [driver.stub_grid(i) for i in range(3)]
told["numba"] = "numba" in sys.modules
print(json.dumps(told))
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub driver, built by a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stub driver with")
    folder = tmp_path_factory.mktemp("stub")
    source = ROOT / "tools" / "benchmarks" / "stub_driver.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libcuda.so.1"),
         str(source)],
        check=True,
    )  # fmt: skip
    return folder


def under_stub(stub: Path, code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(stub)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_compiler
def test_what_arrives_at_the_driver(stub: Path) -> None:
    """Image, grid, stream, arguments; the image is what the interpreted PTX was assembled to."""
    made = compile_kernel(KERNELS[0, 4], (9, 0), CACHE)
    compile_kernel(ATTENTION[0, 1, 128], (9, 0), CACHE)
    told = under_stub(stub, SCRIPT, str(CACHE), str(len(made.cubin)))
    assert told["capability"] == [9, 0]
    assert told["launches"] == 1
    assert told["image"] == made.hashes()[1]
    assert told["grid"] == [4, 1, 1]
    assert told["block"] == [256, 1, 1]
    assert told["stream"] == 0xABC0
    assert told["arguments"] == [
        0x7000, 40000, 0, 2**40 + 64 + 4096, 50000, 0x9000, 3, 40000, 32768, 2,
    ]  # fmt: skip
    assert told["later"] == 51
    assert told["loaded"] == 1
    assert told["floats"] == [float(np.float32(0.3)), 20.0]
    assert told["attention_grid"] == [2, 1, 1]
    assert not told["numba"], "a launch from a warm cache imports Numba"


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingLibrary, match=r"cuda-core is not installed.*kvmem\[cuda13\]"):
        GpuDevice()
