"""A small engine: pool, scheduler and runner."""
