"""Host memory that may still be taken: control groups, caps, and the check of a Manager."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import kvmem
from kvmem import budget
from kvmem.memory_check import check_memory
from tests.report.fake_host import MACHINE, MIB, SENTINEL, FakeGroups


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    monkeypatch.delenv(budget.CAP_VARIABLE, raising=False)
    memory = SimpleNamespace(total=MACHINE, available=8 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return FakeGroups(tmp_path, monkeypatch)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_of_512_mib(groups: FakeGroups, version: int) -> None:
    groups.mount(version, "/box")
    groups.group(version, "/", limit=SENTINEL if version == 1 else None, used=4 * 2**30)
    groups.group(version, "/box", limit=512 * MIB, used=200 * MIB, inactive_file=20 * MIB)
    found = budget.host_budget()
    assert (found.free_bytes, found.bound_by) == (332 * MIB, "cgroup")
    group = found.cgroup
    assert (group.limit_bytes, group.free_bytes) == (512 * MIB, 332 * MIB)
    assert (group.interface, group.level) == (f"cgroup-v{version}", 0)
    assert group.reason is None


@pytest.mark.parametrize(("version", "none"), [(2, "max"), (1, SENTINEL), (1, 2 * MACHINE)])
def test_what_restricts_nothing_is_no_limit(
    groups: FakeGroups, version: int, none: int | str
) -> None:
    groups.mount(version, "/box")
    groups.group(version, "/box", limit=none, used=MIB)
    found = budget.host_budget()
    assert (found.free_bytes, found.bound_by) == (8 * 2**30, "available")
    assert found.cgroup.limit_bytes is None
    assert "no level sets a limit" in str(found.cgroup.reason)


@pytest.mark.parametrize("version", [1, 2])
def test_a_level_above_is_the_tightest(groups: FakeGroups, version: int) -> None:
    groups.mount(version, "/slice/pod/box")
    groups.group(version, "/slice/pod/box", limit=4096 * MIB, used=100 * MIB)
    groups.group(version, "/slice/pod", limit=1024 * MIB, used=1000 * MIB)
    groups.group(version, "/slice", limit=SENTINEL if version == 1 else "max", used=5000 * MIB)
    found = budget.host_budget()
    assert (found.free_bytes, found.bound_by) == (24 * MIB, "cgroup")
    assert (found.cgroup.level, found.cgroup.limit_bytes) == (1, 1024 * MIB)
    assert found.cgroup.num_levels == 4


def test_hybrid_mounts_ask_the_version_that_has_memory(groups: FakeGroups) -> None:
    groups.mount(1, "/box")
    groups.mount(2, "/other", controllers="")
    groups.group(1, "/box", limit=512 * MIB, used=12 * MIB)
    found = budget.host_budget().cgroup
    assert (found.interface, found.free_bytes) == ("cgroup-v1", 500 * MIB)


def test_a_full_group_leaves_nothing(groups: FakeGroups) -> None:
    groups.mount(2, "/box")
    groups.group(2, "/box", limit=512 * MIB, used=600 * MIB)
    assert budget.host_budget().free_bytes == 0


def test_neighbours_that_eat_the_machine_bound_a_generous_group(groups: FakeGroups) -> None:
    groups.mount(2, "/box")
    groups.group(2, "/box", limit=12 * 2**30, used=0)
    found = budget.host_budget()
    assert (found.free_bytes, found.bound_by) == (8 * 2**30, "available")
    assert [limit.name for limit in found.limits] == ["available", "cgroup"]


def test_a_limit_whose_use_is_unreadable_still_counts(groups: FakeGroups) -> None:
    groups.mount(2, "/box")
    groups.group(2, "/box", limit=3 * 2**30, used="?")
    found = budget.host_budget()
    assert found.bound_by == "cgroup"
    assert 0 < found.free_bytes < 3 * 2**30
    assert "memory-usage-unreadable" in found.cgroup.notes


def test_without_control_groups_the_machine_counts(groups: FakeGroups) -> None:
    found = budget.host_budget()
    assert found.bound_by == "available"
    assert found.cgroup.reason == "no control group with memory here"


def test_a_broken_reader_is_a_reason(groups: FakeGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("proclimits.describe", broken)
    found = budget.host_budget()
    assert found.bound_by == "available"
    assert "no such luck" in found.reasons["cgroup"]


def test_the_cap_counts_what_is_already_used(
    groups: FakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    rss = psutil.Process().memory_info().rss
    monkeypatch.setenv(budget.CAP_VARIABLE, str(rss + 300 * MIB))
    found = budget.host_budget()
    assert found.bound_by == budget.CAP_VARIABLE
    assert abs(found.free_bytes - 300 * MIB) < 20 * MIB
    monkeypatch.setenv(budget.CAP_VARIABLE, "1KiB")
    assert budget.free_host_bytes() == 0


@pytest.mark.parametrize("text", ["lots", "-1GiB", "0", "0.5XiB"])
def test_a_bad_cap_is_refused_and_reported(
    groups: FakeGroups, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(budget.CAP_VARIABLE, text)
    with pytest.raises(kvmem.ConfigError, match=f"KVMEM_HOST_LIMIT='{text}' is no size") as caught:
        budget.free_host_bytes()
    assert len(str(caught.value)) <= 300
    assert budget.host_budget().reasons[budget.CAP_VARIABLE] == str(caught.value)


def test_the_address_space_bounds(groups: FakeGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    vms = psutil.Process().memory_info().vms
    soft = vms + 100 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    found = budget.host_budget()
    assert found.bound_by == "address space"
    assert abs(found.free_bytes - 100 * MIB) < 20 * MIB


# --- the Manager ----------------------------------------------------------------------------------


def model(**changes: object) -> kvmem.Config:
    settings: dict[str, object] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64}
    return kvmem.Config(**{**settings, **changes})  # type: ignore[arg-type]


def test_a_share_is_of_what_the_tightest_limit_leaves(groups: FakeGroups) -> None:
    groups.mount(2, "/box")
    groups.group(2, "/box", limit=512 * MIB, used=112 * MIB)
    plan = model(device_blocks=1, host_memory=0.25).plan()
    assert plan.host_bytes <= 100 * MIB < plan.host_bytes + plan.block_bytes


def test_what_does_not_fit_the_container_is_refused_before_it_is_touched(
    groups: FakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.mount(2, "/box")
    groups.group(2, "/box", limit=64 * MIB, used=32 * MIB)

    def untouched(*_: object) -> None:
        raise AssertionError("allocated before it was checked")

    monkeypatch.setattr("kvmem.manager.Runtime", untouched)
    config = model(device_memory="16MiB", host_memory="24MiB")
    with pytest.raises(kvmem.ConfigError, match=r"ask for 4\d\.\d\d MiB") as caught:
        kvmem.Manager(config)
    message = str(caught.value)
    assert "free are 32.00 MiB (33554432 bytes, limit: cgroup)" in message
    assert len(message) <= 300
    largest = int(message.split("at most ")[1].split()[0])
    fits = model(device_blocks=largest - 1, host_blocks=1)
    check_memory(fits)
    with pytest.raises(kvmem.ConfigError):
        check_memory(model(device_blocks=largest, host_blocks=1))


def test_a_manager_refuses_a_bad_cap(groups: FakeGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(budget.CAP_VARIABLE, "many")
    with pytest.raises(kvmem.ConfigError, match="KVMEM_HOST_LIMIT='many'"):
        kvmem.Manager(model(device_blocks=4))


def test_limits_are_plain_data() -> None:
    found = dataclasses.asdict(budget.host_budget({}))
    assert found["free_bytes"] == min(limit["free_bytes"] for limit in found["limits"])
