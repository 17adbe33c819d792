"""The worker: vLLM's own, with a note beside each batch that says which of its rows are prompt tokens.

vLLM runs many requests at once, and a step's batch holds a few tokens of each: one where an answer is being written, a chunk of the
prompt where it is still being read. A token needs every layer if its place in its request is num_prompt_tokens - 1 (the boundary) or
later (decoded); everything before is pruned prefill. Within one request the rows that need every layer are therefore the last ones.

    request     prompt of 6, tokens 2-4     decoding     prompt of 4, tokens 0-3     prompt of 3, 4 decoded, all computed anew
    rows            p p p                      D           p p p D                     p p D D D D D           (p pruned, D every layer)

vLLM's `logits_indices` do not say this: they name the last token of every request, the middle of a prompt included.

Shapes: R requests in the batch, N their rows, F rows that need every layer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.model_loader.utils import _MODEL_ARCH_BY_HASH
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.cpu_worker import CPUWorker

from .switch import Refused

STEP = "minipop"  # the key of the note among the layers' attention metadata


@dataclass
class Step:
    """Where the rows of one batch go."""

    pruned: Tensor  # LongTensor [N - F], rows that leave K/V alone in the skipped layers
    pruned_slots: dict[str, Tensor]  # attention layer -> places of those K/V in the paged cache [N - F]
    full: Tensor  # LongTensor [F], rows that run every layer
    full_slots: dict[str, Tensor]  # attention layer -> places of theirs [F]
    full_metadata: dict  # attention layer -> attention metadata of a batch of these rows alone


class PopWorker(CPUWorker):
    """vLLM's CPU worker with our model class and, for every batch, a `Step`."""

    def load_model(self, **kwargs) -> None:
        from .models import PrunedModel, pruned  # imports much of vLLM

        architecture = self.model_config.architecture
        ModelRegistry.register_model(architecture, pruned(ModelRegistry.models[architecture].load_model_cls()))
        _MODEL_ARCH_BY_HASH.clear()  # a model that takes pictures has been looked up already, for its processor
        super().load_model(**kwargs)
        if not isinstance(self.model_runner.get_model(), PrunedModel):
            raise Refused(f"POP in vLLM cannot be used here: vLLM has built its own {architecture}, not the plugin's")

    def initialize_from_config(self, kv_cache_config) -> None:
        super().initialize_from_config(kv_cache_config)
        if any(group.kernel_block_size is not None for groups in self.model_runner.attn_groups for group in groups):
            raise Refused("POP in vLLM cannot be used with cache blocks that the attention kernel splits: set --block-size to a multiple of 32")

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        build = runner._build_attention_metadata

        def build_with_step(*args, num_reqs: int, slot_mappings=None, **kwargs):
            metadata, draft_metadata = build(*args, num_reqs=num_reqs, slot_mappings=slot_mappings, **kwargs)
            step = make_step(runner, num_reqs, slot_mappings) if isinstance(metadata, dict) else None
            if step is not None:
                metadata[STEP] = step
            return metadata, draft_metadata

        runner._build_attention_metadata = build_with_step


def full_counts(num_computed: np.ndarray, num_scheduled: np.ndarray, num_prompt: np.ndarray) -> np.ndarray:
    """How many of each request's scheduled tokens, the last ones, need every layer. All arrays [R]."""
    first_full = np.maximum(num_prompt - 1 - num_computed, 0)  # counted from the first scheduled token
    return np.maximum(num_scheduled - first_full, 0)


def make_step(runner, num_reqs: int, slot_mappings: dict[int, Tensor]) -> Step | None:
    """The step of the batch that the runner has just prepared; None where every row needs every layer."""
    batch = runner.input_batch
    ends = runner.query_start_loc.np[: num_reqs + 1].astype(np.int64)
    scheduled = np.diff(ends)  # [R]
    full = full_counts(batch.num_computed_tokens_cpu[:num_reqs], scheduled, batch.num_prompt_tokens[:num_reqs])  # [R]
    if (full == scheduled).all():
        return None
    is_full = np.arange(ends[-1]) >= np.repeat(ends[1:] - full, scheduled)  # [N]
    rows, pruned = torch.from_numpy(np.flatnonzero(is_full)), torch.from_numpy(np.flatnonzero(~is_full))
    step = Step(pruned, {}, rows, {}, {})
    requests = torch.from_numpy(np.flatnonzero(full))  # those with rows in the upper layers, [R']
    counts = full[requests.numpy()]
    starts = torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32))  # [R' + 1]
    for group, groups in enumerate(runner.attn_groups):
        slots = slot_mappings[group]
        table = batch.block_table[group].get_device_tensor(num_reqs)
        for attention in groups:
            metadata = None
            if len(requests):
                lengths = runner.seq_lens[requests]  # a request's rows in this batch are its last, so its length stays what it was
                metadata = attention.build_metadata(CommonAttentionMetadata(
                    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
                    num_reqs=len(requests), num_actual_tokens=len(rows), max_query_len=int(counts.max()),
                    max_seq_len=int(lengths.max()), block_table_tensor=table[requests], slot_mapping=slots[rows], causal=True,
                    positions=runner.positions[rows]))
            for name in attention.layer_names:
                step.full_metadata[name] = metadata
                step.full_slots[name] = slots[rows]
                step.pruned_slots[name] = slots[pruned]
    return step
