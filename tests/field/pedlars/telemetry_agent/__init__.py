"""Telemetry agent: ring of event slots, batches built from them, and exporters."""
