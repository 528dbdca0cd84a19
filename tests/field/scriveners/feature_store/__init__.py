"""Online feature store: shard connections, readers and the request facing service."""
