"""The editor server, spoken to over its standard streams."""
