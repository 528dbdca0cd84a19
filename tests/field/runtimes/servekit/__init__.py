"""A small serving loop: request table, page pool, scheduler."""
