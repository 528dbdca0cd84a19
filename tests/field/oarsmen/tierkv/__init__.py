"""KV cache over three tiers: GPU blocks, host slots, files."""
from .engine import Engine
from .tiers import DiskTier, GpuTier, HostTier

__all__ = ["DiskTier", "Engine", "GpuTier", "HostTier"]
