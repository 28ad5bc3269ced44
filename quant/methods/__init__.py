"""Quantization methods as pure functions: (weight, statistics, scheme) -> QuantizedWeight."""
