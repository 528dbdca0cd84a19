from .iobuf import AlignedBuf, AlignedPool
from .tier import NvmeTier

__all__ = ["AlignedBuf", "AlignedPool", "NvmeTier"]
