"""Swapping of KV blocks between the device and two tiers of host memory."""
from .blocks import BlockPool, HostBlock, TieredHostPool
from .copies import CopyEngine, TicketPool
from .scheduler import SwapScheduler
from .seqs import Sequence, State

__all__ = ["BlockPool", "CopyEngine", "HostBlock", "Sequence", "State", "SwapScheduler", "TicketPool", "TieredHostPool"]
