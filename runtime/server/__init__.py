"""The OpenAI-compatible face of the engine: HTTP, text and metrics in the parent process."""
