"""A small transfer engine: regions of memory, send credits, and movers that use both."""
from .credits import CreditLine
from .mover import Mover
from .regions import RegionBook, Span

__all__ = ["CreditLine", "Mover", "RegionBook", "Span"]
