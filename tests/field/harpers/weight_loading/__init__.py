"""Loading of sharded weights through shared shard handles and staging slots."""
from .loader import DeltaLoader, ShardedLoader, load_bias_vectors
from .shards import ShardCache, read_index
from .staging import StagingSlots

__all__ = ["DeltaLoader", "ShardCache", "ShardedLoader", "StagingSlots", "load_bias_vectors", "read_index"]
