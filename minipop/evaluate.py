"""Benchmarks by lm-eval, with the prompt's prefill pruned (arXiv 2602.03295).

    python -m minipop.evaluate --ckpt path/to/checkpoint --tasks minipop_piqa,minipop_retrieval --limit 100 --output results
    python -m minipop.evaluate --tasks list

In every request the context is the prompt: its tokens but the last go through the pruned prefill, the last one and what follows through
the full model (lm_eval_model.py has the details). The tasks that `--tasks list` shows need no hub; most of them take their data from
the folder that scripts/fetch_eval_data.py makes. Any other task of lm-eval works by its name where its data can be downloaded.
--output gets lm-eval's own files: results_*.json, and with --log-samples a samples_*.jsonl for each task.
"""

import argparse
import contextlib
import difflib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from .cli import Parser, add_model_arguments, add_parallel_argument, add_plan_arguments, load_from, plan_from, positive, run, seed
from .errors import MinipopError
from .files import one_line
from .parallel import join
from .plan import PrefillPlan
from .tasks import DATA, FOLDER
from .tokenizer import Tokenizer


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _evaluate(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.evaluate", description=first, epilog=rest)
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="tasks, separated by commas; `list` shows those that need no hub")
    parser.add_argument("--limit", type=positive, metavar="N", help="at most the first N items of each task")
    parser.add_argument("--num-fewshot", type=_count, metavar="N", help="worked examples in the prompt (default: the task's)")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="contexts side by side (default: 8)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write lm-eval's result files there")
    parser.add_argument("--log-samples", action="store_true", help="write every item with its answer, too (needs --output)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of made tasks, examples and sampled answers (default: 0)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"what scripts/fetch_eval_data.py made (default: {DATA.name} in the repository)")
    parser.add_argument("--apply-chat-template", action="store_true", help="put prompts in the checkpoint's chat format")
    parser.add_argument("--allow-code-execution", action="store_true",
                        help="run code that the model wrote, in a process with limits (for HumanEval)")
    add_model_arguments(parser, default="none, enough for --tasks list")
    add_plan_arguments(parser)
    add_parallel_argument(parser)
    return parser


def _count(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def _evaluate(args: argparse.Namespace) -> int:
    args.team = join(args.tp, args.device)
    if args.tasks == "list":
        for name, about in local_tasks().items():
            print(f"{name:30} {about}")
        return 0
    if args.ckpt is None:
        raise MinipopError("--ckpt is missing: the checkpoint to evaluate, a folder or org/model")
    if args.log_samples and args.output is None:
        raise MinipopError("--log-samples needs --output, the folder to write the samples to")
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    _lm_eval()  # fails before the checkpoint is read
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    folder, model, tokenizer, _ = load_from(args)
    results = evaluate(model, tokenizer, plan_from(args, model.config.num_layers), names, args.limit, args.batch_size, args.num_fewshot,
                       args.seed, args.max_seq_len, args.data, apply_chat_template=args.apply_chat_template,
                       allow_code_execution=args.allow_code_execution, name=folder.name)
    _print(results)
    if args.output is not None:
        for file in write_results(results, args.output, args.log_samples):
            print(file)
    return 0


# --- the whole of it, in Python -------------------------------------------------------------------------------------------------


def evaluate(model: nn.Module, tokenizer: Tokenizer, plan: PrefillPlan | None, tasks: Sequence[str], limit: int | None = None,
             batch_size: int = 8, num_fewshot: int | None = None, seed: int = 0, max_seq_len: int | None = None,
             data: str | os.PathLike | None = None, *, apply_chat_template: bool = False, allow_code_execution: bool = False,
             name: str = "minipop") -> dict:
    """Run tasks under a plan and return lm-eval's results, with `samples`: for each task the items, in order, with their metrics.

    tasks: names; local ones (`local_tasks`) or any of lm-eval's. limit: only the first items of each task. max_seq_len: longer contexts
    lose their beginning (default: 4096, or what the model allows). data: the folder of the local tasks' data. name: for the results.
    Raises MinipopError: lm-eval is not installed, a task does not exist or cannot be loaded, or runs code without permission.
    """
    for name_, value, least in (("limit", limit, 1), ("batch_size", batch_size, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise MinipopError(f"{name_} must be {least} or more, not {value}")
    lm_eval = _lm_eval()
    from .lm_eval_model import MinipopLM

    lm = MinipopLM(model, tokenizer, plan, batch_size, max_seq_len, seed)
    with _quiet():
        loaded = load_tasks(tasks, tokenizer, seed, data)
        _refuse_code(loaded, allow_code_execution)
        with _mistakes(num_fewshot):
            return lm_eval.simple_evaluate(
                model=lm, model_args={"pretrained": name, "plan": lm.plan.describe()}, tasks=loaded, task_manager=_manager(local=True),
                limit=limit, batch_size=batch_size, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template,
                confirm_run_unsafe_code=allow_code_execution, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
                fewshot_random_seed=seed)


def local_tasks() -> dict[str, str]:
    """The tasks that need no hub: name -> what it is."""
    with _quiet():
        index = _manager(local=True).task_index
    return {name: entry.cfg.get("metadata", {}).get("about", "") for name, entry in sorted(index.items())}


def load_tasks(names: Sequence[str], tokenizer: Tokenizer | None = None, seed: int = 0, data: str | os.PathLike | None = None) -> list:
    """lm-eval's Task and Group objects. Names it does not know, and data it cannot get, are MinipopErrors of one line."""
    if not names:
        raise MinipopError("no tasks given; --tasks list shows those that need no hub")
    local = _manager(local=True, minipop_tokenizer=tokenizer, minipop_seed=seed, minipop_data=None if data is None else os.fspath(data))
    loaded = []
    for name in dict.fromkeys(names):
        manager = local if name in local.task_index else _manager(local=False)
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, [*local.task_index, *manager.task_index], 3)
            raise MinipopError(f"there is no task {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "; --tasks list shows some"))
        try:
            found = manager.load([name])
        except MinipopError:
            raise
        except Exception as problem:  # whatever a data set's loader can raise: no network, no such file, a script that is refused
            raise MinipopError(f"lm-eval cannot load the task {name}: {one_line(problem)}") from None
        for task in found["tasks"].values():
            if isinstance(task.config.metadata, dict):
                task.config.metadata.pop("minipop_tokenizer", None)  # what is left goes into the results
        group = found["groups"].get(name)
        loaded += [group] if group is not None else found["tasks"].values()
    return loaded


def write_results(results: dict, folder: Path, with_samples: bool = False) -> list[Path]:
    """lm-eval's own files, FOLDER/<checkpoint>/results_*.json and samples_*.jsonl; each appears whole. Returns their paths."""
    from lm_eval.loggers import EvaluationTracker

    results = dict(results)
    samples = results.pop("samples")
    written = []
    with tempfile.TemporaryDirectory(prefix=".minipop-", dir=folder) as temporary, _quiet():
        tracker = EvaluationTracker(output_path=temporary)
        tracker.general_config_tracker.log_experiment_args("minipop", results["config"]["model_args"], None, results.get("chat_template"),
                                                           True)
        tracker.save_results_aggregated(results, samples)
        for name in results["configs"] if with_samples else ():
            tracker.save_results_samples(name, samples[name])
        made = sorted(file for file in Path(temporary).rglob("*") if file.is_file())
        if len(made) != 1 + with_samples * len(results["configs"]):  # lm-eval only logs what went wrong
            raise MinipopError(f"{folder}: lm-eval could not write its result files; is the disk full?")
        for file in made:
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)
            written.append(target)
    return written


# --- lm-eval, handled ------------------------------------------------------------------------------------------------------------


def _lm_eval():
    """The package; MinipopError if it is not installed."""
    try:
        import lm_eval
    except ImportError:
        raise MinipopError("this command needs lm-eval: install the eval extra, pip install -e '.[eval]' in the repository") from None
    _remember_environment()
    return lm_eval


def _remember_environment() -> None:
    """lm-eval puts torch's description of the machine into every result. It takes seconds to make and stays the same: made once."""
    from torch.utils import collect_env

    if not hasattr(collect_env.get_pretty_env_info, "cache_info"):
        collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)


def _manager(local: bool, **metadata):
    """lm-eval's index of tasks: ours, or (which takes seconds) its own thousands. metadata: what our tasks' loaders are called with."""
    _lm_eval()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata) if local else _default_manager()


@functools.cache
def _default_manager():
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _refuse_code(loaded: list, allowed: bool) -> None:
    for item in loaded:
        for task in item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item]:
            if getattr(task, "UNSAFE_CODE", False) and not allowed:
                raise MinipopError(f"{task.config.task} runs code that the model writes: add --allow-code-execution "
                                   "(allow_code_execution=True) if this machine may do that; see docs/EVALUATE.md")


@contextlib.contextmanager
def _mistakes(num_fewshot: int | None) -> Iterator[None]:
    """What lm-eval raises where a task has too few examples, in one line; whatever else it raises is no mistake of the user's."""
    try:
        yield
    except (AssertionError, ValueError) as problem:
        if not num_fewshot or not any(word in str(problem) for word in ("fewshot", "population")):  # its own words, random.sample's
            raise
        raise MinipopError(f"--num-fewshot {num_fewshot} is more than a task has examples for: {one_line(problem)}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's warnings are about its own command line; errors still show."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(results: dict) -> None:
    from lm_eval.utils import make_table

    print(f"prefill: {results['config']['prefill_plan']}\n")
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


if __name__ == "__main__":
    import sys

    sys.exit(main())
