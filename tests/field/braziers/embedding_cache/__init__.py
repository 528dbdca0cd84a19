"""Device cache for large embedding tables: pinned rows, bag lookups, look-ahead."""
