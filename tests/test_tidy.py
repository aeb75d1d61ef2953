"""House rules that a machine can see, each failure with the place and what to do about it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvmem", "cuda_kernels")
CODE = (*PACKAGES, "tools", "docs/examples")

MODULE_LINES, FUNCTION_LINES, TEST_MODULE_LINES = 400, 60, 600

#: Places that may be longer, each with its reason: ``path`` or ``path::function``.
LONGER: dict[str, str] = {
    "kvmem/store/store.py": "the whole order of work of one rank, to be read in one place",
    "kvmem/manager.py": "the facade: a third is docstrings, each method checks and delegates",
    "cuda_kernels/attention/cuda_decode.py::attend": "it holds the kernel",
    "cuda_kernels/attention/cuda_decode.py::kernel": "one straight line; a drawing stands above it",
    "cuda_kernels/attention/cuda_decode_mma.py": "one kernel and the drawing of its data path",
    "cuda_kernels/attention/cuda_decode_mma.py::attend": "it holds the kernel",
    "cuda_kernels/attention/cuda_decode_mma.py::kernel": "one straight line, drawn above it",
    "cuda_kernels/attention/cuda_prefill.py::attend_prompts": "it holds the kernel",
    "cuda_kernels/attention/cuda_prefill.py::kernel": "one straight line, drawn above it",
    "tests/faults/driver.py": "one workload with the checks that make faults show",
}

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("os", "system")}


def sources(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no sources in {folders}"
    return found


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and lines of the body of each function, its signature and docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                yield node.name, (node.end_lineno or 0) - body[0].lineno + 1


def test_lengths() -> None:
    long = []
    for path in sources(*CODE, "tests"):
        text = path.read_text()
        limit = TEST_MODULE_LINES if place(path).startswith("tests/") else MODULE_LINES
        lines = text.count("\n")
        if lines > limit and place(path) not in LONGER:
            long.append(f"{place(path)}: {lines} lines, at most {limit}: is it still one idea?")
        for name, length in functions(ast.parse(text)):
            if length > FUNCTION_LINES and f"{place(path)}::{name}" not in LONGER:
                long.append(f"{place(path)}::{name}: {length} lines, at most {FUNCTION_LINES}")
    assert not long, "\n".join(long)


def test_exceptions_to_the_lengths_are_still_needed() -> None:
    for name, reason in LONGER.items():
        path, _, function = name.partition("::")
        assert reason
        tree = ast.parse((ROOT / path).read_text())
        if function:
            assert dict(functions(tree))[function] > FUNCTION_LINES, f"{name} is short now"


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = []
    for path in sources(*CODE):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in FORBIDDEN_CALLS:
                    found.append(f"{place(path)}:{node.lineno}: {node.func.id}()")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES:
                    found.append(f"{place(path)}:{node.lineno}: {node.value.id}.{node.attr}")
            found += [
                f"{place(path)}:{node.lineno}: import {name}"
                for name in names
                if name in FORBIDDEN_MODULES
            ]
    assert not found, "\n".join(found)


def test_no_module_state_and_no_utils() -> None:
    found = [place(p) for p in sources(*CODE) if re.search(r"util|helper|misc|common", p.stem)]
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Global):
                found.append(f"{place(path)}:{node.lineno}: global {', '.join(node.names)}")
    assert not found, "\n".join(found)


def test_modules_say_what_they_are() -> None:
    bare = [place(p) for p in sources(*PACKAGES) if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not bare, f"no docstring: {bare}"


def test_public_names_are_documented() -> None:
    bare = []
    for path in sorted((ROOT / "kvmem").glob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
        public = [n for n in classes if not n.name.startswith("_")]
        nodes: list[ast.ClassDef | ast.FunctionDef] = [*public]
        nodes += [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        nodes += [n for c in public for n in c.body if isinstance(n, ast.FunctionDef)]
        for node in nodes:
            if not node.name.startswith("_") and not ast.get_docstring(node):
                overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
                if not overload:
                    bare.append(f"{place(path)}:{node.lineno}: {node.name}")
    assert not bare, "\n".join(bare)


def test_ci_is_short_and_only_calls_make() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(lines) <= 30
    targets = re.findall(r"^for target in (.*); do$", "\n".join(lines), re.MULTILINE)
    assert targets, "the stages are gone"
    for target in targets[0].split():
        assert target in make_targets()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines == sorted(lines, key=str.lower)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line), line


def commands(path: Path) -> list[str]:
    """The command lines in the fenced shell blocks of a page."""
    blocks = re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", path.read_text(), re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/command-line.md"]
)
def test_commands_in_the_pages_exist(page: str) -> None:
    path = ROOT / page
    if not path.exists():
        pytest.skip(f"{page} is not written yet")
    for line in commands(path):
        words = line.split("#")[0].split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words[:1] == ["make"]:
            asked = {w for w in words[1:] if re.fullmatch(r"[a-z-]+", w)}
            assert asked <= make_targets(), line
        elif words[:1] == ["kvmem"] and len(words) > 1 and not words[1].startswith("-"):
            from kvmem.cli.main import COMMANDS

            assert words[1] in COMMANDS, line
        for word in words:
            if re.fullmatch(r"(?:kvmem|cuda_kernels|tests|tools|docs|\.ci)/\S+", word):
                assert (ROOT / word).exists(), f"{page}: {line}: no {word}"
