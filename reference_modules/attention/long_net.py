"""`LongNet`: token embeddings, layers of dilated attention, a head, and generation."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from reference_modules.attention.config import LongNetConfig
from reference_modules.attention.transformer import DilatedTransformerEncoderLayer


class LongNet(nn.Module):
    """A language model over sequences of any length; build it from a config or from the config's fields."""

    def __init__(self, config: LongNetConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is not None and fields:
            raise ValueError(f"both a config and {', '.join(fields)} were given; use dataclasses.replace")
        self.config = config = LongNetConfig(**fields) if config is None else config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        nn.init.normal_(self.embedding.weight, std=config.embed_dim**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DilatedTransformerEncoderLayer(
                config.embed_dim,
                config.num_heads,
                config.segment_lengths,
                config.dilation_rates,
                num_kv_heads=config.num_kv_heads,
                dim_feedforward=config.feedforward_dim,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                offset_rule=config.offset_rule,
                checkpoint_activations=config.checkpoint_activations,
                enable_memory_pool=config.enable_memory_pool,
                memory_pool_threshold_mb=config.memory_pool_threshold_mb,
            )
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.embed_dim)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BN: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits (b, n, vocabulary); `key_padding_mask` is (b, n), True = ignore."""
        if tokens_BN.dim() != 2 or tokens_BN.is_floating_point():
            raise ValueError(
                f"tokens have shape {tuple(tokens_BN.shape)} and type {tokens_BN.dtype}; "
                "they must be integers (batch, tokens): use tokens.unsqueeze(0) where there is no batch"
            )
        x_BNE = self.embedding(tokens_BN) * math.sqrt(self.config.embed_dim)
        x_BNE = self.dropout(x_BNE + positions(tokens_BN.shape[1], self.config.embed_dim, x_BNE))
        for layer in self.layers:
            x_BNE = layer(x_BNE, self.config.is_causal, key_padding_mask)
        return cast(Tensor, self.head(self.norm(x_BNE)))

    @torch.no_grad()
    def generate(
        self,
        tokens_BN: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        end_token: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The tokens with up to `max_new_tokens` more; temperature 0 takes the likeliest.

        Every step runs the whole sequence, at the cost of a forward of that length.  Rows that have
        produced `end_token` repeat it; generation stops when all have.
        """
        self._check_generation(tokens_BN, max_new_tokens, temperature, top_k)
        was_training = self.training
        self.eval()
        try:
            ended_B = torch.zeros(tokens_BN.shape[0], dtype=torch.bool, device=tokens_BN.device)
            for _ in range(max_new_tokens):
                next_B = _choose(self(tokens_BN)[:, -1], temperature, top_k, generator)
                if end_token is not None:
                    next_B = next_B.masked_fill(ended_B, end_token)
                    ended_B |= next_B == end_token
                tokens_BN = torch.cat([tokens_BN, next_B.unsqueeze(1).to(tokens_BN.dtype)], dim=1)
                if end_token is not None and bool(ended_B.all()):
                    break
        finally:
            self.train(was_training)
        return tokens_BN

    def _check_generation(
        self, tokens_BN: Tensor, max_new_tokens: int, temperature: float, top_k: int | None
    ) -> None:
        if not self.config.is_causal:
            raise ValueError("is_causal=False: this model sees what follows; generate needs is_causal=True")
        if tokens_BN.shape[-1] < 1 or max_new_tokens < 0 or temperature < 0:
            raise ValueError(
                f"{tokens_BN.shape[-1]} tokens, max_new_tokens {max_new_tokens}, temperature {temperature}: "
                "there must be at least one token to start from, and neither number may be negative"
            )
        if top_k is not None and not 1 <= top_k <= self.config.vocab_size:
            raise ValueError(f"top_k is {top_k}; it must be within 1 and vocab_size {self.config.vocab_size}")


def create_long_net(vocab_size: int, **fields: Any) -> LongNet:
    """A LongNet from the fields of LongNetConfig."""
    return LongNet(LongNetConfig(vocab_size=vocab_size, **fields))


def positions(tokens: int, embed_dim: int, like: Tensor) -> Tensor:
    """(tokens, embed_dim): sines and cosines, so that no length is too long; in float64 before rounding."""
    position_N1 = torch.arange(tokens, device=like.device, dtype=torch.float64).unsqueeze(1)
    exponent_F = torch.arange(0, embed_dim, 2, device=like.device, dtype=torch.float64) / embed_dim
    angle_NF = position_N1 / 10000.0**exponent_F
    return torch.stack([angle_NF.sin(), angle_NF.cos()], dim=-1).flatten(1).to(like.dtype)


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    if top_k is not None:
        kth_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator).squeeze(1)
