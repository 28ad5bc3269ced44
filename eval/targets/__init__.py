"""Targets: models that can be asked. A reference gives distributions, a candidate is held to them."""
