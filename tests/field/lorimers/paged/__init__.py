"""Paged KV cache: block allocator, per-request tables, scheduler, step worker."""
from .allocator import BlockAllocator, KVBlock
from .scheduler import Request, Scheduler
from .worker import StepWorker

__all__ = ["BlockAllocator", "KVBlock", "Request", "Scheduler", "StepWorker"]
