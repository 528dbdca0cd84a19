"""A small paged-attention server: block table, scheduler, engine."""
