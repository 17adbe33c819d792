"""Targets that are calls: the cache against a dictionary, the runner against the obvious arithmetic, sampling, and odd arguments."""

import functools
import math

import torch
from hypothesis import strategies as st

from minipop import KVCache, ModelInputs, PrefillPlan, Runner, SamplingParams
from minipop.attention import attend
from minipop.cache import Span
from minipop.sampling import Sampler
from tests.tiny import tiny_model

from .core import Target, attempt
from .files import SCALARS, VALUES
from .oracle import WatchedRunner, compare

# --- the cache ----------------------------------------------------------------------------------------------------------------------

CACHE_LAYERS, ROWS, COLUMNS = 2, 3, 10


class DictCache:
    """What KVCache must do, with one dictionary: (layer, row, column) -> (key, value, hidden)."""

    def __init__(self):
        self.cells, self.lengths, self.active = {}, [0] * ROWS, ROWS

    def visible(self, layer: int, row: int, query: int, key: int, window: int | None, blocks: dict) -> bool:
        same_block = blocks.get(query, -1) >= 0 and blocks.get(query) == blocks.get(key)
        near = window is None or query - key < window
        return (key <= query or same_block) and near and not self.cells.get((layer, row, key), (0, 0, False))[2]


def check_cache(case) -> str:
    """A sequence of passes, commits, rewinds and moves: after each, the cache holds what the dictionary holds."""
    cache, model = KVCache(CACHE_LAYERS, ROWS, 1, COLUMNS, 1), DictCache()
    pending, number, outcome = [0] * ROWS, 0, "nothing to do"
    for name, *arguments in case:
        active = model.active
        if name == "pass":
            counts, hides, window, runs, image = arguments
            counts = counts[:active]
            starts = [model.lengths[b] + pending[b] for b in range(active)]
            if not max(counts) or any(start + count > COLUMNS for start, count in zip(starts, counts)):
                continue
            width = max(counts)
            blocks = None
            if image and max(starts) == min(starts):  # the first tokens of each row are an image
                blocks = torch.tensor([[0 if t < min(image, counts[b]) else -1 for t in range(width)] for b in range(active)])
            span = Span(torch.tensor(starts), torch.tensor(counts), width, blocks)
            one_pass = cache.begin(span)
            for layer in range(CACHE_LAYERS):
                if layer in hides:
                    one_pass.hide(layer)
                    for b in range(active):
                        for t in range(counts[b]):
                            old = model.cells.get((layer, b, starts[b] + t), (0.0, 0.0, False))
                            model.cells[layer, b, starts[b] + t] = (*old[:2], True)
                    continue
                new = torch.arange(number, number + active * width).float().view(active, 1, width, 1) + 1  # [B, K, N, E]
                number += active * width
                keys, values = one_pass.write(layer, new, -new)
                for b in range(active):
                    for t in range(counts[b]):
                        model.cells[layer, b, starts[b] + t] = (float(new[b, 0, t]), -float(new[b, 0, t]), False)
                _check_view(model, layer, keys, values, starts, counts)
                _check_visible(model, layer, one_pass.visible(layer, window), span, window, starts, counts, blocks)
            for b in range(active):
                pending[b] += counts[b]
            outcome = "fine"
            if not runs:
                continue  # the next pass comes first
            if runs == "commit":
                cache.commit(torch.tensor(pending[:active]))
                model.lengths = [n + more for n, more in zip(model.lengths, pending)]
            pending = [0] * ROWS  # or the pass was interrupted
        elif name == "rewind":
            n = min(arguments[0], max(model.lengths))
            cache.rewind(n)
            model.lengths, pending = [min(n, length) for length in model.lengths], [0] * ROWS
        elif name == "move" and max(arguments) < active:
            source, target = arguments
            cache.move_row(source, target)
            for layer in range(CACHE_LAYERS):
                for column in range(COLUMNS):
                    moved = model.cells.get((layer, source, column), (0.0, 0.0, False))
                    old = model.cells.get((layer, target, column), (0.0, 0.0, False))
                    model.cells[layer, target, column] = (*(moved if column < model.lengths[source] else old)[:2], moved[2])
            model.lengths[target], pending = model.lengths[source], [0] * ROWS
        elif name == "shrink" and arguments[0] <= active:
            cache.active = model.active = arguments[0]
            pending = [0] * ROWS
        elif name == "reset":
            cache.reset()
            model.lengths, model.active, pending = [0] * ROWS, ROWS, [0] * ROWS
            model.cells = {place: (*cell[:2], False) for place, cell in model.cells.items()}
        _check_content(cache, model)
    return outcome


def _check_view(model, layer, keys, values, starts, counts) -> None:
    total = max(start + count for start, count in zip(starts, counts))
    assert keys.shape == values.shape == (len(starts), 1, total, 1)
    for b, (start, count) in enumerate(zip(starts, counts)):
        for column in range(start + count):
            key, value, hidden = model.cells[layer, b, column]
            assert hidden or (float(keys[b, 0, column]), float(values[b, 0, column])) == (key, value), (layer, b, column)


def _check_visible(model, layer, visible, span, window, starts, counts, blocks) -> None:
    """Attention over equal scores is the mean of what a token sees: every real token sees exactly what it should."""
    batch, total = len(starts), span.stop
    values = torch.eye(total).expand(batch, 1, total, total)[:, :, visible.first :]  # [B, 1, T - first, T]
    shares = attend(torch.zeros(batch, 1, span.width, total), torch.zeros_like(values), values, visible.mask, 1.0)[:, 0]  # [B, N, T]
    for b, (start, count) in enumerate(zip(starts, counts)):
        block_of = {} if blocks is None else {start + t: int(blocks[b, t]) for t in range(count)}
        for t in range(count):
            right = [column < start + count and model.visible(layer, b, start + t, column, window, block_of) for column in range(total)]
            seen = [share > 0 for share in shares[b, t].tolist()]
            assert seen == right, f"layer {layer}, row {b}: column {start + t} sees {seen} but should see {right}"


def _check_content(cache, model) -> None:
    assert cache.lengths.tolist() == model.lengths and cache.length == max(model.lengths) and cache.active == model.active
    for b, length in enumerate(model.lengths):
        for layer in range(CACHE_LAYERS):
            for column in range(length):
                key, value, hidden = model.cells[layer, b, column]
                assert hidden or (float(cache.keys[layer, b, 0, column, 0]), float(cache.values[layer, b, 0, column, 0])) == (key, value)
                assert hidden == (cache.hidden is not None and bool(cache.hidden[layer, b, column])), (layer, b, column)


COUNTS = st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS) | st.integers(1, 4).map(lambda n: [n] * ROWS)
CACHE_CALLS = st.lists(st.one_of(
    st.tuples(st.just("pass"), COUNTS, st.lists(st.integers(0, CACHE_LAYERS - 1), max_size=1), st.sampled_from([None, None, 1, 2, 3, 7]),
              st.sampled_from(["commit", "commit", "drop", ""]), st.sampled_from([0, 0, 2, 3])),
    st.tuples(st.just("rewind"), st.integers(0, COLUMNS)), st.tuples(st.just("move"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
    st.tuples(st.just("shrink"), st.integers(1, ROWS)), st.tuples(st.just("reset"))), min_size=1, max_size=8)


# --- the runner -----------------------------------------------------------------------------------------------------------------------

RUNNER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
RUNNER_LAYERS, RUNNER_COLUMNS, RUNNER_ROWS, RUNNER_VOCAB = 4, 90, 3, 61


@functools.cache
def runner_model(family: str):
    windows = {"mistral": (5,) * 4, "gemma3_text": (4, 4, None, 4)}.get(family, (None,) * RUNNER_LAYERS)
    return tiny_model(family, num_layers=RUNNER_LAYERS, layer_windows=windows)


class _Stop(Exception):
    """An interruption somewhere inside a pass."""


class _Bomb:
    """A tap that interrupts the n-th time it is called; harmless without a number."""

    def __init__(self):
        self.left: int | None = None

    def __call__(self, layer, name, tensor):
        if self.left is not None:
            if self.left == 0:
                self.left = None
                raise _Stop
            self.left -= 1
        return tensor


def check_runner(case) -> str:
    """Any calls in any order, some of them refused or interrupted: the cache stays what the successful ones make it."""
    bomb = _Bomb()
    model = runner_model(case["family"])
    runner = WatchedRunner(model, None, RUNNER_COLUMNS, RUNNER_ROWS, chunk_size=case["chunk"], tap=bomb)
    logits, outcomes = None, set()
    for name, *arguments in case["calls"]:
        before = _state(runner)
        bomb.left = None
        if name == "plan":
            skip, project_kv, split = arguments
            runner.plan = PrefillPlan(RUNNER_LAYERS, skip, project_kv, split)
            continue
        if name == "interrupted":
            bomb.left, name, *arguments = arguments[0], *arguments[1]
        try:
            if name == "prefill":
                prompts = arguments[0] if runner.cache.length == 0 else (arguments[0] * RUNNER_ROWS)[: runner.cache.active]
                logits, refusal = attempt(runner.prefill, prompts)
            elif name == "extend":
                logits, refusal = attempt(runner.extend, (arguments[0] * RUNNER_ROWS)[: runner.cache.active])
                logits = None if logits is None else logits[:, -1]
            elif name == "rewind":
                _, refusal = attempt(runner.rewind, arguments[0])
                logits = None
            elif name == "generate":
                _, refusal = attempt(lambda: list(runner.generate(arguments[0], SamplingParams(seed=1, max_new_tokens=arguments[1]))))
                logits = None
            elif name == "batch":
                _check_batch(runner, *arguments)
                continue
            else:
                runner.reset()
                refusal = logits = None
        except _Stop:
            if name not in ("generate", "batch"):  # those go on with what was finished
                assert _state(runner) == before, f"an interrupted {name} left its mark"
            outcomes.add("interrupted")
            continue
        if refusal and name != "generate":
            assert _state(runner) == before, f"a refused {name} left its mark"
        outcomes.add("refused" if refusal else "fine")
    bomb.left = None
    runner.check()
    if runner.cache.length:
        other = runner.replayed()
        assert other.cache.lengths.tolist() == runner.cache.lengths.tolist()
        for b, n in enumerate(runner.cache.lengths.tolist()):
            if all(row.project_kv for row in runner.rows[b]):
                compare(runner.cache.keys[:, b, :, :n], other.cache.keys[:, b, :, :n], 1e-4, f"replayed keys of row {b}")
        # The next token's logits, from the cache and from the history alone.
        token = [5] * runner.cache.active
        if runner.cache.length < RUNNER_COLUMNS:
            compare(runner.decode(token), other.decode(token), 1e-4, "replayed logits")
            _check_last(runner, token)
    return "interrupted" if "interrupted" in outcomes else "refused in part" if "refused" in outcomes else "fine"


def _state(runner):
    cache, lengths = runner.cache, runner.cache.lengths.tolist()
    return (lengths, cache.active, [runner.token_ids(b) for b in range(len(lengths))], [row[:] for row in runner.rows],
            [cache.keys[:, b, :, :n].sum().item() for b, n in enumerate(lengths)])


def _check_last(runner, token) -> None:
    """Where nothing was pruned, the cache equals one fresh prefill of the whole history."""
    for b in range(runner.cache.active):
        if not any(row.skip for row in runner.rows[b]):
            fresh = Runner(runner.model, None, RUNNER_COLUMNS)
            fresh.prefill(runner.token_ids(b))
            n = int(runner.cache.lengths[b])
            compare(runner.cache.values[:, b, :, :n], fresh.cache.values[:, 0, :, :n], 1e-4, f"values of row {b} against one fresh prefill")


def _check_batch(runner, prompts, seed, most) -> None:
    """generate_batch equals generate, prompt by prompt."""
    params = SamplingParams(temperature=0.8, seed=seed, max_new_tokens=most, stop_token_ids=(7, 8, 9))
    batch = Runner(runner.model, runner.plan, RUNNER_COLUMNS, 2)
    answers, refusal = attempt(batch.generate_batch, prompts, params)
    alone = []
    for prompt in prompts:
        answer, refused = attempt(lambda: list(Runner(runner.model, runner.plan, RUNNER_COLUMNS).generate(prompt, params)))
        alone.append(answer)
        assert refusal or not refused
    assert refusal or answers == alone
    assert batch.cache.length == 0


TOKEN = st.integers(0, RUNNER_VOCAB - 1)
WILD_TOKEN = st.one_of(TOKEN, TOKEN, TOKEN, TOKEN, st.sampled_from([-1, RUNNER_VOCAB, 2**40]))
PROMPTS = st.lists(st.lists(WILD_TOKEN, min_size=0, max_size=9), min_size=1, max_size=RUNNER_ROWS)
LONG = st.tuples(st.integers(60, 80), TOKEN).map(lambda t: [(t[1] + i * i) % 59 for i in range(t[0])])  # above 64: another way to attend
GOOD_PROMPTS = st.lists(st.lists(TOKEN, min_size=1, max_size=9) | LONG, min_size=1, max_size=RUNNER_ROWS)
CALL = st.one_of(
    st.tuples(st.just("prefill"), GOOD_PROMPTS), st.tuples(st.just("prefill"), PROMPTS),
    st.integers(1, 3).flatmap(lambda n: st.tuples(st.just("extend"), st.lists(st.lists(TOKEN, min_size=n, max_size=n), min_size=1, max_size=RUNNER_ROWS))),
    st.tuples(st.just("extend"), PROMPTS), st.tuples(st.just("rewind"), st.integers(-1, RUNNER_COLUMNS)),
    st.tuples(st.just("generate"), st.lists(TOKEN, min_size=1, max_size=6), st.integers(0, 6)))
PLAN_CALL = st.tuples(st.just("plan"), st.lists(st.integers(0, RUNNER_LAYERS - 1), unique=True), st.sampled_from([True, True, False]),
                      st.sampled_from([True, True, False]))
RUNNER_CASES = st.fixed_dictionaries({
    "family": st.sampled_from(RUNNER_FAMILIES), "chunk": st.sampled_from([1, 2, 3, 70, 2048]),
    "calls": st.lists(st.one_of(CALL, CALL, PLAN_CALL, st.tuples(st.just("interrupted"), st.integers(0, 40), CALL), st.tuples(st.just("reset")),
                                st.tuples(st.just("batch"), GOOD_PROMPTS, st.integers(0, 3), st.integers(0, 8))), min_size=1, max_size=7)})


# --- sampling -------------------------------------------------------------------------------------------------------------------------


def check_sampling(case) -> str:
    """A token is one that the settings allow, the same for the same seed; logits that are no numbers are an error, never a token."""
    params, refusal = attempt(SamplingParams, **case["params"])
    if refusal:
        return "refused"
    logits = torch.tensor([case["logits"]], dtype=torch.float32)  # beyond float32's range: infinite
    vocab, known = logits.shape[1], case["known"]
    history = [i % vocab for i in case["history"]]
    sampled = []
    for _ in range(2):
        sampler, refusal = attempt(Sampler, params, [history], vocab_size=vocab, num_token_ids=known)
        assert refusal is None
        tokens, refusal = attempt(lambda: [int(sampler.sample(logits)) for _ in range(3)])
        if refusal:
            assert "non-finite" in str(refusal)
            break
        sampled.append(tokens)
    usable = logits[0, :known]
    sound = not bool(usable.isnan().any()) and math.isfinite(float(usable.max()))
    assert sound == (refusal is None), f"logits {usable.tolist()}: {refusal}"
    if refusal:
        return "not finite"
    if params.seed is not None:
        assert sampled[0] == sampled[1], "the same seed gave other tokens"
    for token in sampled[0]:
        assert 0 <= token < min(known, vocab) and math.isfinite(float(usable[token]))
    plain = params.repetition_penalty == 1
    if plain and (params.temperature == 0 or params.top_k == 1 or params.top_p == 0):
        gaps = [float(usable.max() - usable[token]) for token in sampled[0]]
        tie = 1e-37 * params.temperature  # divided by the temperature, a smaller gap is no float32 any more
        assert all(gap <= tie for gap in gaps), "not the most likely token"
    if plain and params.top_k:
        assert all(int((usable > usable[token]).sum()) < params.top_k for token in sampled[0])
    return "fine"


LOGIT = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -1.0, 3e38, -3e38, 1e-40]), st.just(-math.inf))
WILD_LOGIT = st.one_of(LOGIT, LOGIT, LOGIT, st.sampled_from([math.nan, math.inf, -math.inf, 1e39]))
PARAMETERS = st.fixed_dictionaries({}, optional={
    "temperature": st.one_of(st.sampled_from([0, 1e-6, 1e-300, 1.0, 1e300, 0.7]), st.floats(0, 3)),
    "top_k": st.sampled_from([0, 1, 2, 5, 10**9]), "top_p": st.one_of(st.sampled_from([0, 1e-8, 1.0, 0.5]), st.floats(0, 1)),
    "min_p": st.one_of(st.sampled_from([0, 1.0]), st.floats(0, 1)), "repetition_penalty": st.sampled_from([1.0, 1.3, 1e-300, 1e300, 0.5]),
    "seed": st.sampled_from([None, 0, 7, 2**64 - 1])})
SAMPLING_CASES = st.fixed_dictionaries({
    "params": PARAMETERS | st.fixed_dictionaries({}, optional={name: SCALARS for name in (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed", "stop_token_ids")}),
    "logits": st.lists(LOGIT, min_size=1, max_size=9) | st.lists(WILD_LOGIT, min_size=1, max_size=9), "known": st.integers(1, 9),
    "history": st.lists(st.integers(0, 50), max_size=4)})


# --- arguments ------------------------------------------------------------------------------------------------------------------------

DTYPES = ["float32", "int64", "int32", "uint8", "bool", "float16", "complex64"]


def tensor_of(recipe) -> torch.Tensor | None:
    """["float32", [2, 3], 1.5] -> a tensor of that shape, all of one value."""
    if recipe is None:
        return None
    dtype, shape, value = recipe
    return torch.full(shape, value).to(getattr(torch, dtype))


@functools.cache
def vision_model(family: str):
    return tiny_model(family)


def check_inputs(case) -> str:
    """Prompts of any type, shape and value: refused with nothing changed, or logits that are finite."""
    model = vision_model(case["family"])
    runner = WatchedRunner(model, PrefillPlan.deepest(model.config.num_layers), 48)
    if case["earlier"]:
        runner.prefill([3, 4, 5])
    before = _state(runner)
    ids = tensor_of(case["ids"]) if case["as tensor"] else case["ids"]

    def call():
        if case["call"] == "prefill":
            pixels, grid = tensor_of(case["pixels"]), None if case["grid"] is None else torch.tensor(case["grid"])
            return runner.prefill(ids if pixels is None and grid is None else ModelInputs(ids, pixels, grid))
        if case["call"] == "rewind":
            return runner.rewind(ids)
        return getattr(runner, case["call"])(ids)

    logits, refusal = attempt(call)
    if refusal:
        assert _state(runner) == before, "a refused call left its mark"
        return "refused"
    assert logits is None or bool(logits.isfinite().all())
    return "fine"


DIMENSIONS = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.tuples(st.sampled_from(DTYPES), DIMENSIONS, st.sampled_from([0, 1, 5, 60, 61, -1]))
WITH_IMAGE = st.one_of(st.just([1, 2] + [60] * 4 + [3]), st.just([60] * 4), st.just([1, 60, 60, 5, 60, 60, 2]), st.just([1] + [60] * 8 + [2]))
PIXELS = st.one_of(
    st.none(), st.tuples(st.just("float32"), st.sampled_from([[16, 96], [4, 96], [8, 96], [32, 96], [1, 3, 16, 16], [2, 3, 16, 16]]), st.just(0.5)),
    st.tuples(st.sampled_from(DTYPES), DIMENSIONS, st.sampled_from([0, 1])))
GRIDS = st.one_of(st.none(), st.lists(st.lists(st.sampled_from([0, 1, 2, 4, -2, 2**31, 2**62]), min_size=3, max_size=3), max_size=2),
                  st.sampled_from([[[1, 4, 4]], [[1, 2, 2]], [[1, 2, 4]], [[1, 4, 4], [1, 4, 4]], [[2, 4, 4]], [[1.0, 4.0, 4.0]], [1, 4, 4]]))
PROMPT_VALUES = st.one_of(st.lists(st.integers(0, 61), max_size=6), WITH_IMAGE, st.lists(st.lists(st.integers(0, 60), max_size=4), max_size=2), VALUES)
INPUT_CASES = st.one_of(
    st.fixed_dictionaries({"family": st.sampled_from(["llama", "gemma3", "qwen3_vl"]), "earlier": st.booleans(), "as tensor": st.just(False),
                           "ids": PROMPT_VALUES, "pixels": st.none(), "grid": st.none(), "call": st.sampled_from(["prefill", "extend", "decode", "rewind"])}),
    st.fixed_dictionaries({"family": st.sampled_from(["llama", "gemma3", "qwen3_vl"]), "earlier": st.booleans(), "as tensor": st.just(False),
                           "ids": WITH_IMAGE, "pixels": PIXELS, "grid": GRIDS, "call": st.just("prefill")}),
    st.fixed_dictionaries({"family": st.sampled_from(["llama", "qwen3_vl"]), "earlier": st.booleans(), "as tensor": st.just(True), "ids": TENSORS,
                           "pixels": st.none(), "grid": st.none(), "call": st.sampled_from(["prefill", "extend", "decode"])}))


ENGINE = [
    Target("cache", "passes, commits, interruptions, rewinds and moves on a KVCache, against one dictionary", CACHE_CALLS, check_cache, 150,
           ("fine", "nothing to do")),
    Target("runner", "calls of a Runner in any order, refused and interrupted ones too, against the obvious arithmetic, a replay, a fresh prefill",
           RUNNER_CASES, check_runner, 100, ("fine", "refused in part", "interrupted")),
    Target("sampling", "settings and logits of every kind: edges, ties, NaN, infinities", SAMPLING_CASES, check_sampling, 250,
           ("refused", "fine", "not finite")),
    Target("inputs", "token ids, pixels and grids of any type, shape and value", INPUT_CASES, check_inputs, 200),
]
