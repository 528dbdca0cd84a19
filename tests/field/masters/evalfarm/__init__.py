"""Runs benchmark samples against a model API and executes the answers in sandboxes."""
