"""A tensor pool that cannot corrupt, and knows when to step aside. See docs/pool.md."""

from reference_modules.mixin import set_memory_pool
from reference_modules.pool.errors import PoolError
from reference_modules.pool.global_pool import get_global_memory_pool
from reference_modules.pool.statistics import PoolStats
from reference_modules.pool.tensor_pool import TensorPool

__all__ = ["PoolError", "PoolStats", "TensorPool", "get_global_memory_pool", "set_memory_pool"]
