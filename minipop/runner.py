"""The two-phase runner: Prefill-Only Pruning (arXiv 2602.03295) in one file.

The only loop over layers is `run_layers`. For each layer it takes one of two ways: the whole layer, or its K/V alone. The
prompt's tokens 1 .. N-1 go through the pruned pass, the boundary token N and everything after it through the full model:

    two passes (the paper's):   tokens 1..N-1, some layers K/V only     then token N, all layers
    fused (for a suffix):       tokens 1..N, lower layers               then tokens 1..N-1 K/V only and token N, upper layers

Both give the same cache and logits; the fused form reads the lower layers' weights once instead of twice.

Shapes: B batch, N new tokens, D hidden, L layers, S max_seq_len.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .cache import CachePass, KVCache, Span
from .compiled import CompiledToken
from .decoding import GraphedStep, OneToken, fits, places
from .errors import MinipopError, PlanError, PromptError
from .files import one_line
from .inputs import Batch, ModelInputs, check_token_ids
from .layers import KV, Rope, Tap, no_tap
from .plan import PrefillPlan
from .sampling import Sampler, SamplingParams
from .stacked import StackedKV


def run_layers(model: nn.Module, x: Tensor, rope: list[Rope], kv: KV, deepstack: tuple[Tensor, ...] = (),
               plan: PrefillPlan | None = None, layers: range | None = None, tap: Tap = no_tap) -> Tensor:
    """Carry the stream x [B, N, D] through the layers; those in `plan.skip` write their K/V (or hide) and let it pass by.

    `layers` limits the walk to a range of them. Without a plan every layer runs.
    """
    for i in range(model.config.num_layers) if layers is None else layers:
        layer = model.layers[i]
        if plan is None or i not in plan.skip:
            x = layer(x, rope[i], kv, tap)
        elif plan.project_kv:
            layer.project_kv(x, rope[i], kv, tap)
        else:
            kv.hide(i)
        x = tap(i, "resid", model.after_layer(i, x, deepstack))
    return x


class Runner:
    """Runs one model under one plan, with one cache. Not thread-safe.

    model: from `load_model`. plan: None = skip nothing. max_seq_len: cache columns, prompt and answer together.
    batch_size: rows of the cache. fused: use the faster forms where the plan allows them: the fused boundary, and the skipped layers'
    K/V in one product. chunk_size: most prompt tokens that go through the layers at once; a longer prompt is cut up, which bounds the
    working memory and changes nothing else. tap: see `layers.Tap`.
    Raises PlanError when the plan is for another depth or its K/V file for another checkpoint, PromptError when max_seq_len exceeds
    what the model was made for, MinipopError when the cache cannot be allocated.
    """

    def __new__(cls, model: nn.Module, *arguments, **options):
        # A model that is spread over processes brings the runner that takes the others along (parallel.py).
        return super().__new__(getattr(model, "runner_class", cls) if cls is Runner else cls)

    def __init__(self, model: nn.Module, plan: PrefillPlan | None = None, max_seq_len: int = 4096, batch_size: int = 1, *,
                 fused: bool = True, chunk_size: int = 2048, tap: Tap = no_tap):
        config = model.config
        self.model, self.plan = model, PrefillPlan.full(config.num_layers) if plan is None else plan
        self.fused, self.chunk_size, self.tap = fused, chunk_size, tap
        self.compiled = model.compiled  # None is a choice too
        if self.plan.num_layers != config.num_layers:
            raise PlanError(f"the plan is for {self.plan.num_layers} layers, the model has {config.num_layers}")
        for name, value in (("max_seq_len", max_seq_len), ("batch_size", batch_size), ("chunk_size", chunk_size)):
            if type(value) is not int or value < 1:
                raise PromptError(f"{name} must be a positive whole number, not {value!r}")
        if max_seq_len > config.max_position_embeddings:
            raise PromptError(f"max_seq_len {max_seq_len} exceeds the {config.max_position_embeddings} positions the model was "
                              "made for: lower it")
        weight = model.embedding.weight
        try:
            self.cache = KVCache(config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim,
                                 weight.dtype, weight.device)
        except RuntimeError:  # torch's out-of-memory error
            size = 2 * config.num_layers * batch_size * config.kv_width * max_seq_len * weight.element_size()
            raise MinipopError(f"no memory for a cache of {size / 2**30:.1f} GiB: lower max_seq_len or batch_size") from None
        self._stacked: tuple[PrefillPlan, StackedKV] | None = None  # made for a plan when it is first needed
        if self.plan.kv is not None and self.stacked_kv() is None:  # raises PlanError if the file is not for this model and plan
            raise PlanError("calibrated K/V belong to a plan that skips the deepest layers and projects their K/V, above the layers that "
                            f"DeepStack adds image rows to; this one has {self.plan.describe()}")
        self._one_token: OneToken | None = None  # likewise
        self._graphs: GraphedStep | None | bool = None  # likewise; False once recording has failed
        self._tokens = torch.zeros(batch_size, max_seq_len, dtype=torch.long)  # the ids behind the cache's rows
        # The next free position after each column, -1 inside an image; it differs from the column number only for M-RoPE.
        self._following = torch.zeros(batch_size, max_seq_len + 1, dtype=torch.long) if config.image_token_id is not None else None

    # --- phase one: prefill ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, inputs) -> Tensor:
        """Encode a prompt under the plan. Returns the boundary token's logits, float32 [B, vocab].

        inputs: LongTensor [B, N] | list[int] | list of those (ragged) | ModelInputs | list[ModelInputs]. On a cache that
        holds rows already, the prompt continues them. An empty first prompt stands for the family's BOS.
        Raises PromptError (empty, too long, ids out of range, images that do not match) before anything is written.
        """
        batch = Batch.of(self._sequences(inputs), self.model)
        if self.cache.length == 0:
            if len(batch.counts) > len(self.cache.lengths):
                raise PromptError(f"{len(batch.counts)} prompts for a runner with batch_size {len(self.cache.lengths)}")
        elif len(batch.counts) != self.cache.active:
            raise PromptError(f"{len(batch.counts)} prompts to continue a cache of {self.cache.active} rows")
        active = len(batch.counts)
        starts = self.cache.lengths[:active].clone()
        self._check_room(starts, batch.counts)
        positions, following = self.model.positions(batch, starts + self._deltas(active))
        prompt = _Prompt(self, batch, starts, positions)

        # Long prompts: all but the last chunk go through the pruned model, whatever form the end of the prompt takes.
        boundary_counts = boundary_lengths(batch, prompt.blocks)
        chunks = chunk_counts(batch, prompt.blocks, self.chunk_size)
        done = torch.zeros_like(batch.counts)
        for counts in chunks[:-1]:
            prompt.part(done, counts).run(self.plan)
            done = done + counts
        end = prompt.part(done, chunks[-1])
        if not self.plan.split_boundary:
            last, boundary_counts = end.run(self.plan), chunks[-1]
        elif self.plan.is_suffix and self.fused:
            last = self._fused(end, boundary_counts)
        else:
            last = self._two_passes(end, boundary_counts)
        last = gather(last, boundary_counts - 1, torch.ones_like(boundary_counts))  # [B, 1, D]
        logits = self._logits(last)[:, 0]

        self._remember(batch, starts, positions, following)
        self.cache.commit(batch.counts)
        return logits

    def _two_passes(self, end: "_Part", boundary_counts: Tensor) -> Tensor:
        """The paper's form: tokens 1 .. N-1 through the pruned model, then the boundary through the full one."""
        before, boundary = end.split(boundary_counts)
        if before.span.width:
            before.run(self.plan)
        return boundary.run()

    def _fused(self, end: "_Part", boundary_counts: Tensor) -> Tensor:
        """For a suffix of skipped layers: the lower ones are full for every token, so all go through them together."""
        cut, depth = self.plan.cut, self.plan.num_layers
        end.x = end.run(layers=range(cut))
        before, boundary = end.split(boundary_counts)
        if before.span.width:
            before.run(self.plan, range(cut, depth))
        return boundary.run(layers=range(cut, depth))

    # --- phase two: decode -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, token_ids) -> Tensor:
        """One full-model step: token_ids LongTensor [B] -> float32 [B, vocab]."""
        return self.extend(as_token_ids(token_ids).reshape(-1, 1))[:, 0]

    @torch.no_grad()
    def extend(self, token_ids) -> Tensor:
        """n tokens through the full model at once: LongTensor [B, n] -> float32 [B, n, vocab]; equals n decode steps."""
        ids = as_token_ids(token_ids)
        if ids.dim() != 2 or ids.shape[0] != self.cache.active:
            raise PromptError(f"this cache takes token ids [{self.cache.active}, n], not {list(ids.shape)} {ids.dtype}")
        if ids.shape[1] == 0:
            raise PromptError("no token ids to run")
        check_token_ids(ids, self.model.config)
        starts = self.cache.lengths[: self.cache.active].clone()
        counts = torch.full_like(starts, ids.shape[1])
        self._check_room(starts, counts)
        batch = Batch(ids, counts)
        positions, following = self.model.positions(batch, starts + self._deltas(len(starts)))
        logits = self._graphed_step(ids, positions, starts)
        if logits is None:
            x = self.tap(-1, "resid", self.model.embed_tokens(ids))
            logits = self._logits(_Part(self, Span(starts, counts, ids.shape[1]), x, positions).run())
        self._remember(batch, starts, positions, following)
        self.cache.commit(counts)
        return logits

    # --- both phases: generate ---------------------------------------------------------------------------------------

    def generate(self, inputs, params: SamplingParams = SamplingParams()) -> Iterator[int]:
        """Prefill one prompt, then yield sampled ids until an end-of-text id (yielded too), a limit, or a full cache.

        The last yielded id is not in the cache: no forward is spent on it. Whoever continues passes it first.
        """
        if self.cache.length and self.cache.active != 1:
            raise PromptError("generate continues one sequence; this cache holds a batch: call reset() first")
        sequences = self._sequences(inputs)
        if len(sequences) != 1:
            raise PromptError(f"generate takes one prompt, not {len(sequences)}: see generate_batch")
        return self._generate(sequences, params)

    def _generate(self, sequences: list[ModelInputs], params: SamplingParams) -> Iterator[int]:
        if params.max_new_tokens == 0:
            return
        logits = self.prefill(sequences)
        sampler = self._sampler(params)
        stop = self._stop_ids(params)
        for step in range(params.max_new_tokens):
            token_id = int(sampler.sample(logits))
            yield token_id
            if token_id in stop or step + 1 == params.max_new_tokens or self.cache.length == self.cache.max_seq_len:
                return
            logits = self.decode([token_id])

    def generate_batch(self, inputs: Sequence, params: SamplingParams = SamplingParams(),
                       on_token: Callable[[int, int, Tensor], object] | None = None) -> list[list[int]]:
        """Answers to independent prompts, `batch_size` at a time; each equals what `generate` would give alone.

        A finished row leaves the batch at once. Needs an empty cache and leaves it empty. on_token(prompt, id, logits): called for
        every token as it is sampled, with the number of its prompt and the logits [vocab] it was sampled from; where it returns
        something true, that answer ends.
        """
        if self.cache.length:
            raise PromptError("generate_batch needs an empty cache: call reset() first")
        sequences = self._sequences(inputs) if len(inputs) else []
        for sequence in sequences:  # all checks come before the first forward
            self._check_room(torch.zeros(1, dtype=torch.long), Batch.of([sequence], self.model).counts)
        size = len(self.cache.lengths)
        answers: list[list[int]] = []
        try:
            for first in range(0, len(sequences), size):
                answers += self._generate_group(sequences[first : first + size], params, first, on_token)
                self.reset()
        finally:
            self.reset()
        return answers

    def _generate_group(self, sequences: list[ModelInputs], params: SamplingParams, first: int, on_token) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in sequences]
        if params.max_new_tokens == 0:
            return answers
        logits = self.prefill(sequences)
        sampler = self._sampler(params)
        stop = self._stop_ids(params)
        rows = list(range(len(sequences)))  # which prompt lies in which row of the cache
        while rows:
            ids = sampler.sample(logits).tolist()
            ended = set()
            for row, token_id, row_logits in zip(rows, ids, logits):
                answers[row].append(token_id)
                if on_token is not None and on_token(first + row, token_id, row_logits) or token_id in stop:
                    ended.add(row)
            kept = [i for i, row in enumerate(rows) if row not in ended and len(answers[row]) < params.max_new_tokens
                    and self.cache.lengths[i] < self.cache.max_seq_len]
            if len(kept) < len(rows):
                kept = self._compact(kept)
                sampler.keep(kept)
                rows = [rows[i] for i in kept]
            if rows:
                logits = self.decode([answers[row][-1] for row in rows])
        return answers

    def _compact(self, kept: list[int]) -> list[int]:
        """Move running rows from the end into the places of finished ones. Returns which old row lies in each place."""
        order = kept[:]
        for place in range(len(kept)):
            if place not in kept:  # free: fill it from the end
                source = order.pop()
                order.insert(place, source)
                self.cache.move_row(source, place)
                self._tokens[place] = self._tokens[source]
                if self._following is not None:
                    self._following[place] = self._following[source]
        self.cache.active = len(kept)
        self.cache.lengths[len(kept):] = 0
        return order

    def stacked_kv(self) -> StackedKV | None:
        """The one-product form of the plan's skipped layers; None where only the plain form shows or does what is asked.

        Calibrated K/V have this form only.
        """
        plan = self.plan
        possible = plan.project_kv and plan.skip and plan.is_suffix
        possible = possible and plan.cut >= self.model.deepstack_layers  # DeepStack changes the stream between skipped layers
        if not possible or plan.kv is None and (not self.fused or self.tap is not no_tap):
            return None
        if self._stacked is None or self._stacked[0] != plan:
            self._stacked = plan, StackedKV(self.model, plan)
        return self._stacked[1]

    def one_token(self) -> OneToken | None:
        """The fast form of the full model for one token a row; None where only the plain form does what is asked."""
        if not self.fused or self.tap is not no_tap or self.cache.hidden is not None:
            return None
        if self._one_token is None and fits(self.model):
            self._one_token = OneToken(self.model)
        return self._one_token

    def compiled_token(self) -> CompiledToken | None:
        """The compiled form for one token of one sequence; None where there is none, or where only the plain form does what is asked."""
        return None if self.compiled is None or self.one_token() is None else self.compiled

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head: x [B, n, D] -> float32 [B, n, vocab]."""
        compiled = self.compiled_token() if x.shape[:2] == (1, 1) else None
        return (compiled or self.model).logits(x)

    def _graphed_step(self, ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor | None:
        """One decode step by a CUDA graph, logits [B, 1, vocab]; None where there is none to replay."""
        if self._graphs is False or ids.shape[1] != 1 or self.one_token() is None or not GraphedStep.fits(self.model):
            return None
        try:
            self._graphs = self._graphs or GraphedStep(self.model, self.one_token(), self.cache)
            return self._graphs(ids, positions, starts)
        except RuntimeError as problem:
            warnings.warn(f"decoding without CUDA graphs: {one_line(problem)}", RuntimeWarning, stacklevel=4)
            self._graphs = False
            return None

    # --- the session ---------------------------------------------------------------------------------------------------

    def token_ids(self, row: int = 0) -> list[int]:
        """The ids whose K/V the cache holds."""
        return self._tokens[row, : int(self.cache.lengths[row])].tolist()

    def rewind(self, n: int | Tensor) -> None:
        """Keep the first n cache rows (undo, retry, reuse of a common prefix), or the first n[b] of each sequence: LongTensor [B].

        Raises PromptError if that cuts an image, or if n[b] is more than the sequence holds.
        """
        active, lengths = self.cache.active, self.cache.lengths[: self.cache.active]
        if isinstance(n, Tensor):
            if n.dtype != torch.long or n.shape != lengths.shape or bool(((n.cpu() < 0) | (n.cpu() > lengths)).any()):
                raise PromptError(f"cannot rewind to {n.tolist()!r:.80}: the cache holds {lengths.tolist()!r:.80} rows")
            keep = n.cpu()
        elif type(n) is int and 0 <= n <= self.cache.length:
            keep = lengths.clamp(max=n)
        else:
            raise PromptError(f"cannot rewind to {n!r:.80}: the cache holds {self.cache.length} rows")
        if not keep.any():
            return self.reset()
        if self._following is not None and bool((self._following[torch.arange(active), keep][lengths > keep] < 0).any()):
            raise PromptError(f"cannot rewind to {n if isinstance(n, int) else n.tolist()}: that is in the middle of an image")
        self.cache.rewind(keep)

    def reset(self) -> None:
        """Forget everything."""
        self.cache.reset()

    # --- small print ---------------------------------------------------------------------------------------------------

    def _sequences(self, inputs) -> list[ModelInputs]:
        """Whatever `prefill` accepts, as a list of sequences none of which is empty."""
        if isinstance(inputs, ModelInputs):
            sequences = [inputs]
        elif isinstance(inputs, Tensor):
            if inputs.dim() not in (1, 2):
                raise PromptError(f"token ids must be [N] or [B, N], not {list(inputs.shape)}")
            sequences = [ModelInputs(row) for row in (inputs if inputs.dim() == 2 else inputs[None])]
        elif isinstance(inputs, (list, tuple)):
            many = any(isinstance(item, (ModelInputs, list, tuple)) or isinstance(item, Tensor) and item.dim() for item in inputs)
            sequences = [s if isinstance(s, ModelInputs) else ModelInputs(s) for s in inputs] if many else [ModelInputs(list(inputs))]
        else:
            raise PromptError(f"cannot read a prompt from {type(inputs).__name__}: give token ids or ModelInputs")
        if not sequences:
            raise PromptError("no prompts given")
        for i, sequence in enumerate(sequences):
            if len(sequence):
                continue
            bos = self.model.config.bos_token_id
            if bos is None or self.cache.length:
                raise PromptError("the prompt is empty" + ("" if bos is not None else ", and this family has no BOS to start from"))
            sequences[i] = ModelInputs([bos])
        return sequences

    def _check_room(self, starts: Tensor, counts: Tensor) -> None:
        needed = int((starts + counts).max())
        if needed > self.cache.max_seq_len:
            held = f" after the {int(starts.max())} already there" if int(starts.max()) else ""
            raise PromptError(f"{int(counts.max())} tokens{held} do not fit: the cache has room for {self.cache.max_seq_len}; shorten "
                              "the prompt or raise max_seq_len")

    def _deltas(self, active: int) -> Tensor:
        """Next position minus cache length of each row [B]: 0 but after images with M-RoPE."""
        lengths = self.cache.lengths[:active]
        if self._following is None:
            return torch.zeros_like(lengths)
        return torch.where(lengths > 0, self._following[torch.arange(active), lengths] - lengths, 0)

    def _remember(self, batch: Batch, starts: Tensor, positions: Tensor, following: Tensor) -> None:
        """Note the ids behind the new rows, and the position that follows each of them."""
        if positions.dim() == 3:  # M-RoPE: time stands for the text's position
            positions = positions[..., 0]
        for b, (start, count) in enumerate(zip(starts.tolist(), batch.counts.tolist())):
            self._tokens[b, start : start + count] = batch.token_ids[b, :count]
            if self._following is not None:
                self._following[b, start + 1 : start + count + 1] = positions[b, :count] + 1
                for first, length in batch.images[b] if batch.images else ():
                    self._following[b, start + first + 1 : start + first + length] = -1
                    if first + length < count:
                        self._following[b, start + first + length] = positions[b, first + length]
                self._following[b, start + count] = following[b]

    def _sampler(self, params: SamplingParams) -> Sampler:
        config = self.model.config
        histories = [self.token_ids(row) for row in range(self.cache.active)]
        return Sampler(params, histories, vocab_size=config.vocab_size, num_token_ids=config.num_token_ids,
                       device=self.cache.keys.device)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(self.model.config.eos_token_ids) | frozenset(params.stop_token_ids)


class _Prompt:
    """A batch on its way into the cache. Text is embedded piece by piece; images are encoded once, up front."""

    def __init__(self, runner: Runner, batch: Batch, starts: Tensor, positions: Tensor):
        self.runner, self.batch, self.starts, self.positions = runner, batch, starts, positions
        self.blocks = runner.model.image_blocks(batch.token_ids)
        self.embedded = None if batch.pixel_values is None else runner.model.embed(batch)

    def part(self, first: Tensor, counts: Tensor) -> "_Part":
        """Tokens first[b] .. first[b] + counts[b] - 1 of each row."""
        blocks = None if self.blocks is None else gather(self.blocks, first, counts)
        if self.embedded is None:
            x, deepstack = self.runner.model.embed_tokens(gather(self.batch.token_ids, first, counts)), ()
        else:
            x = gather(self.embedded.x, first, counts)
            deepstack = tuple(gather(rows, first, counts) for rows in self.embedded.deepstack)
        span = Span(self.starts + first, counts, int(counts.max()), blocks)
        return _Part(self.runner, span, self.runner.tap(-1, "resid", x), gather(self.positions, first, counts), deepstack)


class _Part:
    """Some tokens of a prompt in the layers: their span, stream [B, N, D], positions, DeepStack rows."""

    def __init__(self, runner: Runner, span: Span, x: Tensor, positions: Tensor, deepstack: tuple[Tensor, ...] = ()):
        if span.blocks is not None and not (span.blocks >= 0).any():
            span.blocks = None
        self.runner, self.span, self.x, self.positions, self.deepstack = runner, span, x, positions, deepstack
        self.kv = runner.cache.begin(span) if span.width else None
        self.rope = runner.model.rope(positions) if span.width else []

    def run(self, plan: PrefillPlan | None = None, layers: range | None = None) -> Tensor:
        """The stream after `layers` (all of them by default), those the plan skips as K/V only."""
        runner = self.runner
        layers = range(runner.plan.num_layers) if layers is None else layers
        fast = runner.one_token() if plan is None and self._has_one_token(layers) else None
        compiled = runner.compiled_token() if fast is not None and len(self.x) == 1 and self.span.stop > 1 else None
        if compiled is not None:
            return compiled(self.x, self.rope, runner.cache, int(self.span.starts[0]), layers)
        if fast is not None:
            return fast(self.x, self.rope, *places(runner.cache, self.span.starts, fast.windows), layers)
        stacked = None if plan is None else runner.stacked_kv()
        below = layers if stacked is None else range(layers.start, min(layers.stop, stacked.cut))
        x = run_layers(runner.model, self.x, self.rope, self.kv, self.deepstack, plan, below, runner.tap)
        if below.stop < layers.stop:
            stacked.write(x, self.rope, self.kv, runner.tap)
            for i in range(stacked.cut, layers.stop):
                x = runner.tap(i, "resid", x)
        return x

    def _has_one_token(self, layers: range) -> bool:
        """Nothing but one token of text a row, its K/V for the cache and nobody else."""
        span, later = self.span, layers.start >= self.runner.model.deepstack_layers
        return (span.width == 1 and bool((span.counts == 1).all()) and span.blocks is None and (later or not self.deepstack)
                and type(self.kv) is CachePass)

    def split(self, boundary_counts: Tensor) -> tuple["_Part", "_Part"]:
        """What comes before the boundary, and the boundary."""
        before = self.span.counts - boundary_counts
        return self._slice(torch.zeros_like(before), before), self._slice(before, boundary_counts)

    def _slice(self, first: Tensor, counts: Tensor) -> "_Part":
        blocks = None if self.span.blocks is None else gather(self.span.blocks, first, counts)
        span = Span(self.span.starts + first, counts, int(counts.max()), blocks)
        return _Part(self.runner, span, gather(self.x, first, counts), gather(self.positions, first, counts),
                     tuple(gather(rows, first, counts) for rows in self.deepstack))


def as_token_ids(values) -> Tensor:
    """A tensor or a rectangle of lists -> LongTensor on the CPU. Raises PromptError for anything but whole numbers."""
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise PromptError("token ids must be whole numbers, in a tensor or a rectangle of lists") from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise PromptError(f"token ids must be whole numbers, not {ids.dtype}")
    return ids.long().cpu()


def gather(x: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """x [B, N, ...] -> tokens first[b] .. first[b] + counts[b] - 1 of each row, padded on the right to one width."""
    width = int(counts.max())
    if bool((first == first[0]).all()):
        return x.narrow(1, int(first[0]), width)
    index = (first[:, None] + torch.arange(width)).clamp(max=x.shape[1] - 1).to(x.device)  # [B, width]
    return x[torch.arange(len(first), device=x.device)[:, None], index]


def boundary_lengths(batch: Batch, blocks: Tensor | None) -> Tensor:
    """Tokens of each row's boundary, [B]: the last one, or all of its image block where it lies in one."""
    lengths = torch.ones_like(batch.counts)
    if blocks is not None:
        for b, count in enumerate(batch.counts.tolist()):
            block = int(blocks[b, count - 1])
            if block >= 0:
                lengths[b] = int((blocks[b, :count] == block).sum())
    return lengths


def chunk_counts(batch: Batch, blocks: Tensor | None, chunk_size: int) -> list[Tensor]:
    """Cut prompts into passes of at most `chunk_size` tokens: for each pass the tokens of every row, [B]; the last pass holds
    the end of every row. An image block is never cut: the pass before it grows to take it whole."""
    if int(batch.counts.max()) <= chunk_size:
        return [batch.counts]

    def whole(row: int, edge: int) -> int:
        """The first place from `edge` on that is not inside a block."""
        while blocks is not None and 0 < edge < int(batch.counts[row]) and blocks[row, edge] >= 0 and blocks[row, edge] == blocks[row, edge - 1]:
            edge += 1
        return edge

    edges = []  # of each row, without 0 and the end
    for row, count in enumerate(batch.counts.tolist()):
        cuts = []
        while count - (cuts[-1] if cuts else 0) > chunk_size:
            cuts.append(whole(row, (cuts[-1] if cuts else 0) + chunk_size))
        if cuts and cuts[-1] == count:  # the last block reaches the end: it belongs to the last pass
            cuts.pop()
        edges.append([0, *cuts])
    passes = max(map(len, edges))
    ends = torch.tensor([[row[min(i, len(row) - 1)] for i in range(passes)] + [count]
                         for row, count in zip(edges, batch.counts.tolist())])
    return list(ends.diff(dim=1).unbind(1))
