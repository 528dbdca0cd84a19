"""`poolaudit adopt`: the standard mixin into modules, and their true temporaries into the pool."""
