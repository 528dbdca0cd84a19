from .decode import DecodeWorker
from .prefill import PrefillWorker

__all__ = ["DecodeWorker", "PrefillWorker"]
