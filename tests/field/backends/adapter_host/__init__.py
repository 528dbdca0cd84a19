"""Hosts fine-tuned adapters on one base model: banks, requests, router."""
