"""minipop: a minimal inference engine that runs Prefill-Only Pruning (arXiv 2602.03295) on Hugging Face checkpoints."""

from . import startup as _startup  # noqa: F401  first: it answers Ctrl-C while PyTorch is imported
from .cache import KVCache
from .errors import (CheckpointError, ConfigError, ImageError, MinipopError, PlanError, PromptError, TokenizerError)
from .inputs import ModelInputs
from .models import load_model
from .plan import PrefillPlan
from .processing import load_processor
from .runner import Runner
from .sampling import SamplingParams
from .tokenizer import load_tokenizer

__all__ = ["CheckpointError", "ConfigError", "ImageError", "KVCache", "MinipopError", "ModelInputs", "PlanError", "PrefillPlan",
           "PromptError", "Runner", "SamplingParams", "TokenizerError", "load_model", "load_processor", "load_tokenizer"]
