"""Measurements over targets; each module turns model outputs into paired per-item numbers."""
