"""Data loader whose workers hand batches over in shared memory slots."""
