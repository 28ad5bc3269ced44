"""The model package's exception tree.

ModelError                  this config.json cannot become a decoder
|- UnsupportedModelError    a family, rope kind or feature the decoder does not compute
`- ModelConfigError         a field is missing, of the wrong type or at odds with another

Both mean "refused before anything is loaded". Wrong or missing tensors are the artifact's
`IntegrityError`.
"""


class ModelError(ValueError):
    """This config.json cannot become a decoder."""


class UnsupportedModelError(ModelError):
    """The decoder does not compute this; the message names what it does."""


class ModelConfigError(ModelError):
    """config.json lacks a field or contradicts itself."""
