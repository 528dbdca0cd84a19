"""Leases that lie in fields, tables and lists: who ends them, who loses them."""
