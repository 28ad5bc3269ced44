"""Text on both sides of the engine: tokenizer, chat template, detokenizing, stop strings.

Knows nothing of engines, kernels, HTTP or processes; the engine in turn sees token ids only.
"""

from runtime.text.processor import ChatTemplateError, TextError, TextProcessor
from runtime.text.stream import TextStream

__all__ = ["ChatTemplateError", "TextError", "TextProcessor", "TextStream"]
