"""The scheduler: vLLM's own, with full-path K/V kept out of the prefix cache.

A block of the paged cache that holds boundary or decoded tokens has K/V there that no prefill would make: another request with the same
text in its prompt must not take it. So of every request only the blocks before its boundary token enter the prefix cache; each holds
pruned prompt K/V alone, and a prompt's K/V are the same whether they were found or computed. The other way round, a request that was
preempted while it answered looks for nothing beyond its boundary token either: what it finds there would be pruned.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class PopScheduler(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        limit_prefix_cache(self.kv_cache_manager)


def pruned_tokens(request) -> int:
    """Tokens of the request that are pruned prefill: all of its first prompt but the last."""
    if not hasattr(request, "minipop_pruned_tokens"):  # the prompt of a session grows by its answers; the first one is kept
        request.minipop_pruned_tokens = request.num_prompt_tokens - 1
    return request.minipop_pruned_tokens


def limit_prefix_cache(manager) -> None:
    """Make a KVCacheManager store and find no K/V of a request beyond its pruned tokens."""
    coordinator = manager.coordinator
    store, find, look_up = coordinator.cache_blocks, coordinator.find_longest_cache_hit, manager.get_computed_blocks

    limit = 0  # of the look-up that is going on

    def cache_blocks(request, num_computed_tokens):
        store(request, min(num_computed_tokens, pruned_tokens(request)))

    def get_computed_blocks(request):
        nonlocal limit
        limit = pruned_tokens(request)
        return look_up(request)

    def find_longest_cache_hit(block_hashes, max_length):
        return find(block_hashes, min(max_length, limit))

    coordinator.cache_blocks, coordinator.find_longest_cache_hit = cache_blocks, find_longest_cache_hit
    manager.get_computed_blocks = get_computed_blocks
