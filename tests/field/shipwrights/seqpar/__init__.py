"""Ulysses style sequence parallelism with a shared workspace."""
from .attention import UlyssesAttention
from .trainer import SeqParTrainer
from .workspace import ScopedWorkspace, ShapeWorkspace

__all__ = ["UlyssesAttention", "SeqParTrainer", "ScopedWorkspace", "ShapeWorkspace"]
