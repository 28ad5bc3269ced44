"""Targets: models that can be asked. A reference says what is right, a candidate is held to it."""
