"""Pipeline parallel execution of micro batches."""
