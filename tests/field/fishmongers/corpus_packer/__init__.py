"""Packs tokenized documents into rows of a fixed length."""
from .buffers import BufferPool, PoolDry
from .leases import LeaseBoard, LeaseLost, ShardLease
from .packer import Packer
from .pipeline import Pipeline

__all__ = ["BufferPool", "LeaseBoard", "LeaseLost", "Packer", "Pipeline", "PoolDry", "ShardLease"]
