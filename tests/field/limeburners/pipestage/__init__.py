"""Pipeline-parallel stage runner with pooled point-to-point buffers."""
