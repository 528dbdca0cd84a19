"""The sizes and switches of a LongNet, checked against one another once, and the factory that builds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from reference_modules.attention import checks
from reference_modules.attention.geometry import OffsetRule


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """Defaults make a small decoder-only language model."""

    vocab_size: int
    embed_dim: int = 256
    num_heads: int = 8
    num_kv_heads: int | None = None
    """Fewer key heads than query heads; None is equally many."""
    depth: int = 4
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192)
    dilation_rates: tuple[int, ...] = (1, 2, 4)
    feedforward_dim: int | None = None
    """None is four times embed_dim."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    is_causal: bool = True
    tie_weights: bool = True
    """Use the embedding as the output head."""
    offset_rule: OffsetRule = "paper"
    checkpoint_activations: bool = False
    enable_memory_pool: bool = False
    memory_pool_threshold_mb: float | None = None

    def __post_init__(self) -> None:
        checks.check_branches(self.segment_lengths, self.dilation_rates)
        for name in ("segment_lengths", "dilation_rates"):  # lists come from files
            object.__setattr__(self, name, tuple(getattr(self, name)))
        checks.check_options(None, self.offset_rule, 0.0, "auto")
        for name in ("dropout", "attention_dropout"):
            checks.check_probability(name, getattr(self, name))
        for name in ("vocab_size", "embed_dim", "depth"):
            checks.check_whole(name, getattr(self, name), 1)
        if self.feedforward_dim is not None:
            checks.check_whole("feedforward_dim", self.feedforward_dim, 1, ", or None for 4 · embed_dim")
        if self.embed_dim % 2:
            raise ValueError(
                f"embed_dim is {self.embed_dim}; it must be even (sines and cosines of positions)"
            )
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        checks.check_heads(self.embed_dim, self.num_heads, kv_heads)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; LongNetConfig(**data) is this again."""
        return asdict(self)
