"""Optimizer state on NVMe."""
from .buffers import SwapBuffers
from .files import FileTable
from .optimizer import SwappedAdam
from .swapper import Swapper

__all__ = ["SwapBuffers", "FileTable", "Swapper", "SwappedAdam"]
