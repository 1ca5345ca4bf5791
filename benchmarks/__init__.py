"""Benchmarks: each answers one question, prints a table, and JSON as its last line."""
