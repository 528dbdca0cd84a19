"""A small engine: block manager, request state, worker-side staging, driver."""
