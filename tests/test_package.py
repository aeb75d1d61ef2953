"""What is shipped: names in the wheel, a clean installation, cost of the import, public API."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import sysconfig
import types
import zipfile
from pathlib import Path

import pytest

import kvmem

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "public_api.txt"
PACKAGES = ("kvmem", "cuda_kernels")


def python(code: str, *, executable: str = sys.executable, cwd: Path = ROOT) -> str:
    """The output of ``code`` run by a fresh interpreter."""
    done = subprocess.run(
        [executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree with what is installed: nothing is fetched."""
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), "."],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_names_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"kvmem-{kvmem.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    shipped = {name for name in names if not name.startswith(info)}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".nbi", ".nbc")
    }
    assert shipped == expected
    assert "kvmem/py.typed" in shipped
    assert f"{info}/licenses/LICENSE" in names
    entry_points = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "kvmem = kvmem.cli.main:main" in entry_points


SMOKE = """
import json, sys
import cuda_kernels, kvmem
assert "numba.cuda" not in sys.modules
plan = kvmem.Config(num_layers=2, num_kv_heads=1, head_dim=8, device_blocks=4).plan()
print(json.dumps([kvmem.__file__, cuda_kernels.__file__, kvmem.__version__, plan.device_blocks]))
"""


@pytest.mark.slow
def test_clean_installation(wheel: Path, tmp_path: Path) -> None:
    """The wheel in an environment of its own, tried from another folder.

    The dependencies are lent by a path file, so nothing is fetched: a path file inside a folder
    that is named by a path file is not read, so the editable kvmem stays out of sight.
    """
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=120)
    executable = str(home / "bin" / "python")
    subprocess.run(
        [executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
         "--no-index", "--no-deps", str(wheel)],
        check=True, timeout=120,
    )  # fmt: skip
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = json.loads(python(SMOKE, executable=executable, cwd=elsewhere))
    assert all(Path(path).is_relative_to(home) for path in found[:2])
    assert found[2:] == [kvmem.__version__, 4]
    command = subprocess.run(
        [home / "bin" / "kvmem", "plan", "--layers", "2", "--kv-heads", "1", "--head-dim", "8",
         "--device-blocks", "4", "--json"],
        cwd=elsewhere, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(command.stdout)["device_blocks"] == 4
    for name in ("report", "doctor"):
        command = subprocess.run(
            [home / "bin" / "kvmem", name, "--json"],
            cwd=elsewhere, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert json.loads(command.stdout)["schema"] == f"kvmem.{name}/1"
        assert command.stderr == ""


COST = """
import json, sys, time
import torch
start = time.process_time()
import kvmem
kvmem.Config
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(m for m in sys.modules if m.startswith("numba"))]))
"""

COMPILES = """
import json, sys
from numba.core import event
with event.install_recorder("numba:compile") as record:
    import cuda_kernels
    import kvmem
    names = [getattr(kvmem, name) for name in NAMES]
cuda = sorted(m for m in sys.modules if m.startswith("numba.cuda"))
print(json.dumps([len(record.buffer), cuda]))
"""


def test_import_is_cheap_beyond_torch() -> None:
    """Processor time, so that a busy machine does not matter; best of three."""
    runs = [json.loads(python(COST)) for _ in range(3)]
    seconds = min(run[0] for run in runs)
    print(f"import kvmem: {seconds:.3f} s beyond torch")
    assert seconds <= 0.5
    assert not [m for m in runs[0][1] if m.startswith("numba.cuda")]


def test_import_compiles_nothing() -> None:
    names = list(kvmem.__all__)
    compiles, cuda = json.loads(python(COMPILES.replace("NAMES", repr(names))))
    assert compiles == 0
    assert cuda == []


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, kvmem.cli.main; print('torch' in sys.modules)"
    assert python(code).strip() == "False"


def test_a_stranger_named_cuda_kernels_is_refused(tmp_path: Path) -> None:
    stranger = tmp_path / "cuda_kernels"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvmem"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(stranger) in done.stderr


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'Managr'"):
        kvmem.Managr  # type: ignore[attr-defined]
    assert set(kvmem.__all__) <= set(dir(kvmem))


def described(name: str, value: object) -> list[str]:
    """Lines that change whenever a caller could notice: names, signatures, bases, kinds."""
    if isinstance(value, types.ModuleType):
        members = getattr(value, "__all__", [n for n in vars(value) if not n.startswith("_")])
        return [f"module {name}"] + [
            line for n in sorted(members) for line in described(f"  {name}.{n}", getattr(value, n))
        ]
    if not inspect.isclass(value):
        return [f"{name}{signature(value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__)
    lines = [f"class {name}({bases}){signature(value)}"]
    members = dict(inspect.getmembers_static(value))
    for member in sorted(m for m in members if not m.startswith("_") or m in SPECIAL):
        item = members[member]
        if member in SPECIAL and item is getattr(object, member, None):
            continue
        if any(member in vars(base) for base in value.__mro__ if base.__module__ == "builtins"):
            continue
        item = getattr(item, "__func__", item)
        kind = signature(item) if callable(item) else " (property)"
        lines.append(f"    {member}{kind}")
    return lines


SPECIAL = ("__enter__", "__exit__", "__len__", "__iter__", "__getitem__")


def signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f": {type(value).__name__}"


def test_public_api_is_what_the_snapshot_says() -> None:
    lines = [
        line for name in sorted(kvmem.__all__) for line in described(name, getattr(kvmem, name))
    ]
    text = "\n".join(lines) + "\n"
    if os.environ.get("KVMEM_UPDATE_API") == "1":
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text(), "the public API changed: KVMEM_UPDATE_API=1 renews it"
