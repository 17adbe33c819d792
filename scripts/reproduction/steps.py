"""What scripts/reproduce.py measures: a list of steps, each of which writes one JSON file and is skipped when that is there.

A step belongs to one checkpoint and to the settings it was made with: other settings make it anew.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from minipop import MinipopError, ModelInputs, PrefillPlan, Runner, load_model, load_processor, load_tokenizer
from minipop import costs
from minipop.baselines import save_pruned, shortgpt, slicegpt, wanda
from minipop.bench import Prompt, image_prompt, processor_name, take_turns, text_prompt
from minipop.calibrate import calibrate_cuts, continuation_loss
from minipop.config import read_config
from minipop.drift import measure_drift
from minipop.evaluate import evaluate
from minipop.files import write_text
from minipop.importance import STAGES, Importance, Sample, gate_gradients, rank_correlation, removal_losses, rollouts
from minipop.packing import has_kernels, pack
from minipop.plan import ablations, ratio_sweep
from minipop.prompts import measuring_prompts
from minipop.texts import read_text, text_sequences

ROOT = Path(__file__).resolve().parents[2]
CHOICE_TASKS = ("minipop_piqa", "minipop_hellaswag", "minipop_openbookqa", "minipop_boolq", "minipop_commonsenseqa")
READING_TASKS = ("minipop_retrieval", "minipop_continuation")
GENERATION_TASKS = ("minipop_gsm8k", "minipop_humaneval")
METRICS = {"minipop_piqa": "acc_norm", "minipop_hellaswag": "acc_norm", "minipop_openbookqa": "acc_norm", "minipop_boolq": "acc",
           "minipop_commonsenseqa": "acc", "minipop_retrieval": "acc", "minipop_continuation": "nll", "minipop_gsm8k": "exact_match",
           "minipop_humaneval": "pass@1"}
LENGTHS = (32, 128, 512, 2048)
SWEEP_TOKENS = 1024
PICTURES = ("256x256",)  # pixels, with 32 tokens of text


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Every method answers the same items."""

    choice_items: int = 48  # of each task with choices
    reading_items: int = 40  # of retrieval and continuation
    ablation_items: int = 12  # of the same, in the ablation and the ratio sweep
    generation_items: int = 4  # of GSM8K and HumanEval
    importance: int = 64  # samples
    validation: int = 16  # of them with every layer really removed
    calibration: int = 240  # sequences of 512 tokens, or questions about pictures
    fresh: int = 40  # sequences of 448 tokens that the calibration is measured on
    baseline: int = 32  # sequences of 512 tokens
    drift: int = 8  # prompts of 256 tokens
    repeats: int = 5  # turns of each timing
    longest: int = 2048  # tokens of the prompts that are timed
    questions: int = 300  # of the tiny VLM's held-out ones
    # Of calibration, tasks and timings. Importance, drift, and the losses that a calibration is judged by are taken in float32.
    dtype: str = "bfloat16" if has_kernels(torch.bfloat16) else "float32"


USES = {"importance": ("importance", "validation"), "calibration": ("calibration", "fresh", "dtype"), "baselines": ("baseline",),
        "quality": ("choice_items", "reading_items", "dtype"), "generation": ("generation_items", "dtype"),
        "ablation": ("ablation_items", "dtype"), "sweep": ("ablation_items", "dtype"), "drift": ("drift",), "speed": ("repeats", "longest", "dtype"),
        "pictures": ("questions", "calibration", "baseline")}  # which sizes a step depends on, by the first word of its name


QUICK = Sizes(choice_items=4, reading_items=3, ablation_items=1, generation_items=1, importance=2, validation=1, calibration=4, fresh=2,
              baseline=2, drift=1, repeats=1, longest=512, questions=12)


@dataclass
class Study:
    """One checkpoint: where it is, where its results go, and what is loaded of it."""

    folder: Path
    results: Path
    data: Path
    sizes: Sizes
    seed: int = 0

    def __post_init__(self):
        self.config = read_config(self.folder)
        self.depth = self.config.num_layers
        self.pop = PrefillPlan.deepest(self.depth)
        self.vision = self.config.vision is not None
        self._loaded: dict = {}

    def claim(self) -> None:
        """Make the folder of results this checkpoint's. Raises MinipopError if it is another's of the same name."""
        self.results.mkdir(parents=True, exist_ok=True)
        mark = self.results / "checkpoint.txt"
        made_from = f"{sha256((self.folder / 'config.json').read_bytes()).hexdigest()[:16]} " + " ".join(
            f"{file.name}:{file.stat().st_size}" for file in sorted(self.folder.glob("*.safetensors")))
        if mark.is_file() and mark.read_text() != made_from:
            raise MinipopError(f"{self.results} holds results of another checkpoint of that name: choose --results")
        write_text(mark, made_from)

    @property
    def kv_file(self) -> Path:
        return self.results / "kv-third.safetensors"

    @property
    def kv_half_file(self) -> Path:
        return self.results / "kv-half.safetensors"

    def model(self, folder: Path | None = None, dtype: str = "float32", packed: bool = False):
        """A model, kept until another is asked for."""
        key = (folder or self.folder, dtype, packed)
        if key not in self._loaded:
            self._loaded.clear()
            model = load_model(*key[:2])
            self._loaded[key] = pack(model) if packed else model
        return self._loaded[key]

    def tokenizer(self):
        return load_tokenizer(self.folder)

    def texts(self, kind: str) -> list[str]:
        """The files of DATA/calibration or DATA/continuation."""
        return [read_text(file) for file in sorted((self.data / kind).glob("*.txt"))]

    def methods(self) -> dict[str, tuple[Path, PrefillPlan]]:
        """name -> checkpoint and plan, of those that were made."""
        found = {"full": (self.folder, PrefillPlan.full(self.depth)), "POP": (self.folder, self.pop)}
        if self.kv_file.exists():
            found["POP calibrated"] = (self.folder, PrefillPlan.deepest(self.depth, kv=self.kv_file))
        for name in ("Wanda", "SliceGPT", "ShortGPT"):
            folder = self.results / name.lower()
            if (folder / "config.json").exists():
                found[name] = (folder, PrefillPlan.full(read_config(folder).num_layers))
        return found

    def method(self, name: str) -> tuple[Path, PrefillPlan]:
        methods = self.methods()
        if name not in methods:
            needed = "calibration" if name == "POP calibrated" else "baselines"
            raise MinipopError(f"{self.results} lacks what {name} is measured with: run the step {needed!r} first (--only {needed})")
        return methods[name]


# --- the steps ------------------------------------------------------------------------------------------------------------------


def importance(study: Study) -> dict:
    """Figure 1: the Fisher information of each layer's gates, and how well it ranks layers by what their removal does."""
    model, tokenizer = study.model(), study.tokenizer()
    processor = load_processor(study.folder) if study.vision else None
    prompts = measuring_prompts(None, tokenizer, study.vision)
    count, tokens = study.sizes.importance, 32
    partial = study.results / "importance.partial.json"
    settings = [count, study.sizes.validation, study.seed]
    kept = json.loads(partial.read_text()) if partial.exists() else {}
    records = kept["records"] if kept.get("settings") == settings else []
    todo = (prompts[i % len(prompts)].inputs(tokenizer, processor) for i in range(len(records), count))
    for inputs, response in rollouts(model, todo, tokens, study.seed, len(records)):
        removal = None
        if len(records) < study.sizes.validation:
            removal = torch.stack([removal_losses(Sample(model, inputs, response), stage=stage) for stage in STAGES]).tolist()
        records.append([gate_gradients(model, inputs, response).double().square().tolist(), removal])
        write_text(partial, json.dumps({"settings": settings, "records": records}))
    measured = Importance.of(torch.tensor([squares for squares, _ in records], dtype=torch.float64))
    removal = torch.tensor([row for _, row in records if row is not None], dtype=torch.float64).mean(0)  # [2, L]
    partial.unlink()
    return {"prefill": measured.prefill.tolist(), "decode": measured.decode.tolist(), "prefill_stderr": measured.prefill_error.tolist(),
            "decode_stderr": measured.decode_error.tolist(), "samples": count, "response_tokens": tokens,
            "validation": {"samples": study.sizes.validation, "removal": removal.tolist(),
                           "rank_correlation": [rank_correlation(a, b) for a, b in zip((measured.prefill, measured.decode), removal)]}}


def calibration(study: Study) -> dict:
    """The calibrated K/V at one third and one half, and what they close of the gap on text they have not seen."""
    # Predictions over a quarter of a million ids cost more than all the rest: such a model gets half the samples, half as many predictions in each.
    share = 2 if study.config.vocab_size > 100_000 else 1
    samples = tiny_vl_samples(study) if study.vision else text_samples(study, "calibration", study.sizes.calibration // share, 384 + 128 // share)
    fresh = tiny_vl_samples(study, heldout=True) if study.vision else text_samples(study, "continuation", study.sizes.fresh, 448)
    plans = [PrefillPlan.deepest(study.depth, ratio) for ratio in (1 / 3, 1 / 2)]
    calibrations = calibrate_cuts(study.model(dtype=study.sizes.dtype), samples, [plan.cut for plan in plans])
    model = study.model()
    full = continuation_loss(model, PrefillPlan.full(study.depth), fresh)
    found = {"samples": len(samples), "tokens": sum(len(prompt) for prompt, _ in samples), "dtype": study.sizes.dtype, "fresh": len(fresh), "full": full.tolist(),
             "cuts": []}
    for plan, made, file in zip(plans, calibrations, (study.kv_file, study.kv_half_file)):
        made.projection.notes = {"checkpoint": study.folder.name}
        made.projection.save(file)
        found["cuts"].append({"skipped": len(plan.skip), "error": made.error.tolist(), "penalty": made.penalty.tolist(),
                              "divergences": made.divergences,
                              "pop": continuation_loss(model, plan, fresh).tolist(),
                              "calibrated": continuation_loss(model, PrefillPlan(study.depth, plan.skip, kv=file), fresh).tolist()})
    return found


def baselines(study: Study) -> dict:
    """Wanda 30%, SliceGPT 25%, ShortGPT 25%, calibrated with the same text, saved as checkpoints."""
    model = study.model()
    if study.vision:
        sequences = [ModelInputs(torch.tensor([*prompt.token_ids.tolist(), *answer]), prompt.pixel_values, prompt.image_grid_thw)
                     for prompt, answer in tiny_vl_samples(study)]
    else:
        sequences = text_sequences(study.tokenizer(), study.texts("calibration"), study.sizes.baseline, 512, study.seed)
    short, removed = shortgpt(model, sequences, 0.25)
    made = {"ShortGPT": short, "Wanda": wanda(model, sequences, 0.3)}
    if not study.vision and not study.config.family.startswith("gemma"):
        made["SliceGPT"] = slicegpt(model, sequences, 0.25)
    for name, pruned in made.items():
        folder = study.results / name.lower()
        shutil.rmtree(folder, ignore_errors=True)  # of other sizes
        save_pruned(pruned.bfloat16(), study.folder, folder)
    return {"removed": list(removed), "sequences": len(sequences), "methods": list(made)}


def quality(study: Study, method: str) -> dict:
    """Table 1: the likelihood tasks, the retrieval and the continuation."""
    folder, plan = study.method(method)
    return {**scores(study, folder, plan, CHOICE_TASKS, study.sizes.choice_items),
            **scores(study, folder, plan, READING_TASKS, study.sizes.reading_items)}


def generation(study: Study, method: str) -> dict:
    """Table 1's GSM8K and HumanEval, few items: a model this small is near the floor."""
    folder, plan = study.method(method)
    return scores(study, folder, plan, GENERATION_TASKS, study.sizes.generation_items)


def ablation(study: Study) -> dict:
    """Table 3: what each choice of the design is worth."""
    return {name: scores(study, study.folder, plan, READING_TASKS, study.sizes.ablation_items) for name, plan in ablations(study.depth).items()}


def sweep(study: Study) -> dict:
    """Table 4 and Figure 2: from nothing to 60% of the layers, and the calibrated forms."""
    return {name: {"skipped": len(plan.skip), **scores(study, study.folder, plan, READING_TASKS, study.sizes.ablation_items)}
            for name, plan in sweep_plans(study).items()}


def drift(study: Study) -> dict:
    """How far the pruned prefill's streams, values and attention outputs lie from the full one's."""
    model = study.model()
    prompts = text_sequences(study.tokenizer(), study.texts("continuation"), study.sizes.drift, 256, study.seed)
    plans = {name: study.method(name)[1] for name in ("POP", "POP calibrated")}
    return {name: {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in vars(measure_drift(model, plan, prompts)).items()}
            for name, plan in plans.items()}


def speed(study: Study) -> dict:
    """Table 2: time to first token of each method, all in turn; and of each plan of the sweep."""
    dtype, plain = study.sizes.dtype, study.model(dtype=study.sizes.dtype, packed=True)
    loaded = {name: (plain if folder == study.folder else pack(load_model(folder, dtype)), plan)
              for name, (folder, plan) in study.methods().items()}
    if study.vision:
        pixels = load_processor(study.folder).image_processor
        prompts = [image_prompt(plain, pixels, size, 1) for size in PICTURES]
    else:
        prompts = [text_prompt(plain, n, 1) for n in LENGTHS if n <= min(study.sizes.longest, study.config.max_position_embeddings)]
    swept, plans = prompts[-1] if study.vision else text_prompt(plain, min(SWEEP_TOKENS, study.sizes.longest), 1), sweep_plans(study)
    times = prefill_times({name: (plain, plan) for name, plan in plans.items()}, swept, study.sizes.repeats)
    return {"dtype": dtype, "threads": torch.get_num_threads(), "torch": torch.__version__, "processor": processor_name(torch.device("cpu")),
            "prompts": {prompt.label: {"seconds": prefill_times(loaded, prompt, study.sizes.repeats), "ideal": ideal(study, prompt, study.pop)}
                        for prompt in prompts},
            "swept": swept.label, "sweep": {name: {"seconds": times[name], "ideal": ideal(study, swept, plan)} for name, plan in plans.items()}}


def pictures(study: Study) -> dict:
    """Tables 1, 3 and 4 for the tiny VLM: its held-out questions under full prefill, POP, calibrated POP, the ablations and the ratios."""
    from eval_tiny_vl import answers, questions

    processor, asked = load_processor(study.folder), questions(study.sizes.questions)

    def ask(folder: Path, plan: PrefillPlan) -> dict:
        right = [said == answer for (_, _, _, answer), said in zip(asked, answers(study.model(folder), processor, plan, asked))]
        return {"skipped": len(plan.skip), "right": {kind: [float(ok) for ok, item in zip(right, asked) if item[0] == kind]
                                                     for kind in dict.fromkeys(item[0] for item in asked)}}

    found, seen = {}, set()
    for name, plan in {**ablations(study.depth), **sweep_plans(study)}.items():
        if plan not in seen:  # several ratios of few layers are the same plan
            seen.add(plan)
            found[name] = ask(study.folder, plan)
    return found | {name: ask(*study.method(name)) for name in ("Wanda", "ShortGPT")}


@dataclass(frozen=True)
class Step:
    """needs: names of the steps of the same checkpoint whose files it uses. alone: nothing else may run beside it, it takes times."""

    name: str
    work: Callable[[], dict]
    needs: tuple[str, ...] = ()
    alone: bool = False


def steps(study: Study) -> list[Step]:
    """All of a checkpoint, in an order that has what each needs before it."""
    made = [Step("calibration", lambda: calibration(study)), Step("baselines", lambda: baselines(study)), Step("importance", lambda: importance(study))]
    if study.vision:
        made.append(Step("pictures", lambda: pictures(study), ("calibration", "baselines")))
    else:
        for method in ("full", "POP", "POP calibrated", "Wanda", "SliceGPT", "ShortGPT"):
            if method != "SliceGPT" or not study.config.family.startswith("gemma"):
                needs = {"full": (), "POP": (), "POP calibrated": ("calibration",)}.get(method, ("baselines",))
                made.append(Step(f"quality {method}", lambda method=method: quality(study, method), needs))
        made += [Step("ablation", lambda: ablation(study)), Step("sweep", lambda: sweep(study), ("calibration",)),
                 Step("drift", lambda: drift(study), ("calibration",))]
        made += [Step(f"generation {method}", lambda method=method: generation(study, method)) for method in ("full", "POP")]
    return [*made, Step("speed", lambda: speed(study), ("calibration", "baselines"), alone=True)]


# --- what they share ------------------------------------------------------------------------------------------------------------


def scores(study: Study, folder: Path, plan: PrefillPlan, tasks: tuple[str, ...], items: int) -> dict:
    """task -> the metric of each item, in order: the same items for every method, so differences can be paired."""
    model = study.model(folder, study.sizes.dtype, packed=True)
    results = evaluate(model, study.tokenizer(), plan, tasks, limit=items, seed=study.seed, data=study.data, allow_code_execution=True)
    found = {}
    for task in tasks:
        rows = [row for row in results["samples"][task] if METRICS[task] in row]
        chosen = [row for row in rows if row.get("filter") == "flexible-extract"] or rows  # GSM8K has two filters
        found[task] = [float(row[METRICS[task]]) for row in sorted(chosen, key=lambda row: row["doc_id"])]
    return found


def prefill_times(contenders: dict, prompt: Prompt, repeats: int) -> dict[str, list[float]]:
    """name -> seconds to the first token of a prompt, a number a turn. contenders: name -> (model, plan)."""
    work = {}
    for name, (model, plan) in contenders.items():
        runner = Runner(model, plan, max_seq_len=prompt.lengths[0])
        work[name] = (runner.reset, lambda runner=runner: runner.prefill(prompt.inputs))
    timings = take_turns(work, repeats * (4 if prompt.lengths[0] < 512 else 1), 1, torch.device("cpu"))
    return {timing.name: timing.seconds for timing in timings}


def ideal(study: Study, prompt: Prompt, plan: PrefillPlan) -> float:
    """The speed-up over full if time were proportional to operations, those of the vision tower included."""
    seen = costs.vision_flops(study.config.vision, *prompt.image) if prompt.image else 0
    whole, pruned = (seen + costs.prefill_flops(study.config, prompt.lengths[0], p) for p in (PrefillPlan.full(study.depth), plan))
    return whole / pruned


def sweep_plans(study: Study) -> dict[str, PrefillPlan]:
    plans = {f"{ratio:.0%}": plan for ratio, plan in ratio_sweep(study.depth).items()}
    if study.kv_file.exists():
        plans |= {"33%": study.pop, "33% calibrated": PrefillPlan.deepest(study.depth, kv=study.kv_file),
                  "50% calibrated": PrefillPlan.deepest(study.depth, 1 / 2, kv=study.kv_half_file)}
    return plans


def text_samples(study: Study, kind: str, count: int, length: int = 512) -> list[tuple[list[int], list[int]]]:
    """Prompts of 384 tokens and what follows them, `length` together."""
    pieces = text_sequences(study.tokenizer(), study.texts(kind), count, length, study.seed)
    return [(piece[:384], piece[384:]) for piece in pieces]


def tiny_vl_samples(study: Study, heldout: bool = False) -> list[tuple[ModelInputs, list[int]]]:
    """Questions about pictures with their answers: of the training set's kind to calibrate with, held-out ones to measure on."""
    from tiny_vl.scenes import ask, heldout_questions, make_scene, render

    processor, rng = load_processor(study.folder), random.Random(study.seed)
    count, made = study.sizes.calibration // (4 if heldout else 1), []
    if heldout:
        asked = heldout_questions(count, study.seed + 1, ("colour", "count", "relation", "read"))
        pairs = [(picture, question, answer) for _, picture, question, answer in asked]
    else:
        pairs = []
        while len(pairs) < count:
            scene = make_scene(rng, text=rng.random() < 0.3)
            question = ask(rng, scene)
            if question is not None:
                pairs.append((render(scene), question.question, question.answer))
    for picture, question, answer in pairs:
        inputs = processor([{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}])
        made.append((inputs, processor.tokenizer.encode(answer, add_bos=False) + [study.config.eos_token_ids[0]]))
    return made
