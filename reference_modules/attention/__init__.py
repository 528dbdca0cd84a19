"""Dilated, ring and block-sparse attention with exact gradients."""

from reference_modules.attention.block_sparse import BlockSparseRingDilatedAttention
from reference_modules.attention.config import LongNetConfig
from reference_modules.attention.dilated import DilatedAttention
from reference_modules.attention.functional import dilated_attention
from reference_modules.attention.key_cache import KeyCache
from reference_modules.attention.long_net import LongNet, create_long_net
from reference_modules.attention.multihead import MultiheadDilatedAttention
from reference_modules.attention.patterns import BlockPattern, CacheStats, PatternCache, shared_pattern_cache
from reference_modules.attention.placement import shard, unshard
from reference_modules.attention.reduction import reduce_gradients
from reference_modules.attention.ring import DistributedDilatedAttention, RingDilatedAttention
from reference_modules.attention.ring_multihead import RingMultiheadDilatedAttention
from reference_modules.attention.transformer import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
)

__all__ = [
    "BlockPattern",
    "BlockSparseRingDilatedAttention",
    "CacheStats",
    "DilatedAttention",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "DistributedDilatedAttention",
    "KeyCache",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "PatternCache",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "create_long_net",
    "dilated_attention",
    "reduce_gradients",
    "shard",
    "shared_pattern_cache",
    "unshard",
]
