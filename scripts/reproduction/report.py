"""docs/RESULTS.md and its figures, from the JSON files that the steps left."""

import math
import statistics
from pathlib import Path

from minipop.errors import CheckpointError
from minipop.figures import load_pyplot, save_figure
from minipop.files import read_json

from . import paper

SHORT = {"minipop_piqa": "PIQA", "minipop_hellaswag": "HellaSwag", "minipop_openbookqa": "OpenBookQA", "minipop_boolq": "BoolQ",
         "minipop_commonsenseqa": "CSQA", "minipop_retrieval": "retrieval", "minipop_continuation": "NLL", "minipop_gsm8k": "GSM8K",
         "minipop_humaneval": "HumanEval"}
CHANCE = {"minipop_piqa": 0.5, "minipop_hellaswag": 0.25, "minipop_openbookqa": 0.25, "minipop_boolq": 0.5, "minipop_commonsenseqa": 0.2,
          "minipop_retrieval": 0.25}
METHODS = ("full", "POP", "POP calibrated", "Wanda", "SliceGPT", "ShortGPT")
PLANS = ("full", "POP", "first third", "every third layer", "no K/V", "no boundary")


# --- numbers --------------------------------------------------------------------------------------------------------------------


def mean_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def difference(values: list[float], full: list[float]) -> tuple[float, float]:
    """Mean of the paired differences and its standard error."""
    return mean_error([a - b for a, b in zip(values, full, strict=True)])


def show(task: str, values: list[float], full: list[float] | None = None) -> str:
    """A cell: accuracy in percent or NLL, and behind it the difference to full with its standard error."""
    scale, digits = (1, 3) if task == "minipop_continuation" else (100, 1)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    if full is not None:
        change, error = difference(values, full)
        text += f" ({signed(scale * change, scale * error, digits)})"
    return text


def signed(change: float, error: float, digits: int = 3) -> str:
    """A difference and its standard error, which a single item does not have."""
    return f"{change:+.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def speedups(seconds: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Median, lowest and highest of full/name within a turn."""
    ratios = sorted(a / b for a, b in zip(seconds["full"], seconds[name]))
    return statistics.median(ratios), ratios[0], ratios[-1]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def result_of(file: Path) -> dict:
    found = read_json(file, CheckpointError).get("result")
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds no result of a step; remove it")
    return found


# --- the page -------------------------------------------------------------------------------------------------------------------


class Report:
    """One checkpoint's results, as sections of the page."""

    def __init__(self, name: str, folder: Path, docs: Path):
        self.name, self.folder, self.docs = name, folder, docs
        self.found = {file.stem: result_of(file) for file in folder.glob("*.json") if "partial" not in file.name}
        self.slug = name.replace(".", "-")

    def sections(self) -> str:
        parts = [self.quality(), self.generation(), self.speed(), self.calibration(), self.pictures(), self.ablation(), self.sweep(),
                 self.importance(), self.drift(), self.baselines()]
        return "\n".join(part for part in parts if part)

    def quality(self) -> str:
        measured = {method: self.found[f"quality {method}"] for method in METHODS if f"quality {method}" in self.found}
        if "full" not in measured:
            return ""
        full, rows = measured["full"], []
        accuracy = [task for task in full if task in CHANCE and statistics.fmean(full[task]) > CHANCE[task]]
        left_out = [SHORT[task] for task in full if task in CHANCE and task not in accuracy]
        for method, found in measured.items():
            paired = None if method == "full" else full
            cells = [show(task, found[task], paired and paired[task]) for task in full]
            kept = sum(statistics.fmean(found[task]) for task in accuracy) / sum(statistics.fmean(full[task]) for task in accuracy)
            speed = self.found.get("speed")
            fast = f"{speedups(speed['prompts']['512']['seconds'], method)[0]:.2f}x" if speed and "512" in speed["prompts"] else ""
            rows.append([method, *cells, f"{kept:.1%}", fast])
        counts = ", ".join(f"{SHORT[task]} {len(full[task])}" for task in full)
        return (f"### Quality and prefill speed\n\n{table(['method', *map(SHORT.get, full), 'retained', 'prefill, 512 tokens'], rows)}\n"
                f"Accuracy in percent (normalised by length for PIQA, HellaSwag and OpenBookQA), NLL in nats a token of the 64 tokens after "
                f"384-token prompts; in brackets the paired difference to full with its standard error. Items: {counts}. Retained: the average "
                "accuracy over full's" + (f", without {' and '.join(left_out)}, where full is not above chance" if left_out else "")
                + ". Prefill: time of full over that of the method, median of the turns.\n")

    def generation(self) -> str:
        measured = {method: self.found[f"generation {method}"] for method in METHODS if f"generation {method}" in self.found}
        if not measured:
            return ""
        first = next(iter(measured.values()))
        rows = [[method, *(f"{sum(found[task]):.0f} of {len(found[task])}" for task in found)] for method, found in measured.items()]
        return f"### Generation\n\n{table(['method', *map(SHORT.get, first)], rows)}\nA model of this size is near the floor here, so there are few items.\n"

    def speed(self) -> str:
        if "speed" not in self.found:
            return ""
        measured, rows = self.found["speed"], []
        found = measured["prompts"]
        for method in next(iter(found.values()))["seconds"]:
            cells = ["{:.2f}x ({:.2f}-{:.2f})".format(*speedups(found[n]["seconds"], method)) for n in found]
            rows.append([method, *cells])
        rows.append(["ideal for POP, by operations", *(f"{found[n]['ideal']:.2f}x" for n in found)])
        for model, values in paper.SPEEDUP.items() if set(found) <= set(map(str, paper.LENGTHS)) else ():
            known = dict(zip(map(str, paper.LENGTHS), values))
            rows.append([f"paper, POP, {model}, A100", *(f"{known[n]:.2f}x" if n in known else "" for n in found)])
        heads = [f"{label} tokens" if label.isdigit() else f"picture of {label}" for label in found]
        return (f"### Time to first token\n\n{table(['method', *heads], rows)}\nFull's time over the method's, median (lowest-highest) of the turns; "
                f"{measured['dtype']}, batch 1, {measured['threads']} thread(s), {measured['processor']}, PyTorch {measured['torch']}."
                + (" Wanda's zeros save nothing in dense kernels." if "Wanda" in next(iter(found.values()))["seconds"] else "") + "\n")

    def calibration(self) -> str:
        if "calibration" not in self.found:
            return ""
        found, rows = self.found["calibration"], []
        full = found["full"]
        for cut in found["cuts"]:
            gap, left = difference(cut["pop"], full), difference(cut["calibrated"], full)
            rows.append([cut["skipped"], f"{statistics.fmean(full):.3f}", f"{statistics.fmean(cut['pop']):.3f} ({signed(*gap)})",
                         f"{statistics.fmean(cut['calibrated']):.3f} ({signed(*left)})", f"{1 - left[0] / gap[0]:.0%}" if gap[0] > 0 else "-"])
        what = (f"the answers to {found['fresh']} held-out questions about pictures" if "pictures" in self.found else
                f"what follows {found['fresh']} prompts of text from a corpus that was not calibrated on")
        return (f"### Calibrated K/V\n\n{table(['layers skipped', 'full', 'POP', 'calibrated', 'share of the gap closed'], rows)}\nLoss of {what}, nats a "
                f"token, float32; in brackets the paired difference to full. Calibrated with {found['samples']} samples, {found['tokens']:,} prompt tokens.\n")

    def pictures(self) -> str:
        if "pictures" not in self.found:
            return ""
        found = self.found["pictures"]
        full, timed = found["full"]["right"], self.found.get("speed", {}).get("sweep", {})
        rows = []
        for name, one in found.items():
            right = [x for kind in full for x in one["right"][kind]]
            paired = None if name == "full" else full
            cells = [show("", one["right"][kind], paired and paired[kind]) for kind in full]
            cells.append(show("", right, paired and [x for kind in full for x in full[kind]]))
            same = {"POP": "33%"}.get(name, name)
            rows.append([name, one["skipped"], *cells, f"{timed[same]['ideal']:.2f}x" if same in timed else ""])
        counts = ", ".join(f"{kind} {len(full[kind])}" for kind in full)
        return (f"### Questions about pictures\n\n{table(['prefill', 'layers skipped', *full, 'all', 'ideal speed-up'], rows)}\nPercent answered exactly, greedy, "
                f"float32; in brackets the paired difference to full with its standard error. Items: {counts}. Ratios that skip as many layers as another line are left out.\n")

    def ablation(self) -> str:
        if "ablation" not in self.found:
            return ""
        found, rows = self.found["ablation"], []
        for name in PLANS:
            full = None if name == "full" else found["full"]
            rows.append([name, *(show(task, found[name][task], full and full[task]) for task in found[name]), *(f"{x:.2f}" for x in paper.ABLATION[name])])
        head = ["prefill", *map(SHORT.get, found["full"]), "paper: GSM8K", "paper: HotpotQA"]
        return (f"### What each choice of the design is worth\n\n{table(head, rows)}\n{len(next(iter(found['full'].values())))} items a task; the paper's numbers are "
                "Qwen3-VL-8B's.\n")

    def sweep(self) -> str:
        if "sweep" not in self.found or "speed" not in self.found:
            return ""
        found, rows, timed = self.found["sweep"], [], self.found["speed"]["sweep"]
        full, seconds = found["0%"], {"full": timed["0%"]["seconds"], **{name: one["seconds"] for name, one in timed.items()}}
        for name, one in sorted(found.items(), key=lambda item: (item[1]["skipped"], "calibrated" in item[0])):
            tasks = [task for task in one if task in SHORT]
            cells = [show(task, one[task], None if name == "0%" else full[task]) for task in tasks]
            known = paper.RATIOS.get(round(float(name.rstrip("%")) / 100, 2)) if name.rstrip("%").isdigit() else None
            cells += [f"{speedups(seconds, name)[0]:.2f}x", f"{timed[name]['ideal']:.2f}x"]
            cells += [f"{known[0]:.2f}x", f"{known[1]:.2f}", f"{known[2]:.2f}"] if known else ["", "", ""]
            rows.append([f"{name} ({one['skipped']})", *cells])
        self.draw_sweep(found, seconds, {name: one["ideal"] for name, one in timed.items()})
        head = ["skipped", *map(SHORT.get, tasks), f"speed-up, {int(self.found['speed']['swept']):,} tokens", "ideal", "paper: speed-up", "paper: GSM8K", "paper: HotpotQA"]
        return f"### How much can be skipped\n\n{table(head, rows)}\n![Quality and speed against the share of layers skipped]({self.slug}-ratio.png)\n"

    def draw_sweep(self, found: dict, seconds: dict, ideal: dict) -> None:
        plain = {name: one for name, one in found.items() if name.rstrip("%").isdigit()}
        order = sorted(plain, key=lambda name: plain[name]["skipped"])
        pyplot = load_pyplot()
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
        skipped = [plain[name]["skipped"] for name in order]
        nll = [mean_error(plain[name]["minipop_continuation"]) for name in order]
        left.errorbar(skipped, [m for m, _ in nll], [e for _, e in nll], marker="o", capsize=2, label="POP")
        better = [(one["skipped"], mean_error(one["minipop_continuation"])[0]) for name, one in found.items() if name.endswith("calibrated")]
        left.plot([x for x, _ in better], [y for _, y in better], marker="s", linestyle="", label="POP calibrated")
        left.set(xlabel="layers skipped in prefill", ylabel="NLL of the continuation, nats a token")
        left.legend()
        right.plot(skipped, [speedups(seconds, name)[0] for name in order], marker="o", label="measured")
        right.plot(skipped, [ideal[name] for name in order], linestyle="--", label="ideal, by operations")
        right.set(xlabel="layers skipped in prefill", ylabel="prefill speed-up, 1,024 tokens")
        right.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.locator_params("x", integer=True)
        figure.tight_layout()
        save_figure(figure, self.docs.parent / f"{self.slug}-ratio.png")

    def importance(self) -> str:
        if "importance" not in self.found:
            return ""
        found = self.found["importance"]
        depth, third = len(found["prefill"]), len(found["prefill"]) // 3
        share = {stage: sum(found[stage][-third:]) / sum(found[stage]) for stage in ("prefill", "decode")}
        self.draw_importance(found)
        check = found["validation"]
        return (f"### Importance of the layers by stage\n\n![Importance of each layer in prefill and decode]({self.slug}-importance.png)\n\n"
                f"Fisher information of each layer's gate, {found['samples']} samples of {found['response_tokens']} tokens. The deepest {third} of {depth} "
                f"layers hold {share['prefill']:.1%} of all prefill importance and {share['decode']:.1%} of all decode importance. Removing each layer in "
                f"one stage only ({check['samples']} samples) ranks the layers like the importance does with a Spearman correlation of "
                f"{check['rank_correlation'][0]:.2f} in prefill and {check['rank_correlation'][1]:.2f} in decode.\n")

    def draw_importance(self, found: dict) -> None:
        pyplot = load_pyplot()
        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for stage in ("prefill", "decode"):
            layers = [i for i, value in enumerate(found[stage]) if value > 0]  # the last one's prefill is exactly 0: off a log scale
            axes.errorbar(layers, [found[stage][i] for i in layers], [found[f"{stage}_stderr"][i] for i in layers], marker="o", markersize=3,
                          capsize=2, label=stage)
        axes.set(xlabel="layer", ylabel="importance (Fisher information of the gate)", yscale="log")
        axes.locator_params("x", integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        save_figure(figure, self.docs.parent / f"{self.slug}-importance.png")

    def drift(self) -> str:
        if "drift" not in self.found:
            return ""
        rows = []
        for name, found in self.found["drift"].items():
            rows.append([name, *(f"{min(found[key]):.2f} / {statistics.fmean([x for x in found[key] if x < 1 - 1e-5] or [1.0]):.2f}"
                                 for key in ("hidden", "keys", "values", "attention"))])
        rows.append(["paper, POP, lowest", f"{paper.DRIFT['hidden']:.2f}", "", f"{paper.DRIFT['values']:.2f}", f"above {paper.DRIFT['attention']:.2f}"])
        return (f"### Drift in the skipped layers\n\n{table(['prefill', 'hidden states', 'keys', 'values', 'attention outputs'], rows)}\nCosine to the full "
                "prefill: lowest layer / mean over the layers that differ. The hidden states of the skipped layers are POP's unchanged stream; attention "
                "outputs are the boundary token's, which reads those keys and values.\n")

    def baselines(self) -> str:
        if "baselines" not in self.found:
            return ""
        found = self.found["baselines"]
        material = "questions about pictures with their answers" if "pictures" in self.found else "sequences of 512 tokens"
        why = ("here: image rows enter the stream at several layers in the original basis." if "pictures" in self.found else "to Gemma: the norm after each block "
               "stands between the block and the stream, so the stream cannot be rotated without changing the result.")
        return (f"### The baselines here\n\nCalibrated with {found['sequences']} {material}: Wanda zeroes 30% of each row, "
                + ("SliceGPT deletes 25% of the stream's columns, " if "SliceGPT" in found["methods"] else "")
                + f"ShortGPT removes layers {', '.join(map(str, found['removed']))} (25%)."
                + ("" if "SliceGPT" in found["methods"] else f" SliceGPT cannot be applied {why}") + "\n")


def readme_rows(report: Report) -> str:
    """Full, POP and calibrated POP side by side, as the README shows them."""
    rows = []
    for method in ("full", "POP", "POP calibrated"):
        found = report.found.get(f"quality {method}")
        if found is None:
            return ""
        full = report.found["quality full"]
        speed = report.found["speed"]["prompts"]
        rows.append([method, *(f"{speedups(speed[n]['seconds'], method)[0]:.2f}x" for n in ("128", "512", "2048")),
                     *(show(task, found[task], None if method == "full" else full[task]) for task in ("minipop_hellaswag", "minipop_retrieval", "minipop_continuation"))])
    return table(["prefill", "speed, 128 tokens", "512", "2,048", "HellaSwag", "retrieval", "NLL"], rows)


def write(results: Path, docs: Path, command: str, notes: Path | None = None) -> str:
    """The page from results/*/, its figures beside `docs`; notes: prose that goes between the head and the tables."""
    reports = [Report(folder.name, folder, docs) for folder in sorted(results.iterdir()) if folder.is_dir()]
    llama = [[method, *(f"{x:.2f}" for x in values)] for method, values in paper.LLAMA.items()]
    page = [f"# Results: the paper's claims on small models\n\nMade by `{command}` on the CPU; the numbers of the paper (arXiv 2602.03295) stand beside ours. "
            "Every method answers the same items, and differences are paired.\n"]
    if notes is not None:
        page.append(notes.read_text(encoding="utf-8"))
    page.append("## The paper, for comparison\n\nTable 1, Llama-3.1-8B (POP skips 10 of 32 layers, Wanda 30%, SliceGPT and ShortGPT 25%):\n\n"
                + table(["method", *paper.TASKS, "average of all"], llama)
                + "\n" + "; ".join(f"{name}: {full:.2f} full, {pop:.2f} POP" for name, (full, pop) in paper.AVERAGES.items()) + " on average.\n")
    for report in reports:
        page.append(f"## {report.name}\n\n{report.sections()}")
    return "\n".join(page)
