"""Sandboxed runners: ports, workspaces and worker leases for user code."""
