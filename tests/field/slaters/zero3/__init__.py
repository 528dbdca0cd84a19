"""Stage-3 parameter partitioning."""
