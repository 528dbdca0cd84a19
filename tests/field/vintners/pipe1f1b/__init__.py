"""Pipeline parallel runtime: buffers, one stage, and the 1F1B schedule."""
