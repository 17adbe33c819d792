"""What a single request may not ask for under POP, said when it arrives (HTTP 400 from the server)."""

from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor


class CheckRequest(LogitsProcessor):
    """vLLM lets logits processors check requests as they arrive. This one does only that."""

    @classmethod
    def validate_params(cls, sampling_params) -> None:
        if sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError("prompt_logprobs cannot be given under POP (minipop in --additional-config): prompt tokens do not "
                                      "run the upper layers, so they have no logits", parameter="prompt_logprobs")

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def apply(self, logits):
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update) -> None:
        pass
