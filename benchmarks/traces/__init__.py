"""Recorded allocation traces: what a program allocates and frees, step by step, without the program."""
