"""Settings: one test per promise of config/__init__.py, with two small dataclasses in place of the real ones.

    python -m pytest -q tests/test_config.py
"""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import config  # noqa: E402
from config import UserError, key  # noqa: E402


@dataclass
class Model:
    """Model: what is built."""
    n_head: int = key(4, "Query heads.")
    n_embd: int = key(256, "Width.")
    n_ffn: Optional[int] = key(None, "Width of the MLP; None = 4 n_embd.")
    n_core: int = key(1, "Blocks in the core.")
    router: str = key("none", "Who continues.", {"none": 1, "expert": 2, "token": 3})
    plain: int = 3                                                  # a field without metadata is a key too

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}; try 4 or 8")


@dataclass
class Train:
    """Train: how."""
    n_core: int = key(2, "")                                        # declared again: only the default is new
    router: str = key("token", "")
    batch_size: int = key(8, "Sequences per step, " + "in a sentence that is far too long for one line of help " * 3)
    learning_rate: float = key(1e-3, "Peak.")
    betas: list[float] = key([0.9, 0.95], "AdamW.")
    compile: bool | str = key("auto", "auto means CUDA only.", [True, False, "auto"])
    resume: bool = key(False, "Go on.")
    out_dir: str = key("out", "Folder.")
    start: list[str] = key(["\n"], "Prompts.")
    name: str | None = key(None, "Label.")
    depth_or_rule: int | str = key("all", "Union.")
    float_or_int: float | int = key(1, "Union.")
    top_k: int | None = key(None, "Sampling.")
    recursions: int | None = key(None, "Depth.")


def parse(*argv, **kwargs):
    return config.parse(list(argv), [Model, Train], "Doc.", **kwargs)


def refusal(*argv, **kwargs):
    with pytest.raises(UserError) as error:
        parse(*argv, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content, name="x.py"):
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name
    return write


def test_later_files_win_and_the_command_line_wins_wherever_it_stands(write):
    a, b = write('"""Doc."""\n# comment\nn_head = 2\nn_core = 3\n', "a.py"), write("n_head = 8\n", "b.py")
    s = parse("--batch_size=4", "--n_core", "5", a, b, "--batch_size=6")
    assert (s.n_head, s.n_core, s.batch_size, s.plain, s.files) == (8, 5, 6, 3, ["a.py", "b.py"])
    assert s.origins["n_head"] == "b.py:1" and s.origins["n_core"] == "command line" and s.origins["plain"] == "default"


def test_a_name_means_its_value_at_that_line(write):
    a = write("n_core = n_core + 1\nn_embd = 32\nn_ffn = 4 * n_embd\n", "a.py")     # a default, then an earlier line
    b = write("n_head = n_embd // 16\nn_embd = 64\n", "b.py")                       # an earlier file, before it changes
    s = parse(a, b, "--top_k=n_embd-1")
    assert (s.n_core, s.n_ffn, s.n_head, s.n_embd, s.top_k) == (3, 128, 2, 64, 63)


@pytest.mark.parametrize("expression, value", [
    ("1e3", 1000), ("-(2 + 3) * 4", -20), ("7 // 2 + 7 % 4", 6), ("2**10", 1024), ("6 / 2", 3), ("+1_000", 1000)])
def test_files_and_flags_take_the_same_arithmetic(write, expression, value):
    for argv in ([write(f"batch_size = {expression}")], [f"--batch_size={expression}"], ["--batch_size", expression]):
        assert parse(*argv).batch_size == value and type(parse(*argv).batch_size) is int


@pytest.mark.parametrize("flag, name, value", [
    ("--learning_rate=1", "learning_rate", 1.0), ("--learning_rate=inf", "learning_rate", float("inf")),
    ("--resume=true", "resume", True), ("--resume=FALSE", "resume", False), ("--resume=1", "resume", True),
    ("--compile=true", "compile", True), ("--compile=auto", "compile", "auto"),
    ("--float_or_int=3", "float_or_int", 3), ("--depth_or_rule=n_core*2", "depth_or_rule", 4),
    ("--depth_or_rule=last", "depth_or_rule", "last"),
    ("--betas=[0.5,1]", "betas", [0.5, 1.0]), ("--betas=0.5,1", "betas", [0.5, 1.0]), ("--betas=1", "betas", [1.0]),
    ("--out_dir=a=b", "out_dir", "a=b"), ("--out_dir=n_core", "out_dir", "n_core"), ("--out_dir=", "out_dir", ""),
    ("--out_dir='a\\n'", "out_dir", "a\n"), ("--out_dir=None", "out_dir", "None"), ("--out_dir=3", "out_dir", "3"),
    ("--name=None", "name", None), ("--name='None'", "name", "None"), ("--name=run", "name", "run"),
    ("--start=", "start", [""]), ("--start=[1] 'x'", "start", ["[1] 'x'"]), ("--start=['a','b']", "start", ["a", "b"]),
    ("--start=[1]", "start", ["[1]"]), ("--start='a'", "start", ["'a'"]), ("--start=None", "start", ["None"]),
    ("--top_k=3", "top_k", 3), ("--n_ffn=8", "n_ffn", 8), ("--recursions=None", "recursions", None)])
def test_a_value_is_cast_to_the_declared_type(flag, name, value):
    got = parse(flag).values[name]
    assert got == value and type(got) is type(value)


def test_repeated_flags_add_up_for_a_list_of_text_and_replace_what_a_file_said(write):
    x = write("start = ['file']\nbetas = 1")
    assert parse(x).start == ["file"]
    assert parse("--start=a", x, "--start", "b", "--betas=2", "--betas=3").start == ["a", "b"]
    assert parse("--betas=2", "--betas=3").betas == [3.0]


def test_negative_numbers_may_stand_apart():
    assert parse("--top_k", "-1", "--learning_rate", "-.5").values["top_k"] == -1


def test_a_file_is_utf8_whatever_the_locale(write):
    x = write("\ufeffout_dir = 'é'")
    code = f"import test_config; print(ascii(test_config.parse({x!r}).out_dir))"
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, text=True,
                          env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    assert done.stdout.strip() == "'\\xe9'", done.stderr


@pytest.mark.parametrize("content, message", [
    ("n_heads = 4", "x.py:1: unknown key 'n_heads', did you mean 'n_head'?"),
    ("\nzzz = 4", "x.py:2: unknown key 'zzz'; --help lists the keys"),
    ("n_layer = 12", "x.py:1: unknown key 'n_layer': depth here is n_prelude + n_core x n_recur + n_coda; 12"),
    ("n_head = 4\n\nn_head = 8", "x.py:3: 'n_head' is already set on line 1"),
    ("import os", "x.py:1: a config file holds only `key = value` lines, not `import os`"),
    ("'doc'\n'again'", "x.py:2: a config file holds only"),
    ("n_head = open('y', 'w')", "x.py:1: unknown name 'open'; n_head takes a whole number"),
    ("n_head = (lambda: 1)()", "x.py:1: `(lambda: 1)()` is not allowed"),
    ("n_head = 1j", "x.py:1: `1j` is not allowed"),
    ("n_head = n_hed * 2", "x.py:1: unknown name 'n_hed', did you mean 'n_head'?"),
    ("n_head = n_ffn + 1", "x.py:1: cannot compute with `n_ffn`: it is None here"),
    ("n_head = 1 / 0", "x.py:1: cannot compute `1 / 0`: division by zero"),
    ("n_head = 10**10**10", "x.py:1: cannot compute `10 ** 10 ** 10`: the number is too large"),
    ("n_head = 2.0**5000", "x.py:1: cannot compute `2.0 ** 5000`: "),
    ("n_head = (-8)**0.5", "x.py:1: cannot compute `(-8) ** 0.5`: a negative number"),
    ("n_head = " + "-" * 3000 + "1", "x.py:1: "), ("n_head = 1" + "+1" * 900, "x.py:1: "),
    ("n_head = 'a' * 10**9", "x.py:1: cannot compute with `'a'`"),
    ("resume = 2", "x.py:1: resume takes true or false, got 2"),
    ("betas = [0.9, 'a']", "x.py:1: betas takes a list, each item a number, got [0.9, 'a']"),
    ("out_dir = stdlib", "x.py:1: out_dir takes text: put quotes around `stdlib`"),
    ("out_dir = data/x.txt", "x.py:1: out_dir takes text: put quotes around"),
    ("out_dir = 3", "x.py:1: out_dir takes text, got 3; put quotes around it"),
    ("router = 'exprt'", "x.py:1: router has no choice 'exprt', did you mean 'expert'?"),
    ("router = 'x'", "x.py:1: router has no choice 'x'; it is one of none, expert, token"),
    ("n_head = 1\nn_core = (", "x.py:2: '(' was never closed"),
    (b"n_head = 1\n# \xff", "x.py:2: this is not UTF-8 text"),
    (b"n_head = 1\0", "x.py:1: ")])
def test_a_mistake_in_a_file_is_one_line_that_begins_with_its_place(write, content, message):
    assert refusal(write(content)).startswith(message)


@pytest.mark.parametrize("line", ["n_head += 1", "n_head: int = 1", "n_head = n_core = 1", "if 1: n_head = 2"])
def test_a_file_holds_nothing_but_settings(write, line):
    assert refusal(write(line)).startswith("x.py:1: a config file holds only `key = value` lines, not `")


@pytest.mark.parametrize("value", ["'4'", "True", "1.5", "nan", "inf", "None", "[4]"])
def test_a_whole_number_is_nothing_else(write, value):
    message = f"n_head takes a whole number, got {value}"
    assert refusal(write(f"n_head = {value}")) == f"x.py:1: {message}"
    assert refusal(f"--n_head={value}") == f"command line: {message}"


@pytest.mark.parametrize("argv, message", [
    ("--learnig_rate=1", "unknown key 'learnig_rate', did you mean 'learning_rate'?"),
    ("--BATCH_SIZE=8", "unknown key 'BATCH_SIZE', did you mean 'batch_size'?"),
    ("--batch-size 8", "unknown key 'batch-size', did you mean 'batch_size'?"),
    ("--depth=3", "unknown key 'depth': the depth of inference is --recursions"),
    ("batch_size=9", "'batch_size=9' is not a flag; write --batch_size=9"),
    ("batch_size 9", "'batch_size' is not a flag; write --batch_size=8"),
    ("\u2013batch_size=9", "'\u2013batch_size=9' is not a flag; write --batch_size=9"),
    ("-batch_size=9", "'-batch_size=9' has one dash; write --batch_size=9"),
    ("--batch_size", "'--batch_size' has no value; write --batch_size=8"),
    ("--batch_size=", "'--batch_size=' has no value; write --batch_size=8"),
    ("--batch_size --n_head=4", "'--batch_size' has no value; write --batch_size=8"),
    ("--start", "'--start' has no value; write --start=VALUE"),
    ("batchsize=9", "unknown key 'batchsize', did you mean 'batch_size'?"),
    ("--batch_size=8x", "batch_size takes a whole number, got '8x'"),
    ("--resume=yes", "unknown name 'yes'; resume takes true or false"),
    ("--router=exprt", "router has no choice 'exprt', did you mean 'expert'?"),
    ("--n_core=n_ffn+1", "cannot compute with `n_ffn`: it is None here"),
    ("stray", "'stray' is neither --key=value nor a config file (.py)"),
    ("--lr=1", "unknown key 'lr': it is --learning_rate"), ("--prompt=x", "unknown key 'prompt': a prompt is --start"),
    ("grt_tiny", f"'grt_tiny' is neither --key=value nor a config file (.py), did you mean '{os.path.relpath(Path(config.__file__).parent / 'grt_tiny.py')}'?")])
def test_a_mistake_in_a_flag_says_what_to_write(argv, message):
    assert refusal(*argv.split()).startswith("command line: " + message)


def test_a_hint_is_given_only_where_the_key_it_names_exists():
    with pytest.raises(UserError, match="^command line: unknown key 'depth'; --help lists the keys$"):
        config.parse(["--depth=3"], [Model], "Doc.")


def test_a_missing_file_names_the_nearest_one(write, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    monkeypatch.setattr(config, "__file__", str(tmp_path / "config" / "__init__.py"))
    write("", "config/grt_tiny.py")
    assert refusal("config/grt_tny.py") == "config/grt_tny.py: no such file, did you mean 'config/grt_tiny.py'?"
    assert refusal("config/grt_tiny").endswith("did you mean 'config/grt_tiny.py'?")
    (tmp_path / "dir.py").mkdir()
    assert refusal("dir.py").startswith("dir.py: cannot be read: ")


def test_words_are_kept_apart_from_files_and_the_first_may_end_in_py(write):
    x = write("n_head = 2")
    s = parse("weights", "a=b", x, words="SOURCE")
    assert (s.words, s.files, s.n_head) == (["weights", "a=b"], ["x.py"], 2)
    s = parse("--n_core=3", "book.py", x, words=("SOURCE", 1))
    assert (s.words, s.files) == (["book.py"], ["x.py"])
    assert "write --n_head=2" in refusal("n_head=2", words=("SOURCE", 1))


def test_an_error_of_the_model_is_led_back_to_the_line_that_set_the_key(write):
    x = write("\nn_head = 6")
    with pytest.raises(UserError, match="^x.py:2: n_head=6 does not divide n_embd=256; try 4 or 8$"):
        parse(x).build(Model)
    with pytest.raises(UserError, match="^command line: n_head=4 does not"):         # n_head is a default here
        parse("--n_embd=6").build(Model)
    with pytest.raises(UserError, match="^n_head=3 does not"):                       # not the file's n_head
        parse(x).build(Model, n_head=3)
    assert parse("--n_head=8").build(Model, n_embd=64) == Model(n_head=8, n_embd=64, n_core=2, router="token")


def test_a_dump_is_a_config_file_that_gives_the_same_values(write):
    flags = ["--start=#'\n\"", "--learning_rate=inf", "--name=None", "--depth_or_rule='5'", "--betas=-1"]
    s = parse(write("n_head = 8"), *flags)
    again = parse(write(s.dump(), "dump.py"))
    assert again.values == s.values and list(again.values) == list(s.values)
    assert "n_head = 8  # x.py:1\n" in s.dump() and "n_core = 2  # default\n" in s.dump()


def test_one_parse_leaves_nothing_behind_for_the_next():
    parse().betas.append(1)
    assert parse().betas == [0.9, 0.95] and not hasattr(parse(), "nothing")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_every_key_in_its_group_and_fits_the_page(capsys, flag):
    with pytest.raises(SystemExit) as end:
        parse("--no_such_key=1", flag, words="SOURCE")
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("Doc.\n") and " SOURCE [config/FILE.py ...]" in text
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"  --{name} " in text for name in parse().values)
    model, train = text.split("Model: what is built.")[1].split("Train: how.")
    assert "[none | expert | token] Who continues." in model and "--batch_size" in train
    n_core = next(line for line in model.splitlines() if "--n_core" in line)        # one row: the later default
    assert n_core.split()[1:] == ["int", "2", "Blocks", "in", "the", "core."] and "--n_core" not in train


def test_a_users_mistake_exits_with_2_one_line_and_no_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import config\nconfig.run(lambda argv: config.parse(argv, [], 'Doc.'))\n")

    def run(*argv, **kwargs):
        return subprocess.run([sys.executable, str(script), *argv], capture_output=True, text=True,
                              env={"PYTHONPATH": str(ROOT)}, **kwargs)
    done = run("--n_heads=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "command line: unknown key 'n_heads'; --help lists the keys\n"
    assert run("--help").returncode == 0
    script.write_text("import config, os\nr, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\nos.close(r)\n"
                      "config.run(lambda argv: print('x'))\n")
    done = run()                                                                    # the reader of a pipe has left
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_exits_with_130_and_no_traceback(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        config.run(interrupted)
    assert stop.value.code == 130 and capsys.readouterr().err == ""
