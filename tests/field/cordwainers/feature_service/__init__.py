"""Feature lookups over a pooled database, with request slots and an audit journal."""
