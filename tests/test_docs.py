"""README, docstrings and configs say what the scripts do: every command parses, every name exists, every snippet runs.

    python -m pytest -q tests/test_docs.py
"""
import ast
import fnmatch
import glob
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import bench
import config
import eval as evaluation
import model
import prepare
import sample
import train

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"model": model, "train": train, "sample": sample, "bench": bench, "eval": evaluation, "prepare": prepare}
CONFIGS = sorted((ROOT / "config").rglob("[!_]*.py"))
DOCS = {"README.md": (ROOT / "README.md").read_text("utf-8"), **{f"{name}.py": module.__doc__ for name, module in SCRIPTS.items()},
        **{str(path.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in CONFIGS}}
README = DOCS["README.md"]
STAND_INS = {"CONFIG": "config/grt_tiny.py", "config/NAME.py": "config/grt_tiny.py", "config/more.py": "config/gpt_tiny.py",
             "...": None}                                               # words that a reader replaces


def commands():
    """(where, script, arguments) of every `python SCRIPT.py ...` in the documents."""
    for where, text in DOCS.items():
        for script, rest in re.findall(r"(?:python|torchrun \S+) (\w+)\.py([^`\n]*)", text):
            if script in SCRIPTS:
                line = re.split(r"\s#|\s{3,}|&&|\||[;,:)]\s|[;,:)]$|\.$", rest)[0]
                words = [word for word in (STAND_INS.get(w, w) for w in shlex.split(re.sub(r"[\[\]]", "", line))) if word]
                yield where, script, [path for word in words for path in sorted(glob.glob(word, root_dir=ROOT)) or [word]]


def parse(script, argv):
    if script == "prepare" and argv[:1] == ["weights"]:
        return config.parse(argv, [model.GPTConfig, train.TrainConfig, prepare.WeightsConfig], "", words=("weights RUN", 2))
    schema = {"model": [model.GPTConfig, train.TrainConfig], "train": [model.GPTConfig, train.TrainConfig], "sample": [sample.SampleConfig],
              "bench": [model.GPTConfig, train.TrainConfig, bench.BenchConfig], "eval": [evaluation.EvalConfig], "prepare": [prepare.PrepareConfig]}[script]
    return config.parse(argv, schema, "", words={"bench": "MODE", "prepare": ("SOURCE", 1), "eval": ("", 99)}.get(script))


@pytest.mark.parametrize("where, script, argv", list(commands()), ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_every_command_in_the_documents_is_understood(where, script, argv, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = parse(script, argv)
    if script == "bench":
        assert settings.words and settings.words[0] in bench.MODES
        assert settings.files or settings.words[0] in ("table", "decode", "serve") or all(map(bench.configs_in, settings.words[1:])) and settings.words[1:]
    if script == "eval":
        assert set(settings.words) <= set(evaluation.PARTS)
    if script == "train" and settings.init_from in ("scratch", "resume"):           # others name a run of the reader's
        train.parse(argv)


def test_the_parts_of_eval_are_told_in_order_in_its_help_and_in_the_readme():
    table = README.split("| part | what it measures")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(evaluation.PARTS)
    assert f"Parts: {', '.join(evaluation.PARTS)};" in evaluation.__doc__


def test_there_are_commands_for_every_script():
    assert {script for _, script, _ in commands()} == set(SCRIPTS)


def test_every_flag_in_the_readme_is_a_key_of_some_script():
    known = {name for script in SCRIPTS for name in parse(script, []).values} | {*parse("prepare", ["weights"]).values, "help", "nproc_per_node"}          # the last is torchrun's
    assert set(re.findall(r"--([A-Za-z_]+)(?![\w-])", README)) <= known


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_key_with_type_default_and_sentence(script, capsys):
    with pytest.raises(SystemExit) as exit:
        SCRIPTS[script].main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0 and SCRIPTS[script].__doc__.splitlines()[0] in text
    for name in parse(script, []).values:
        assert re.search(rf"^  --{name} +(int|float|str|bool|list)[\w\[\]| ]* +\S+ +\S+", text, re.M), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_every_config_builds_a_model_and_has_no_key_without_effect(path):
    settings = train.parse([str(path)])
    cfg = settings.build(model.GPTConfig, vocab_size=320)
    assert cfg.unused() == [] and cfg.n_params() > 0 and settings.max_iters > settings.warmup_iters


def test_every_line_of_a_config_has_its_reason_there_or_in_the_config_it_follows():
    lines = [line.partition("#") for path in CONFIGS for line in path.read_text("utf-8").splitlines() if re.match(r"\w+ *=", line)]
    reasoned = {setting.strip() for setting, _, reason in lines if reason}
    assert {setting.strip() for setting, _, reason in lines if not reason} <= reasoned


def rows_of_configs():
    """([config, or a pattern with *, relative to config/ without .py], [layouts]) of each row of the README's table."""
    table = README.split("| config | layout | what it is |\n")[1].split("\n\n")[0]
    for row in table.splitlines()[1:]:
        words, layouts = re.findall(r"`([^`]+)`", row.split("|")[1]), re.findall(r"\d+\+\d+x\d+\+\d+", row.split("|")[2])
        names = words[:1]
        for word in words[1:]:                                          # `_large` after grt_small; `cycle*` in the folder of the first
            names.append(names[0].rpartition("_")[0] + word if word.startswith("_") else names[0].rpartition("/")[0] + "/" * ("/" in names[0]) + word)
        yield names, layouts


def stem(path):
    return path.relative_to(ROOT / "config").with_suffix("").as_posix()


def test_every_config_that_is_named_exists_and_every_one_that_exists_is_named():
    there, patterns = {stem(path) for path in CONFIGS}, [name for names, _ in rows_of_configs() for name in names]
    for pattern in patterns:
        assert len(pattern.rpartition("/")[2].strip("*_")) > 3 and fnmatch.filter(there, pattern), pattern
    in_commands = set(re.findall(r"config/([\w/]+)\.py", README)) - {"NAME", "more", "__init__"}
    assert in_commands <= there
    assert {name for name in there - in_commands if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)} == set()
    in_text = set(re.findall(r"\b(?:grt|gpt2?|mor|vanilla|recursive\d?|(?:middle_)?(?:cycle|sequence)\d)_\w+", README))
    assert in_text <= {name.rpartition("/")[2] for name in there}


def test_the_table_of_configs_gives_their_layouts():
    built = {stem(path): train.parse([str(path)]).build(model.GPTConfig, vocab_size=320).layout for path in CONFIGS}
    rows = list(rows_of_configs())
    assert len(rows) > 5
    for names, layouts in rows:
        assert layouts
        if any("*" in name for name in names):                          # some of a family, in any order
            assert set(layouts) <= {built[name] for pattern in names for name in fnmatch.filter(built, pattern)}
        else:
            assert layouts == [built[name] for name in names] or layouts == [built[names[0]]]


def test_every_config_says_in_its_docstring_what_it_is():
    for path in CONFIGS:
        cfg = train.parse([str(path)]).build(model.GPTConfig, vocab_size=320)
        first = (DOCS[str(path.relative_to(ROOT))].splitlines() or [""])[0]
        assert cfg.layout in first, path


def test_what_the_readme_says_of_published_numbers_that_do_not_follow_is_in_the_file_of_them():
    section = README.split("## Published numbers\n")[1].split("\n## ")[0]
    rows = json.loads((ROOT / "config" / "published.json").read_text("utf-8"))["rows"]
    denied = {f"{row['value']:g}" for row in rows if row["agrees"] is False}
    assert denied == set(re.findall(r"\d+(?:\.\d+)?", " ".join(re.findall(r"^\| [^|]*: ([^|]*)", section, re.M))))


def test_every_file_that_the_readme_names_exists():
    there = {str(path.relative_to(ROOT)) for pattern in ("*", "config/*", "tests/*", ".ci/*") for path in ROOT.glob(pattern)}
    names = re.findall(r"(?<![\w/-])((?:(?:config|tests|\.ci)/)?[\w-]+\.(?:py|md|txt|toml|json))\b", README)
    of_others = {"config.json", "tokenizer.json"}             # beside model.safetensors
    assert {"model.py", "train.py", "sample.py"} <= set(names) and set(names) <= there | set(STAND_INS) | of_others
    pictures = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert "assets/depth.png" in pictures and all((ROOT / path).is_file() for path in pictures)


def blocks():
    return [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", README, re.S)]


def test_a_snippet_that_begins_with_imports_runs(monkeypatch):
    monkeypatch.setattr(model, "UPDATES", dict(model.UPDATES))
    ran = [block for block in blocks() if block.startswith(("import ", "from "))]
    assert ran
    for block in ran:
        with torch.device("cpu" if "Engine" in block else "meta"):      # shapes alone: nothing large is allocated; but a text has to be real
            exec(compile(block, "README.md", "exec"), {})


def test_a_snippet_that_quotes_the_code_is_word_for_word():
    source = " ".join("".join(path.read_text("utf-8") for path in ROOT.glob("*.py")).split())
    quoted = [block for block in blocks() if not block.startswith(("import ", "from "))]
    assert quoted
    for block in quoted:
        for part in re.split(r"\n\s*\n", block.strip()):
            assert " ".join(part.split()) in source, part


@pytest.mark.slow
def test_importing_the_scripts_says_nothing_and_makes_nothing(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", "import " + ", ".join(SCRIPTS)], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr, os.listdir(tmp_path)) == (0, b"", b"", [])
