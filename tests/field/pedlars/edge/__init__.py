"""Edge node: cached objects with pins, an upload spool and the front handlers."""
