from .decode import DecodeReceiver
from .prefill import PrefillSender
from .transfer import TransferEngine

__all__ = ["DecodeReceiver", "PrefillSender", "TransferEngine"]
