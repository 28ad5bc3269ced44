"""The evaluation's exception tree; each class knows the exit code its kind of failure has.

EvaluationError          the candidate could not be judged (exit code 4)
|- TargetError           a model that cannot be loaded or does not fit the other one
`- UsageError            a flag, path or file the user can correct (exit code 2)
   |- GateSpecError      the gates file: line, what was found, what was expected
   `- SuiteError         the suite's JSONL files: file, line, what was expected

A failure here never leaves a stamp or a half-written report.
"""


class EvaluationError(Exception):
    """The candidate could not be judged."""

    exit_code = 4


class TargetError(EvaluationError):
    """A model that cannot be loaded, or a base and an artifact that do not belong together."""


class UsageError(EvaluationError):
    """Something the user can correct on the command line or in a file."""

    exit_code = 2


class GateSpecError(UsageError):
    """The gates file is not valid."""


class SuiteError(UsageError):
    """The suite's files are missing or not valid."""
