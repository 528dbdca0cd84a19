"""Which calls acquire and which release: data files, settings, and pairs discovered in classes."""
