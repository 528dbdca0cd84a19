"""The methods by which a `with` begins and ends."""

ENTERS = frozenset({"__enter__", "__aenter__"})
EXITS = frozenset({"__exit__", "__aexit__"})
