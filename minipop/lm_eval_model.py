"""The two-phase runner behind lm-eval's model interface: what is pruned when a benchmark asks for a number.

    loglikelihood           the context is the prompt: all of it but its last token goes through the pruned prefill; the last token and
                            the continuation, whose probability is asked for, through the full model
    loglikelihood_rolling   a text is cut into windows as lm-eval does it, and each window in the middle: its first half is scored by
                            the full model, its second half after a pruned prefill of the first (`split_window`)
    generate_until          the context is the prompt, under the plan; the answer runs through the full model

With a plan that skips nothing, every number equals that of lm-eval's own Hugging Face model. Contexts that several requests share (the
choices of a question) are prefilled once, `batch_size` contexts at a time.

Shapes: B contexts of a batch, n tokens of the longest continuation.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from torch import Tensor, nn
from tqdm import tqdm

from .cli import DEFAULT_SEQ_LEN, parse_plan
from .errors import PromptError, TokenizerError
from .packing import pack
from .plan import PrefillPlan
from .runner import Runner
from .sampling import SamplingParams
from .tokenizer import Tokenizer

LOGITS = 2**26  # most logits computed at a time while scoring: 256 MB of float32
OPTIONS = ("top_k", "top_p", "min_p", "repetition_penalty")  # of a generation task, besides those about its length and temperature

Score = tuple[float, bool]  # log-probability of a continuation, and whether greedy decoding would have written it


@register_model("minipop")
class MinipopLM(TemplateLM):
    """lm-eval's name for it is `minipop`.

    plan: None = skip nothing. max_seq_len: longest context and continuation together; longer ones lose their beginning, as in lm-eval's
    Hugging Face model (default: 4096, or what the model allows). seed: for tasks that sample.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, plan: PrefillPlan | None = None, batch_size: int = 8,
                 max_seq_len: int | None = None, seed: int = 0):
        super().__init__()
        largest = model.config.max_position_embeddings
        if max_seq_len is not None and not 2 <= max_seq_len <= largest:
            raise PromptError(f"max_seq_len must lie between 2 and the {largest} positions the model was made for, not {max_seq_len}")
        self.model, self.tokenizer, self.batch_size, self.seed = model, tokenizer, int(batch_size), seed
        self.plan = PrefillPlan.full(model.config.num_layers) if plan is None else plan
        self.max_length = max_seq_len or min(DEFAULT_SEQ_LEN, largest)
        self.max_gen_toks = 256  # where a task does not say
        self._chats: set[str] = set()  # texts that `apply_chat_template` made
        self._encode_context = functools.lru_cache(maxsize=64)(self.tok_encode)  # the choices of a question follow each other

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "MinipopLM":
        """For lm_eval.simple_evaluate("minipop", "ckpt=FOLDER,plan=1/3"): keys ckpt, dtype, device, plan, max_seq_len, batch_size, seed.

        Raises MinipopError for other keys, and as `load_model` and `PrefillPlan` do.
        """
        from .checkpoint import resolve_checkpoint
        from .models import load_model
        from .tokenizer import load_tokenizer

        args = {**{k: v for k, v in (additional_config or {}).items() if v is not None and k in ("batch_size", "device")}, **arg_dict}
        known = ("ckpt", "dtype", "device", "plan", "max_seq_len", "batch_size", "seed")
        if unknown := [key for key in args if key not in known]:
            raise PromptError(f"minipop has no argument {unknown[0]!r} for lm-eval; it has {', '.join(known)}")
        if "ckpt" not in args:
            raise PromptError("minipop needs ckpt=FOLDER among its arguments for lm-eval")
        folder = resolve_checkpoint(args.pop("ckpt"))
        model = pack(load_model(folder, args.pop("dtype", None), args.pop("device", "cpu")))
        plan = parse_plan(str(args.pop("plan", "1/3")), model.config.num_layers)
        return cls(model, load_tokenizer(folder), plan, **args)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "MinipopLM":
        """The same from "key=value,key=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # --- text to tokens -----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        if not self.tokenizer.eos_token_ids:
            raise TokenizerError("the tokenizer names no end-of-text token, which lm-eval needs")
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What an empty context becomes: BOS, or the end-of-text token of a tokenizer without one."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The ids of plain text, BOS included where the tokenizer adds one, or of a rendered chat, which brings its own.

        In plain text, and in what a user says in a chat, the spelling of a control token stays text.
        """
        if string in self._chats:
            return self.tokenizer.encode_rendered(string)
        return self.tokenizer.encode(string, add_bos=add_special_tokens is not False)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both encoded as one text, cut where the context's own tokens end. Spaces at the context's end go to the continuation."""
        stripped = context.rstrip()
        whole = stripped + context[len(stripped):] + continuation
        if context in self._chats:
            self._chats |= {stripped, whole}
        ids = self._encode_context(stripped)
        return ids or [self.prefix_token_id], self.tok_encode(whole)[len(ids):]

    # --- chats --------------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return repr(self.tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. Without a generation prompt the last message, the assistant's, is left open to go on."""
        rendered = self.tokenizer.render_chat(chat_history, add_generation_prompt)
        if not add_generation_prompt:
            begun = chat_history[-1]["content"].strip()
            rendered = rendered[: rendered.rindex(begun) + len(begun)]
        self._chats.add(rendered)
        return rendered

    # --- likelihoods --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[tuple[object, list[int], list[int]]], disable_tqdm: bool = False,
                              **kwargs) -> list[Score]:
        """requests: (name or None, context ids, continuation ids). See `loglikelihood` of lm-eval's TemplateLM, which calls this."""
        continuations: list[list[int]] = []
        shared: dict[tuple[int, ...], list[int]] = {}  # context -> the requests that share it
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise PromptError(f"a continuation of {len(continuation)} tokens is longer than max_seq_len {self.max_length}")
            kept = (*context, *continuation)[-(self.max_length + 1):]  # the continuation's last token is asked for, not read
            shared.setdefault(kept[: len(kept) - len(continuation)], []).append(number)
            continuations.append(continuation)
        for numbers in shared.values():
            numbers.sort(key=lambda number: -len(continuations[number]))

        batches = list(self._batches(shared, continuations))
        columns = max((columns for _, columns in batches), default=1)
        runner = Runner(self.model, self.plan, columns, max((len(contexts) for contexts, _ in batches), default=1))
        scores: list[Score | None] = [None] * len(requests)
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            for contexts, _ in batches:
                for context, row in zip(contexts, score(runner, contexts, [[continuations[n] for n in shared[c]] for c in contexts])):
                    for number, value in zip(shared[context], row):
                        scores[number] = value
                        if requests[number][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[number][0], value)
                    bar.update(len(row))
        return scores

    def _batches(self, shared: dict[tuple[int, ...], list[int]], continuations: list[list[int]]) -> Iterator[tuple[list, int]]:
        """Contexts to score side by side, and the cache columns they take. Like goes with like, so that little is padded: as many passes, as
        long continuations (each pass pads them to the longest), as long contexts."""
        def shape(context: tuple[int, ...]) -> tuple[int, int, int]:
            widths = [len(continuations[number]) for number in shared[context]]
            return sum(width > 1 for width in widths), max(widths), len(context)

        batch, longest, widest = [], 0, 0
        for context in sorted(shared, key=shape, reverse=True):
            _, width, _ = shape(context)
            longer, wider = max(longest, len(context)), max(widest, width)
            if batch and (len(batch) == self.batch_size or longer + wider - 1 > self.max_length):  # padding needs room, too
                yield batch, longest + widest - 1
                batch, longer, wider = [], len(context), width
            batch, longest, widest = [*batch, context], longer, wider
        if batch:
            yield batch, longest + widest - 1  # a continuation's last token is not read

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts. lm-eval's windows, each of them in two parts (`split_window`)."""
        parts, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            for context, predicted in map(make_disjoint_window, windows):
                for part in split_window(context, predicted):
                    parts.append((None, *part))
                    owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(parts, disable_tqdm)):
            totals[number] += value
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- answers ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """An answer for each (context, options): up to the first stop string, the end of text, or the task's most tokens."""
        groups: dict[tuple[str, int], list[int]] = {}  # same options, same seed
        asked: Counter = Counter()
        for number, request in enumerate(requests):
            options = repr(request.args[1])
            groups.setdefault((options, asked[request.args[0], options]), []).append(number)
            asked[request.args[0], options] += 1  # a prompt that is asked for twice samples with another seed
        answers: list[str] = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for (_, repeat), numbers in groups.items():
                params, until = self._generation(requests[numbers[0]].args[1], self.seed + repeat)
                room = self.max_length - params.max_new_tokens
                if room < 1:
                    raise PromptError(f"answers of {params.max_new_tokens} tokens leave no room for a prompt in max_seq_len {self.max_length}")
                prompts = {n: (self.tok_encode(requests[n].args[0]) or [self.prefix_token_id])[-room:] for n in numbers}
                numbers.sort(key=lambda n: -len(prompts[n]))
                runner = Runner(self.model, self.plan, len(prompts[numbers[0]]) + params.max_new_tokens, min(self.batch_size, len(numbers)))
                for first in range(0, len(numbers), self.batch_size):
                    batch = numbers[first : first + self.batch_size]
                    for number, text in zip(batch, self._answer(runner, [prompts[n] for n in batch], params, until)):
                        answers[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return answers

    def _generation(self, options: dict, seed: int) -> tuple[SamplingParams, list[str]]:
        """A task's generation options as sampling parameters and stop strings. Raises PromptError for an option we do not have."""
        options = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        until, length, sample = options.pop("until"), options.pop("max_gen_toks"), options.pop("do_sample")
        temperature = options.pop("temperature", 0.0) * bool(sample)
        chosen = {name: options.pop(name) for name in OPTIONS if options.get(name) is not None}
        if options:
            raise PromptError(f"the task asks for generation options minipop does not have: {', '.join(options)}")
        until = [text for text in (*until, self.tokenizer.decode([self.eot_token_id], skip_special=False)) if text]
        ids = [self.tokenizer.token_to_id(text) for text in until]  # control tokens among them are met as ids, not as text
        ids = tuple(i for i in ids if i in self.tokenizer.special_ids)
        return SamplingParams(temperature=temperature, max_new_tokens=length, seed=seed, stop_token_ids=ids, **chosen), until

    def _answer(self, runner: Runner, prompts: list[list[int]], params: SamplingParams, until: list[str]) -> list[str]:
        streams, texts = [self.tokenizer.stream() for _ in prompts], ["" for _ in prompts]
        longest = max(map(len, until))

        def stopped(row: int, token_id: int, logits: Tensor) -> bool:
            piece = streams[row].push(token_id)
            texts[row] += piece
            tail = texts[row][-(longest + len(piece)):]
            return any(text in tail for text in until)

        texts_of_ids = [self.tokenizer.decode(ids) for ids in runner.generate_batch(prompts, params, stopped)]
        return [min((text.partition(stop)[0] for stop in until), key=len) for text in texts_of_ids]

    def get_model_info(self) -> dict:
        """For lm-eval's results files."""
        config = self.model.config
        return {"model_family": config.family, "model_dtype": str(self.model.embedding.weight.dtype).removeprefix("torch."),
                "prefill_plan": self.plan.describe(), "calibrated_kv": self.plan.kv, "max_length": self.max_length}


# --- how a likelihood is computed -------------------------------------------------------------------------------------


def split_window(context: list[int], predicted: list[int]) -> list[tuple[list[int], list[int]]]:
    """A window of a rolling likelihood as (context, continuation) pairs that together predict each of its tokens once.

    A prompt must come from somewhere, so the window is cut in the middle: the first half is a continuation of the window's context (one
    token, mostly), and then the prompt that the second half continues. A context of half the window or more is prompt enough.
    """
    first = (len(context) + len(predicted)) // 2 - len(context)
    if first < 1:
        return [(context, predicted)]
    return [(context, predicted[:first]), (context + predicted[:first], predicted[first:])]


def score(runner: Runner, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[list[int]]]) -> list[list[Score]]:
    """Scores of the continuations of each context; the context is prefilled once, under the runner's plan.

    contexts: B lists of ids. continuations: for each context its continuations, longest first. Needs room for the longest context with
    the longest continuation.
    """
    runner.reset()
    first = runner.prefill([list(context) for context in contexts])  # [B, vocab]: the logits of each continuation's first token
    lengths = runner.cache.lengths[: len(contexts)].clone()
    chunk = max(1, LOGITS // first.numel())
    scores: list[list[Score]] = [[] for _ in contexts]
    for turn in range(max(map(len, continuations))):  # the turn-th continuation of every context that has as many
        rows = [list(some[turn]) if turn < len(some) else [] for some in continuations]
        width = max(1, *map(len, rows))
        targets = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [B, n], padded on the right
        values, greedy = compare_with(first[:, None], targets[:, :1])
        for start in range(0, width - 1, chunk):
            logits = runner.extend(targets[:, start : min(start + chunk, width - 1)])  # the full model; [B, chunk, vocab]
            more = compare_with(logits, targets[:, start + 1 : start + 1 + logits.shape[1]])
            values, greedy = torch.cat((values, more[0]), 1), torch.cat((greedy, more[1]), 1)  # [B, up to n]
        if width > 1:
            runner.rewind(lengths)  # forget the continuations and their padding
        for row, some in enumerate(continuations):
            if turn < len(some):
                n = len(some[turn])
                scores[row].append((float(values[row, :n].sum()), bool(greedy[row, :n].all())))
    return scores


def compare_with(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, n, vocab], targets [B, n] -> log-probability of each target, and whether it is the most likely id; [B, n], on the CPU."""
    targets = targets.to(logits.device)
    chosen = logits.gather(2, targets[..., None])[..., 0] - logits.logsumexp(-1)
    return chosen.cpu(), (logits.argmax(-1) == targets).cpu()
