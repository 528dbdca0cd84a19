"""An embedding service: requests are batched, batches write into slabs, answers are views of slabs."""
