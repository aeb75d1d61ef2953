"""The README's example as a program, and names in the pages that have to exist in the code."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvmem

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS, VOCABULARY, POSITIONS = 12, 97, 160
TIE = 1e-4  # a smaller margin between the best two tokens decides nothing


class TinyModel:
    """Two layers of attention with random weights, float32: enough to notice one wrong slot."""

    num_layers, num_kv_heads, num_heads, head_dim = 2, 1, 2, 16

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.5

        width = self.num_heads * self.head_dim
        self.token_rows = weights(VOCABULARY, width)
        self.position_rows = weights(POSITIONS, width)
        self.into_query = weights(self.num_layers, width, width)
        self.into_key = weights(self.num_layers, width, self.head_dim)
        self.into_value = weights(self.num_layers, width, self.head_dim)
        self.ends_at: dict[int, int] = {}  # first token -> length of the whole answer

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.token_rows[tokens] + self.position_rows[positions]

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = len(hidden)
        query = (hidden @ self.into_query[layer]).view(rows, self.num_heads, self.head_dim)
        key = (hidden @ self.into_key[layer]).view(rows, 1, self.head_dim)
        return query, key, (hidden @ self.into_value[layer]).view(rows, 1, self.head_dim)

    def update(self, layer: int, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden + mixed.flatten(1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.token_rows.T

    def is_done(self, tokens: Any) -> bool:
        return bool(len(tokens) >= self.ends_at[int(tokens[0])])

    def logits_without_cache(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits behind the last token, everything computed anew by plain dense attention."""
        hidden = self.embed(torch.tensor(tokens), torch.arange(len(tokens)))
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
        for layer in range(self.num_layers):
            query, key, value = self.project(layer, hidden)
            scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * self.head_dim**-0.5
            mixed = torch.einsum("hqk,kd->qhd", (scores + mask).softmax(-1), value[:, 0])
            hidden = self.update(layer, hidden, mixed)
        return self.logits(hidden[-1])


def example() -> str:
    """The one Python block of the README."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    return str(blocks[0])


def prompts_of(seed: int) -> list[list[int]]:
    """Eight prompts: 40 tokens shared behind a first one of their own or, mostly, in front."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY - 10, (count,), generator=draw).tolist()

    shared = tokens(40)
    own = [tokens(5 + 7 * i) for i in range(8)]
    # The first token names the prompt where the answer's length hangs on it; the two groups share.
    return [[VOCABULARY - 1 - (i % 2), *shared, *own[i]] for i in range(8)]


@pytest.mark.parametrize("device_blocks", [9, 20, 64])
def test_the_example_answers_as_the_model_alone(
    device_blocks: int, seed: int, tmp_path: Path
) -> None:
    model, prompts = TinyModel(seed), prompts_of(seed)
    limit = max(map(len, prompts)) + NEW_TOKENS
    model.ends_at = {prompt[0]: limit for prompt in prompts}
    text = example()
    assert text.count("device_blocks=64") == 1
    program = tmp_path / "readme.py"
    program.write_text(text.replace("device_blocks=64", f"device_blocks={device_blocks}"))

    names = runpy.run_path(str(program), init_globals={"model": model, "prompts": prompts})

    answers = [names["answers"][i + 1].tolist() for i in range(len(prompts))]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer[: len(prompt)] == prompt
        assert len(answer) == limit
        for end in range(len(prompt), limit):
            best = model.logits_without_cache(answer[:end]).topk(2)
            if best.values[0] - best.values[1] < TIE:
                break
            assert answer[end] == best.indices[0], f"token {end} of {len(answer)}"
    stats = names["stats"]
    assert stats.prefix_hit_tokens > 0
    assert (stats.swap_outs > 0) == (device_blocks < 64)
    assert names["m"].closed


# --- names ----------------------------------------------------------------------------------------

PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "kvmem" / "ledger" / "README.md",
    ]
)


@cache
def definitions() -> dict[str, set[str]]:
    """Module or class name -> the functions, classes and fields defined in it."""
    found: dict[str, set[str]] = {}
    for package in ("kvmem", "cuda_kernels", "docs/examples", "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            stem = path.parent.name if path.stem == "__init__" else path.stem
            found.setdefault(stem, set()).update(_names(tree.body))
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(_names(node.body))
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                            found[node.name].add(inner.attr)
    state = ast.parse((ROOT / "kvmem" / "ledger" / "state.py").read_text())
    for node in state.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("np.dtype"):
            fields = re.findall(r"\('(\w+)', '", ast.unparse(node.value))
            found[ast.unparse(node.targets[0])] = set(fields)
    return found


def _names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_the_api_page_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    words = set(re.findall(r"[a-z_A-Z0-9]+", " ".join(re.findall(r"`([^`]+)`", page))))
    missing = set(kvmem.__all__) - words
    for owner in (
        kvmem.Manager,
        kvmem.Sequence,
        kvmem.Step,
        kvmem.Block,
        kvmem.Transfer,
        kvmem.Pin,
    ):
        public = {name for name in vars(owner) if not name.startswith("_")}
        missing |= {f"{owner.__name__}.{name}" for name in public - words}
    fields = set(inspect.signature(kvmem.Config).parameters)
    missing |= {f"Config.{name}" for name in fields - words}
    assert not missing, sorted(missing)


DOTTED = re.compile(r"`([A-Za-z_]+)\.([a-z_]+)(?:\(.*?\))?`")
LIBRARIES = {"torch", "numpy", "np", "numba", "m", "step", "seq", "kvmem", "config"}
SUFFIXES = {"py", "md", "toml", "txt", "png", "html", "yml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_names_in_the_pages_exist(page: Path) -> None:
    """`module.function`, `Class.method` and `RECORD.field` in backticks are in the code."""
    known = definitions()
    wrong = [
        f"{owner}.{name}"
        for owner, name in DOTTED.findall(page.read_text())
        if owner not in LIBRARIES and name not in SUFFIXES and name not in known.get(owner, set())
    ]
    assert not wrong, f"{page.name} names what is not there: {sorted(set(wrong))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_in_the_pages_exist(page: Path) -> None:
    """Paths in backticks lead somewhere, from the root or from the page's own folder."""
    paths = re.findall(
        r"`((?:kvmem|cuda_kernels|tests|tools|docs|store|ledger)/[\w./-]+)`", page.read_text()
    )
    missing = [
        p
        for p in paths
        if not any((base / p).exists() for base in (ROOT, ROOT / "kvmem", page.parent))
    ]
    assert not missing, f"{page.name} names missing files: {sorted(set(missing))}"


def run_blocks(page: str, names: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """Run each Python block of a page as a program of its own; return their names."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    programs = [tmp_path / f"block_{i}.py" for i in range(len(blocks))]
    for program, block in zip(programs, blocks, strict=True):
        program.write_text(block)
    return [runpy.run_path(str(program), init_globals=names) for program in programs]


def handles_in(names: dict[str, Any]) -> list[kvmem.Sequence]:
    """Every handle that a program left behind, in a name or in a list."""
    values = [v for value in names.values() for v in (value if type(value) is list else [value])]
    return [value for value in values if isinstance(value, kvmem.Sequence)]


def test_the_snippets_of_the_examples_page_run(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = TinyModel(seed)

    def run_all_rows(model: TinyModel, step: kvmem.Step) -> torch.Tensor:
        hidden = model.embed(step.tokens, step.positions)
        for layer in range(model.num_layers):
            query, key, value = model.project(layer, hidden)
            step.write(layer, key, value)
            mixed = step.attend(layer, query)
            assert isinstance(mixed, torch.Tensor)
            hidden = model.update(layer, hidden, mixed)
        return model.logits(hidden)

    class OneStepEngine:
        busy = True

        def step(self) -> None:
            self.busy = False

    config = kvmem.Config(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=16,
        device_blocks=80,
        host_blocks=40,
        debug=True,
    )
    tokens = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(seed))
    prompt = tokens[:40].tolist()
    with kvmem.Manager(config) as m:
        now, soon = [m.create(prompt)], [m.create(tokens[50:90])]
        with m.step([*now, *soon]) as step:
            run_all_rows(model, step)
        m.append([*now, *soon], [1, 2])
        m.swap_out(soon).wait()
        names = {
            "m": m, "model": model, "prompt": prompt, "now": now, "soon": soon, "seq": now[0],
            "system_prompt": prompt, "tokens": tokens, "digest": bytes(16), "drafts": [3, 4, 5],
            "run": lambda model, step: run_all_rows(model, step)[step.last],
            "run_all_rows": run_all_rows,
            "pick": lambda logits, count: logits[0].topk(count).indices,
            "check": lambda logits, drafts: (2, 7),
            "serve": lambda: None,
            "engine": OneStepEngine(),
        }  # fmt: skip
        # The drafts' block leaves one token pending, as the loop of an engine does.
        results = run_blocks("docs/examples.md", names, tmp_path)
        assert len(results) == 7
        assert now[0].tokens[40:].tolist() == [1, 3, 4, 7]
        assert {seq.state for seq in (*now, *soon)} == {"RESIDENT"}
        assert m.stats().blocks_copied_on_write > 0
        assert (tmp_path / "blocks.html").exists()
        handles = {id(handle): handle for one in results for handle in handles_in(one)}
        m.free(list(handles.values()))
        m.verify()
        assert m.stats().device.used == m.stats().host.used == 0
