"""Runs generated code against tests, in reusable sandboxes."""
