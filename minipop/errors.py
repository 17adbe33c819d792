"""Every error minipop raises for a user's mistake. The message says what was wrong, where, and what to do about it."""


class MinipopError(ValueError):
    """Base class: catch this to catch every mistake minipop can name."""


class ConfigError(MinipopError):
    """A config.json that cannot be read or names something minipop does not support."""


class CheckpointError(MinipopError):
    """Weights that are missing, damaged, or do not fit the model."""


class TokenizerError(MinipopError):
    """A tokenizer or chat template that cannot be read or used."""


class ImageError(MinipopError):
    """A picture that cannot be decoded or has no usable size."""


class PromptError(MinipopError):
    """A prompt the model cannot take: empty, too long, ids out of range, images that do not match their placeholders."""


class PlanError(MinipopError):
    """A prefill plan that does not fit the model."""
