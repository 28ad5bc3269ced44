"""The exception tree of `quant` (the artifact has its own, in `quant.artifact.errors`).

QuantError                anything the user can mend before or during `quantize`
|- RecipeError            the recipe: unknown key, wrong value, contradiction (file, line, key)
|- PlanError              the recipe does not fit this model (modules named)
|- CalibrationError       the calibration rows (file, line, what was found)
|- SourceError            the model to quantize: missing, incomplete, unreadable
|  |- UnsupportedModelError   an architecture, or a part of one, that is not supported
|  |- AlreadyQuantizedError   a checkpoint that holds codes instead of weights
|  `- NonFiniteError          NaN or Inf in weights or activations (tensor named)
`- PipelineError          the run itself: not enough memory or disk, a job that cannot resume
   `- NotAcceptedError       the gate accepted none of the plans (exit code 1)

Each message says what was found, what was expected and what to do. The command line prints it as
one line `error: ...` on stderr and exits with 2.
"""


def first_line(error: BaseException) -> str:
    """What a library's error says, shortened to fit into a message of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{' '.join(lines[:2]):.200}"


class QuantError(Exception):
    """Anything wrong that the user of `quantize` can mend."""


class RecipeError(QuantError, ValueError):
    """The recipe file or a command line override of it is wrong."""


class PlanError(QuantError, ValueError):
    """The recipe cannot be carried out on this model."""


class CalibrationError(QuantError, ValueError):
    """The calibration rows cannot be used."""


class SourceError(QuantError):
    """The model to quantize cannot be read."""


class UnsupportedModelError(SourceError):
    """The model's architecture, or a part of it, is not supported."""


class AlreadyQuantizedError(SourceError):
    """The model holds quantized weights; quantizing codes again would be wrong."""


class NonFiniteError(SourceError):
    """A weight or an activation is NaN or infinite."""


class PipelineError(QuantError):
    """The run could not go on; what was finished is kept."""


class NotAcceptedError(PipelineError):
    """The gate accepted none of the plans that were built."""
