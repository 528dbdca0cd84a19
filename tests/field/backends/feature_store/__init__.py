"""A small online feature store: connections, cursors, cached rows."""
