"""Runs the layers of a transformers Llama on kvmem's paged memory.

The modules (projections, norms, MLP) are the model's own. Its attention is replaced by two calls:
`step.write` stores the new keys and values in their blocks, `step.attend` reads the blocks in
place. No contiguous cache exists anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvmem


class PagedLlama:
    """Calls `model` (a LlamaForCausalLM) on the batch of one kvmem step."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def config(self, **sizes: Any) -> kvmem.Config:
        """Return the kvmem.Config of this model; `sizes` are Config's tier sizes and switches."""
        config = self.model.config
        return kvmem.Config(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            **sizes,
        )

    @torch.inference_mode()
    def __call__(self, step: kvmem.Step) -> torch.Tensor:
        """Return the logits `[len(step.ready), vocab_size]` that follow each ready sequence."""
        body = self.model.model
        hidden = body.embed_tokens(step.tokens)
        cos, sin = (part[0] for part in body.rotary_emb(hidden, step.positions[None].long()))
        for index, layer in enumerate(body.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            heads = (len(normed), -1, attention.head_dim)
            query = attention.q_proj(normed).view(heads)
            key = attention.k_proj(normed).view(heads)
            value = attention.v_proj(normed).view(heads)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            step.write(index, key, value)
            mixed = step.attend(index, query, scale=attention.scaling)
            hidden = hidden + attention.o_proj(mixed.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(body.norm(hidden[step.last]))
