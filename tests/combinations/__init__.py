"""Every way of keeping a pool combined with every way of using one, each use with a leak and without."""
