from .bank import ReaderCache, TensorBank
from .convert import convert, merge_experts

__all__ = ["ReaderCache", "TensorBank", "convert", "merge_experts"]
