from .memory import Region, RegionTable
from .receiver import DecodeReceiver
from .sender import PrefillSender
from .transport import Transport

__all__ = ["Region", "RegionTable", "Transport", "PrefillSender", "DecodeReceiver"]
