"""Second tier of the KV cache: host pages, and a spill file behind them."""
from .manager import TierManager
from .pages import HostPages
from .spill import SpillFile

__all__ = ["HostPages", "SpillFile", "TierManager"]
