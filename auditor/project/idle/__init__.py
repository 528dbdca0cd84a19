"""A pool's own stock that its own methods take out and pass over."""
