from .block_manager import Block, BlockPool
from .prefix import PrefixTree
from .scheduler import Scheduler
from .sequence import Sequence, SequenceGroup

__all__ = ["Block", "BlockPool", "PrefixTree", "Scheduler", "Sequence", "SequenceGroup"]
