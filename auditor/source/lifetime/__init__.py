"""Where a tensor, a graph or a module is kept longer than it is used: what one file alone shows of it."""
