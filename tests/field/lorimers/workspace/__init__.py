"""Workspace tensors for attention kernels: arena, typed views, per-kernel context."""
from .arena import Arena
from .context import KernelContext
from .ops import alibi_scores, backward_dq, forward_chunked, forward_dense, varlen_forward

__all__ = ["Arena", "KernelContext", "alibi_scores", "backward_dq", "forward_chunked", "forward_dense", "varlen_forward"]
