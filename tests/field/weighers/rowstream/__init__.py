from .buffers import RowBuffers
from .reader import iter_columns, iter_rows
from .mixer import Mixer

__all__ = ["RowBuffers", "iter_columns", "iter_rows", "Mixer"]
