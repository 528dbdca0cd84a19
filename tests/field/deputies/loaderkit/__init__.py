from .collate import Collator
from .iterator import PrefetchIterator
from .slots import SharedSlots

__all__ = ["Collator", "PrefetchIterator", "SharedSlots"]
