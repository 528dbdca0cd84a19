"""The editor server: audits as one types, in a process of its own; speaks the language server protocol."""
