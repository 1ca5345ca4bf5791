"""Adapters for training frameworks. Each imports its framework, so that nothing else of safeload has to."""
