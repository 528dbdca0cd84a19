"""The document encoder: embedding, layers, mean over the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .block_sparse import BlockSparseAttention
from .embedding import DocumentEmbedding
from .multihead import MultiheadLongAttention


@dataclass(frozen=True)
class EncoderConfig:
    vocabulary: int = 1000
    dim: int = 64
    heads: int = 4
    layers: int = 2
    max_length: int = 512
    segment_lengths: tuple[int, ...] = (64, 128)
    dilation_rates: tuple[int, ...] = (1, 2)


class EncoderLayer(nn.Module):
    """Long attention, block-sparse attention and a feed-forward part, each with its residual."""

    def __init__(self, config: EncoderConfig, enable_memory_pool: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.dim) for _ in range(3))
        self.long = MultiheadLongAttention(
            config.dim,
            config.heads,
            config.segment_lengths,
            config.dilation_rates,
            enable_memory_pool=enable_memory_pool,
        )
        self.sparse = BlockSparseAttention()
        self.heads = config.heads
        self.feed_forward = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim), nn.GELU(), nn.Linear(4 * config.dim, config.dim)
        )

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        x = x + self.long(self.norms[0](x), is_causal)
        y = self.norms[1](x).unflatten(-1, (self.heads, -1))
        x = x + self.sparse(y, y, y).flatten(-2)
        return x + self.feed_forward(self.norms[2](x))


class LongDocEncoder(nn.Module):
    """One vector for each document. It is a service's model: no gradients."""

    def __init__(self, config: EncoderConfig, *, enable_memory_pool: bool = False) -> None:
        super().__init__()
        self.embedding = DocumentEmbedding(config.vocabulary, config.dim, config.max_length)
        self.layers = nn.ModuleList(EncoderLayer(config, enable_memory_pool) for _ in range(config.layers))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)
