"""Sharded training: staging tensors, low-precision codecs, gather and optimiser steps."""
from .staging import STAGE, StageCache
from .trainer import ShardTrainer

__all__ = ["STAGE", "StageCache", "ShardTrainer"]
