from .buffers import CommBufferPool, scratch
from .layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["CommBufferPool", "ColumnParallelLinear", "RowParallelLinear", "scratch"]
