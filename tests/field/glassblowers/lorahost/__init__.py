"""Paged LoRA weights: pages in device memory, loaded through pinned staging tensors."""
from .loader import Loader
from .pages import PageBank
from .registry import Registry
from .runtime import Runtime

__all__ = ["Loader", "PageBank", "Registry", "Runtime"]
