"""The generic decoder and how an artifact becomes one. Knows no requests, no text."""
