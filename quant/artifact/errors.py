"""The artifact's exception tree.

ArtifactError            anything wrong with an artifact or a checkpoint on disk
|- SchemeError           a scheme, layout or quantization_config that makes no sense or is not known
|- FormatVersionError    written by a newer (or never released) format version
|- ManifestError         artifact.json missing, garbled or at odds with what lies beside it
|- IntegrityError        bytes missing, truncated, altered; a tensor absent or of the wrong shape
|- StorageError          the disk refused (full, not ours, in use); nothing half-written is left
`- UnsafeCheckpointError pickle weights or remote code: refused, never executed

Each message says what was found, what was expected and what to do. Command lines turn these into
one line on stderr and exit code 2.
"""


class ArtifactError(Exception):
    """Anything wrong with an artifact or a checkpoint on disk."""


class SchemeError(ArtifactError, ValueError):
    """A scheme or quantization_config that is invalid or not supported."""


class FormatVersionError(ArtifactError):
    """The artifact's format version is not one this build can read."""


class ManifestError(ArtifactError):
    """artifact.json is missing, unreadable or disagrees with the files beside it."""


class IntegrityError(ArtifactError):
    """Files or tensors are missing, truncated or altered."""


class StorageError(ArtifactError):
    """Reading or writing was refused; whatever was there before is untouched."""


class UnsafeCheckpointError(ArtifactError):
    """Loading this checkpoint would execute code from it."""
