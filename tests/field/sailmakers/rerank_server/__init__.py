from .pool import PaddedPool, RowLease
from .batcher import MicroBatcher, Job
from .runner import RerankRunner
from . import postproc

__all__ = ["PaddedPool", "RowLease", "MicroBatcher", "Job", "RerankRunner", "postproc"]
