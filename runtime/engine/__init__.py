"""The engine: schedule, execute, collect. Knows no text and no HTTP."""
