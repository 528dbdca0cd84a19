"""Tensor-parallel collectives with symmetric buffers."""
