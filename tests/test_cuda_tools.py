"""Reports, warmup and stress on a GPU's double (tests/cuda_double)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import kvmem
from cuda_kernels.attention import cuda_call as attention
from cuda_kernels.attention.cuda_call import kernel_for, tensor_kernel_for
from cuda_kernels.cuda.compile import Compiled
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.dtypes import storage_dtype
from kvmem.cli import report as cli_report
from kvmem.cli import warmup as cli_warmup
from kvmem.report import memory_report
from kvmem.store.cuda import kernel_cache
from kvmem.store.cuda.kernel_cache import needed_kernels
from kvmem.stress import StressOptions, run_stress
from tests.cuda_double.kernels import KernelDevice
from tests.cuda_double.opening import Double, install
from tests.cuda_double.runtime import Error


@pytest.fixture
def doubles(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    return install(monkeypatch, seed, "random")


def config(**changes: Any) -> kvmem.Config:
    given: dict[str, Any] = {
        "num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": 16, "device": "cuda",
        "device_blocks": 6, "host_blocks": 4,
    }  # fmt: skip
    return kvmem.Config(**(given | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stress(seed: int, doubles: list[Double], dtype: str) -> None:
    report = run_stress(StressOptions(device="cuda", ops=40, seed=seed, dtype=dtype))
    assert report.breaches == []
    assert report.ok
    assert report.rows_checked > report.attentions_checked > 0
    assert sum(double.streams.num_checked for double in doubles) > 0


def test_what_a_manager_on_a_gpu_holds(doubles: list[Double]) -> None:
    with kvmem.Manager(config()) as manager:
        report = memory_report(manager)
        assert report.manager is not None, report.reasons
        device, host = report.manager.tiers
        assert device.memory == "GPU memory (cpu)"  # the double's tensors say that they are there
        assert (
            device.held_bytes == device.requested_bytes == 7 * manager.config.geometry.frame_bytes
        )
        assert device.pinned_bytes == 0
        assert host.memory == "page-locked host memory"
        assert host.pinned_bytes == host.requested_bytes
        assert "pinned_bytes" not in host.reasons
        assert report.manager.held_bytes == (device.held_bytes or 0) + (host.held_bytes or 0)
        assert "device cuda" in str(cli_report.tables(report))


def test_host_memory_that_could_not_be_locked(
    doubles: list[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, address: int, count: int, flags: int) -> Any:
        return (Error.cudaErrorMemoryAllocation,)

    monkeypatch.setattr("tests.cuda_double.runtime.Runtime.cudaHostRegister", refuse)
    with kvmem.Manager(config()) as manager:
        report = memory_report(manager)
    assert report.manager is not None
    host = report.manager.tiers[1]
    assert (host.memory, host.pinned_bytes) == ("pageable host memory", 0)
    assert "cudaErrorMemoryAllocation" in host.reasons["pinned_bytes"]
    assert "cudaErrorMemoryAllocation" in str(cli_report.tables(report))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (40, 24), (192, 128)])
def test_needed_kernels(dtype: str, dim: int, value_dim: int) -> None:
    """Whatever attention would pick is among them, for every group of heads; no other dtype's."""
    needed = needed_kernels(config(head_dim=dim, v_head_dim=value_dim, dtype=dtype))
    kind = storage_dtype(dtype).kind
    for group in range(1, 17):
        assert attention.KERNELS[kernel_for(kind, group, max(dim, value_dim))] in needed
        key = tensor_kernel_for(kind, group, dim)
        assert key is None or attention.TENSOR_KERNELS[key] in needed
    assert attention.MERGE_KERNELS[kind] in needed
    assert {value for s in needed for name, value in s.constants if name == "kind"} == {kind}
    modules = {source.module.split(".")[1] for source in needed}
    assert modules == {"attention", "block_copy", "cache_write", "frames"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """What was asked to be compiled; nothing is. Every second one was there."""
    asked: list[tuple[str, tuple[int, int]]] = []

    def compile_kernel(
        source: KernelSource, capability: tuple[int, int], folder: Path | None
    ) -> Compiled:
        asked.append((source.name, capability))
        return Compiled(source.name, b"", b"", "", from_cache=len(asked) % 2 == 0)

    monkeypatch.setattr(kernel_cache, "compile_kernel", compile_kernel)
    return asked


def test_warmup_on_a_gpu(
    doubles: list[Double], compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelDevice, "capability", (9, 0), raising=False)
    report = kvmem.warmup(config())
    assert len(doubles) == 1 and doubles[0].streams.log
    needed = needed_kernels(config())
    assert compiled == [(source.name, (9, 0)) for source in needed]
    assert report.num_kernels_compiled + report.num_kernels_loaded == len(needed)
    assert report.num_kernels_loaded == len(needed) // 2
    assert report.kernel_cache_folder


def test_warmup_for_a_gpu_that_is_not_here(
    doubles: list[Double], compiled: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU is opened; the kernels are those of the capability."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    cli_warmup.add_arguments(parser)
    given = parser.parse_args(["--compute-capability", "8.0", "--device", "cuda"])
    assert cli_warmup.run(given) == 0
    assert doubles == []
    assert {capability for _, capability in compiled} == {(8, 0)}
    assert "CUDA kernels" in capsys.readouterr().out
    with pytest.raises(argparse.ArgumentTypeError, match="8.0 and later"):
        cli_warmup.capability("7.5")
    for value, error in (("9.0", TypeError), ((9, 0, 0), TypeError), ((7, 5), ValueError)):
        with pytest.raises(error, match="compute_capability"):
            kvmem.warmup(config(), compute_capability=value)  # type: ignore[arg-type]


def test_warmup_of_the_cpu_makes_no_kernels(compiled: list[Any]) -> None:
    report = kvmem.warmup(config(device="cpu"))
    assert compiled == []
    assert report.kernel_cache_folder == ""
