"""Frozen towers on every rank: read once, verified, broadcast, and untouched by FSDP."""
