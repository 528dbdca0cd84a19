from .decode import DecodeReceiver
from .prefill import PrefillSender
from .regions import PageTable, Region, RegionPool, RegionsExhausted

__all__ = ["DecodeReceiver", "PageTable", "PrefillSender", "Region", "RegionPool", "RegionsExhausted"]
