"""Multipart uploads to an object store: byte credit, chunk buffers and the upload state machine."""
