"""`LongNet`: token embeddings, layers of dilated attention, a head, and generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from reference_modules.attention import checks
from reference_modules.attention.config import LongNetConfig
from reference_modules.attention.key_cache import KeyCache
from reference_modules.attention.multihead import MultiheadDilatedAttention
from reference_modules.attention.transformer import DilatedTransformerEncoderLayer
from reference_modules.attention.workspace import pool_of


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
        _check_tokens(tokens_BN, self.config.vocab_size)
        return cast(Tensor, self.head(self._body(tokens_BN, key_padding_mask, [None] * len(self.layers))))

    def _body(
        self, tokens_BN: Tensor, key_padding_mask: Tensor | None, caches: Sequence[KeyCache | None]
    ) -> Tensor:
        """All but the head; tokens follow those in the caches."""
        embed_dim, first = self.config.embed_dim, caches[0].tokens if caches[0] is not None else 0
        x_BNE = self.embedding(tokens_BN) * math.sqrt(embed_dim)
        x_BNE = self.dropout(x_BNE + positions(tokens_BN.shape[1], embed_dim, x_BNE, first))
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BNE = layer(x_BNE, self.config.is_causal, key_padding_mask, cache)
        return cast(Tensor, self.norm(x_BNE))

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
        use_cache: bool = True,
    ) -> Tensor:
        """The tokens with up to `max_new_tokens` more; temperature 0 takes the likeliest.

        Keys and values are kept for the length of the call, so that a token costs what its segments hold;
        use_cache=False runs the whole sequence for every token.  Rows that have produced `end_token` repeat
        it; generation stops when all have.
        """
        self._check_generation(tokens_BN, max_new_tokens, temperature, top_k, end_token)
        was_training = self.training
        self.eval()
        try:
            with self._caches(tokens_BN, max_new_tokens if use_cache else None) as caches:
                return self._continue(
                    tokens_BN,
                    max_new_tokens,
                    caches,
                    end_token,
                    lambda x: _choose(x, temperature, top_k, generator),
                )
        finally:
            self.train(was_training)

    def _continue(
        self,
        tokens_BN: Tensor,
        max_new_tokens: int,
        caches: Sequence[KeyCache | None],
        end_token: int | None,
        choose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ended_B = torch.zeros(tokens_BN.shape[0], dtype=torch.bool, device=tokens_BN.device)
        for _ in range(max_new_tokens):
            seen = 0 if caches[0] is None else caches[0].tokens
            next_B = choose(self.head(self._body(tokens_BN[:, seen:], None, caches)[:, -1]))
            if end_token is not None:
                next_B = next_B.masked_fill(ended_B, end_token)
                ended_B |= next_B == end_token
            tokens_BN = torch.cat([tokens_BN, next_B.unsqueeze(1).to(tokens_BN.dtype)], dim=1)
            if end_token is not None and bool(ended_B.all()):
                break
        return tokens_BN

    @contextmanager
    def _caches(self, tokens_BN: Tensor, more: int | None) -> Iterator[Sequence[KeyCache | None]]:
        """One a layer, from the layers' pools, with room for so many more tokens; None for none."""
        if more is None:
            yield [None] * len(self.layers)
            return
        with ExitStack() as held:
            found = []
            for layer in self.layers:
                attention = cast(MultiheadDilatedAttention, layer.self_attn)
                like, pool = attention.in_proj_weight, pool_of(attention.attention)
                b, n = tokens_BN.shape
                shape = (b, n + more, attention.num_heads, attention.head_dim)
                found.append(held.enter_context(KeyCache.lease(shape, like.dtype, like.device, pool)))
            yield found

    def _check_generation(
        self,
        tokens_BN: Tensor,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        end_token: int | None,
    ) -> None:
        _check_tokens(tokens_BN, self.config.vocab_size)
        if not self.config.is_causal:
            raise ValueError("is_causal=False: this model sees what follows; generate needs is_causal=True")
        checks.check_whole("max_new_tokens", max_new_tokens, 0)
        if tokens_BN.shape[-1] < 1 or not 0.0 <= temperature < math.inf:
            raise ValueError(
                f"{tokens_BN.shape[-1]} tokens, temperature {temperature}: there must be at least one token "
                "to start from, and a finite temperature of 0 (the likeliest token) or more"
            )
        vocab_size = self.config.vocab_size
        if top_k is not None and not 1 <= top_k <= vocab_size:
            raise ValueError(f"top_k is {top_k}; it must be within 1 and vocab_size {vocab_size}")
        if end_token is not None and not 0 <= end_token < vocab_size:
            raise ValueError(
                f"end_token is {end_token}; it must be within 0 and {vocab_size - 1}, or None for no end"
            )


def _check_tokens(tokens_BN: Tensor, vocab_size: int) -> None:
    """On CPU their values too; on a GPU looking at them would make it wait."""
    checks.check_tensor("tokens", tokens_BN)
    if tokens_BN.dim() != 2 or tokens_BN.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tokens have shape {tuple(tokens_BN.shape)} and type {tokens_BN.dtype}; "
            "they must be int64 or int32 (batch, tokens): use tokens.unsqueeze(0) where there is no batch"
        )
    if tokens_BN.device.type == "cpu" and tokens_BN.numel() and not torch.compiler.is_compiling():
        least, most = int(tokens_BN.min()), int(tokens_BN.max())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"tokens lie between {least} and {most}; they must lie between 0 and {vocab_size - 1}: "
                "use a vocab_size that covers the tokenizer's"
            )


def create_long_net(vocab_size: int, **fields: Any) -> LongNet:
    """A LongNet from the fields of LongNetConfig."""
    return LongNet(LongNetConfig(vocab_size=vocab_size, **fields))


def positions(tokens: int, embed_dim: int, like: Tensor, first: int = 0) -> Tensor:
    """(tokens, embed_dim): sines and cosines, so that no length is too long; in float64 before rounding."""
    position_N1 = torch.arange(first, first + tokens, device=like.device, dtype=torch.float64).unsqueeze(1)
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
