"""Who uses a pool, how completely, and who ought to: the figures and the table of classes."""
