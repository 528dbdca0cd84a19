"""Encoder cache for images and audio of multi-modal requests."""
