"""Small key/value serving engine."""
