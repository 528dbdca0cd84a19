"""Streaming speech recognition: decoder contexts and the recogniser."""
