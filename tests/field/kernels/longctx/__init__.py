"""Long-context training helpers: host offload and window scheduling."""
