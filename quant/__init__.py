"""Prepare models: recipe -> plan -> pipeline -> artifact. Start reading at `quant.pipeline`."""
