"""Prefill-Only Pruning (arXiv 2602.03295) inside vLLM: a plugin that vLLM loads by itself where minipop is installed.

    python -m vllm.entrypoints.openai.api_server --model CKPT --additional-config '{"minipop": {"ratio": 0.333}}'        # docs/VLLM.md

Without that switch nothing of vLLM changes. With it, `switch.py` checks the configuration when the engine starts and puts three
pieces of ours in place of vLLM's, each through the place vLLM keeps for it:

    worker.py       (worker_cls)       tells the model, step by step, which rows of a batch are prompt tokens and which need every layer
    models.py       (ModelRegistry)    the model classes: all rows through the lower layers, the prompt's K/V, the rest through the upper ones
    scheduler.py    (scheduler_cls)    keeps full-path K/V out of the prefix cache
"""

from functools import wraps


def register() -> None:
    """The entry point (group `vllm.general_plugins`), called in every process of vLLM: have the configuration checked when it is made."""
    try:
        from vllm.config import VllmConfig
    except ImportError:  # a vLLM so different that nothing can be said about it
        return
    if hasattr(VllmConfig.__post_init__, "minipop"):
        return
    make = VllmConfig.__post_init__

    @wraps(make)
    def make_and_check(self):
        extra = getattr(self, "additional_config", None)
        if not isinstance(extra, dict) or extra.get("minipop") is None:
            return make(self)
        from . import switch  # only now: vLLM without POP never sees our modules

        switch.turn_on(self)
        make(self)
        switch.check_made(self)

    make_and_check.minipop = True
    VllmConfig.__post_init__ = make_and_check
