"""Runs the code under test, in a process of its own: this part imports torch; nothing else here does."""
