"""The on-disk format: what an artifact is and what its bits mean. Imports nothing else of ours."""
