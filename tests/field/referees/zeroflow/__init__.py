"""Parameter and optimizer state swapping to NVMe for sharded training."""
