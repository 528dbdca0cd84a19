from .ring import Ring
from .reader import Reader
from .writer import Writer

__all__ = ["Ring", "Reader", "Writer"]
