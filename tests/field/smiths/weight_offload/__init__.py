"""Layer-by-layer offload of quantised weights through pinned staging memory."""
