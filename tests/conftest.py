"""Shared fixtures: tiny random models, the real small model, and where the outside data lies."""
