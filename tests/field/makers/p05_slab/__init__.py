"""Slab-backed device memory for small activations."""
from .cache import ActivationCache
from .layers import FusedMLP, FusedNormLinear
from .slab import Slab, SlabAllocator, SlabHandle

__all__ = ["ActivationCache", "FusedMLP", "FusedNormLinear", "Slab", "SlabAllocator", "SlabHandle"]
