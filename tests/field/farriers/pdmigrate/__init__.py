from .blocks import BlockLease, BlockPool
from .decode import DecodeNode
from .link import TransferLink
from .prefill import PrefillNode

__all__ = ["BlockLease", "BlockPool", "DecodeNode", "PrefillNode", "TransferLink"]
