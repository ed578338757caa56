"""What prepare.py promises: token files that hold exactly the text, in splits that stay, whole or not there.

    python -m pytest tests/test_prepare.py
"""
import errno
import json
import lzma
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare
from config import UserError

ROOT = Path(__file__).resolve().parent.parent
EOT = 256
STORY = {"a.txt": "Zoë sent 🦊🦊 to 東京.\r\nTwice.\n", "b/c.md": "\ufeffno newline at the end",
         "d.py": "print('<|endoftext|>')\n\n\n"}
BPE = Path(os.environ.get("TIKTOKEN_CACHE_DIR", ROOT.parent / "shared" / "tiktoken"))
needs_bpe = pytest.mark.skipif(not BPE.is_dir(), reason="GPT-2's vocabulary is not on this computer")


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return folder


def many(n):
    return {f"doc{i:03}.txt": f"document {i}: {'word ' * i}\n" for i in range(n)}


def read(folder, split):
    """The documents of a .bin as lists of ids, without their end-of-text."""
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    ids = np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"])
    assert len(ids) == meta[split]["tokens"] and ids[-1] == meta["eot"]
    return [part[part != meta["eot"]].tolist() for part in np.split(ids, np.flatnonzero(ids == meta["eot"]) + 1)[:-1]]


def texts(folder, tokenizer="bytes"):
    encoding = prepare.get_tokenizer(tokenizer)
    return {split: [encoding.decode_bytes(ids).decode("utf-8") for ids in read(folder, split)] for split in prepare.SPLITS}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def go(tmp_path, monkeypatch):
    """prepare() on files given as a dict, quietly, below tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda files, **settings: prepare.prepare(write(tmp_path / "corpus", files), **{"quiet": True, **settings})


def script(*args, cwd, code=None, **settings):
    """prepare.py, or some code that imports it, as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **settings.pop("env", {})}
    what = ["-c", code] if code else [str(ROOT / "prepare.py")]
    return subprocess.run([sys.executable, *what, *map(str, args)], cwd=cwd, env=env, capture_output=True, timeout=60, **settings)


# ---- tokens are the text, no more and no less --------------------------------------------------------------------

def test_tokens_decode_back_to_the_text(go):
    found = texts(go(STORY, val_fraction=0.5))
    assert sorted(found["train"] + found["val"]) == sorted(STORY.values())


def test_a_byte_is_a_token(go):
    assert read(go({"a.txt": "hé\n", "b.txt": "x"}, val_fraction=0.0001), "train") in ([[104, 195, 169, 10]], [[120]])
    encoding = prepare.get_tokenizer("bytes")
    assert encoding.n_vocab == 257 and encoding.eot_token == EOT
    for text in ("", " ", "a", "\n", "🦊 x", "a" * 1000 + "\r\n"):
        assert encoding.encode_ordinary(text) == list(text.encode("utf-8")) and encoding.decode(list(text.encode("utf-8"))) == text


def test_every_document_ends_with_one_end_of_text_and_none_begins_with_it(go):
    folder = go(many(30), val_fraction=0.3)
    meta = prepare.load_meta("data", "corpus")
    for split in prepare.SPLITS:
        ids = np.fromfile(folder / f"{split}.bin", dtype="<u2")
        assert (ids == EOT).sum() == meta[split]["documents"] == len(read(folder, split))
        assert ids[0] != EOT and ids[-1] == EOT and not ((ids[1:] == EOT) & (ids[:-1] == EOT)).any()
    assert meta["train"]["documents"] + meta["val"]["documents"] == 30


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_bpe)])
def test_the_marker_inside_a_document_is_ordinary_text(go, tokenizer, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(BPE))
    marked = {"a.txt": "one<|endoftext|>two", "b.txt": "<|endoftext|>"}
    found = texts(go(marked, tokenizer=tokenizer), tokenizer)
    assert sorted(found["train"] + found["val"]) == sorted(marked.values())


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_bpe)])
def test_the_bytes_of_all_tokens_are_the_bytes_of_all_files(go, tokenizer, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(BPE))
    folder = go(STORY, tokenizer=tokenizer)
    meta, encoding = prepare.load_meta("data", "corpus"), prepare.get_tokenizer(tokenizer)
    for split in prepare.SPLITS:
        assert meta[split]["bytes"] == sum(len(encoding.decode_bytes(ids)) for ids in read(folder, split))
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == sum(len(text.encode("utf-8")) for text in STORY.values())


def test_a_document_longer_than_a_piece_is_still_one_document(go, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 16)
    long = "".join(f"línea {i} 🦊\n" for i in range(50)) + "x" * 100
    found = texts(go({"long.txt": long, "short.txt": "s", "j.jsonl": json.dumps({"text": long})}, num_proc=3))
    assert sorted(found["train"] + found["val"]) == sorted([long, long, "s"])


def test_a_large_vocabulary_gets_wider_ids(go, monkeypatch):
    wide = tiktoken.Encoding("wide", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={"<|endoftext|>": 70_000})
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: wide)
    folder = go(many(3))
    assert prepare.load_meta("data", "corpus")["dtype"] == "uint32"
    assert (folder / "train.bin").read_bytes()[-4:] == (70_000).to_bytes(4, "little")


@pytest.mark.parametrize("n", [2, 3])
def test_the_number_of_workers_changes_nothing(go, n, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 500)       # dozens of batches
    assert files_of(go(many(100), name="one")) == files_of(go(many(100), name="more", num_proc=n))


def test_few_texts_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 100)
    taken = []

    def items():
        for i in range(200):
            taken.append(i)
            yield from (("train", "ten bytes\n"), ("train", None))

    given = 0
    for encoded in prepare.encode_all(prepare.get_tokenizer("bytes"), prepare.in_batches(items()), num_proc=2):
        assert 0 < encoded["train"][3] <= 10 and len(taken) - given <= 3 * 10
        given += encoded["train"][3]
    assert given == 200


def test_the_progress_bar_counts_every_byte(go, monkeypatch):
    totals, steps = [], []

    class Bar(prepare.tqdm):
        def __init__(self, total, **settings):
            totals.append(total)
            super().__init__(total=total, **settings)

        def update(self, n):
            steps.append(n)

    monkeypatch.setattr(prepare, "tqdm", Bar)
    go(STORY)
    assert totals == [sum(steps)] == [sum(len(text.encode("utf-8")) for text in STORY.values())]


# ---- which document goes where -----------------------------------------------------------------------------------

def test_a_document_stays_in_its_split_when_others_come(go):
    before = texts(go(many(40), val_fraction=0.3))
    after = texts(go(many(80), val_fraction=0.3))
    assert set(before["val"]) < set(after["val"]) and set(before["train"]) < set(after["train"])


def test_val_is_the_documents_whose_hash_is_small(go):
    found = texts(go(many(40), val_fraction=0.3))
    assert found["val"] == [text for name, text in many(40).items() if prepare.place(name) < 0.3]
    assert prepare.place("doc000.txt") == pytest.approx(0.06346362816328201)       # the same on every computer, for ever


@pytest.mark.parametrize("n, val_fraction", [(2, 1e-9), (3, 1e-9), (3, 1 - 1e-9), (2, 0.5)])
def test_no_split_stays_empty(go, n, val_fraction):
    found = texts(go(many(n), val_fraction=val_fraction))
    assert found["train"] and found["val"] and sorted(found["train"] + found["val"]) == sorted(many(n).values())


@pytest.mark.parametrize("text, train, val, val_fraction", [
    ("1\n2\n3\n4\n", "1\n2\n3\n", "4\n", 0.25), ("1\n2\n3\n4", "1\n2\n3\n", "4", 0.25), ("1\n2\n", "1\n", "2\n", 0.01),
    ("1\n2\n3\n4\n5\n6\n7\n8\n", "1\n2\n", "3\n4\n5\n6\n7\n8\n", 0.75), ("1\n2\n3\n", "1\n", "2\n3\n", 0.99),  # by lines
    ("abcdefgh", "abcdef", "gh", 0.25), ("ab", "a", "b", 0.01), ("🦊\n", "🦊", "\n", 0.99)])                    # by characters
def test_a_lone_document_gives_its_end_to_val(tmp_path, text, train, val, val_fraction, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 3)
    write(tmp_path, {"lone.txt": text, "lone.jsonl": json.dumps({"text": text})})
    for source in ("lone.txt", "lone.jsonl"):
        folder = prepare.prepare(tmp_path / source, name=source, val_fraction=val_fraction, data_dir=tmp_path / "data", quiet=True)
        assert texts(folder) == {"train": [train], "val": [val]}


@pytest.mark.parametrize("files", [{"a.txt": "x"}, {"a.txt": ""}, {}, {"a.jsonl": "\n\n"}, {"a.bin": b"\0\1"}])
def test_too_little_text_is_refused(go, tmp_path, files):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(UserError, match="too few for two splits"):
        go(files)
    assert not (tmp_path / "data").exists()


# ---- sources -----------------------------------------------------------------------------------------------------

def test_a_folder_gives_its_text_files_and_says_what_it_left_out(go, tmp_path, capsys):
    files = {**STORY, ".git/config": "x", ".hidden": "x", "empty.txt": "", "x.png": b"\x89PNG\xff", "zero": b"a\0b",
             "two.jsonl": '{"text": "one"}\n\n{"text": ""}\n{"text": "four"}\n{"text": null}'}
    found = texts(go(files, quiet=False))
    assert sorted(found["train"] + found["val"]) == sorted([*STORY.values(), "one", "four"])
    out = capsys.readouterr().out
    assert "4 files (left out: " in out
    for part in ("2 hidden", "1 empty", "1 not text", "1 not UTF-8 text"):
        assert part in out


def test_a_data_folder_inside_the_source_is_no_source(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write(tmp_path / "here", many(3)))
    prepare.prepare(".", quiet=True)
    assert prepare.prepare(".") == Path("data/here") and "up to date" in capsys.readouterr().out


def test_a_line_of_jsonl_is_a_document_named_by_its_line(tmp_path):
    path = write(tmp_path, {"x.jsonl": '\ufeff{"id": 1, "body": "one"}\n\n{"body": "thr\\ud83dee"}\r\n'}) / "x.jsonl"
    assert [(name, list(pieces)) for name, pieces in prepare.Files(str(path), "data").documents("body")] == [
        ("x.jsonl:1", ["one"]), ("x.jsonl:3", ["thr?ee"])]      # half a surrogate pair is no character


@pytest.mark.parametrize("line, words", [
    ('{"id": 1, "body": "x"}', "no field 'text'; fields here: id, body"), ("{}", "fields here: none"), ("[1]", "got list"),
    ('{"text": 5}', "field 'text' holds no text"), ('{"text": ["x"]}', "field 'text' holds no text"), ('{"text": "x"', "not a line of JSON"),
    (b'{"text": "\xff"}', "not a line of JSON")])
def test_a_bad_line_of_jsonl_is_named(go, line, words):
    raw = line if isinstance(line, bytes) else line.encode("utf-8")
    with pytest.raises(UserError, match=r"x\.jsonl:2: .*" + re.escape(words)):
        go({"x.jsonl": b'{"text": "fine"}\n' + raw})


@pytest.mark.parametrize("source, words", [
    ("nowhere.txt", "SOURCE is stdlib, a text file"), ("empty.txt", "is empty"), ("latin.txt", "is not UTF-8"), ("zero.txt", "is not text")])
def test_a_source_that_is_no_text_is_refused(tmp_path, source, words, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"empty.txt": "", "latin.txt": b"caf\xe9", "zero.txt": "a\0b"}))
    for path in (source, f"./{source}", tmp_path / source):
        with pytest.raises(UserError, match=f"{source}.*{words}"):
            prepare.prepare(path)
    assert not Path("data").exists()


@pytest.mark.parametrize("settings, words", [
    ({"name": "a/b"}, "plain folder name"), ({"name": ".."}, "plain folder name"), ({"name": "a\\b"}, "plain folder name"),
    ({"val_fraction": 0.0}, "val_fraction"), ({"val_fraction": 1.0}, "val_fraction"), ({"val_fraction": math.nan}, "val_fraction"),
    ({"num_proc": 0}, "num_proc"), ({"max_tokens": 3}, "max_tokens"), ({"revision": "main"}, "needs a set on the Hub"),
    ({"tokenizer": "gtp2"}, "choose bytes, gpt2")])
def test_settings_that_cannot_work_are_refused(go, settings, words):
    with pytest.raises(UserError, match=words):
        go(STORY, **settings)


def parquet(path, rows, **settings):
    pyarrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.write_table(pyarrow.table(rows), path, **settings)
    return path


def test_a_row_of_parquet_is_a_document_named_by_its_row(tmp_path):
    path = parquet(tmp_path / "x.parquet", {"id": [1, 2, 3, 4], "body": ["one\n", "", None, "🦊"]}, row_group_size=2)
    documents = prepare.Files(str(path), "data").documents("body")
    assert list(documents) == [("x.parquet:1", ["one\n"]), ("x.parquet:4", ["🦊"])]


def test_the_same_documents_from_text_jsonl_and_parquet_are_the_same_tokens(go, tmp_path):
    bodies = [f"document {i} 🦊\n" * (i + 1) for i in range(300)]
    parquet(tmp_path / "corpus/x.parquet", {"text": bodies}, row_group_size=100)
    assert sorted(sum(texts(go({}, name="p", val_fraction=0.2)).values(), [])) == sorted(bodies)
    (tmp_path / "corpus/x.parquet").unlink()
    lines = "".join(json.dumps({"text": body}) + "\n" for body in bodies)
    by_line = go({"x.parquet.jsonl": lines}, name="j", val_fraction=0.2)
    assert sorted(sum(texts(by_line).values(), [])) == sorted(bodies)


@pytest.mark.parametrize("rows, words", [
    ({"id": [1], "body": ["x"]}, "x.parquet:1: no field 'text'; fields here: id, body; choose one with --field"),
    ({"text": [5]}, "x.parquet:1: field 'text' holds no text"), (None, "x.parquet:1: not to be read as Parquet"),
    ("cut", "x.parquet:1: not to be read as Parquet")])
def test_bad_parquet_is_named(go, tmp_path, rows, words):
    path = parquet(tmp_path / "corpus/x.parquet", rows if isinstance(rows, dict) else {"text": ["x"] * 1000})
    if not isinstance(rows, dict):
        path.write_bytes(path.read_bytes()[:-100] if rows else b"I am text")
    with pytest.raises(UserError, match=re.escape(words)):
        go({})
    assert not (tmp_path / "data").exists()


def test_a_damaged_page_of_parquet_is_named_by_its_row_and_leaves_no_set(go, tmp_path):
    path = parquet(tmp_path / "corpus/x.parquet", {"text": [f"{i} " + "word " * 200 for i in range(2000)]}, row_group_size=1000)
    raw = path.read_bytes()
    path.write_bytes(raw[:-20_000] + b"\xff" * 10_000 + raw[-10_000:])       # somewhere in the second row group
    with pytest.raises(UserError, match=r"x\.parquet:\d+: not to be read as Parquet"):
        go({})
    assert not (tmp_path / "data/corpus").exists()


def test_only_the_text_of_the_rows_at_hand_is_in_memory(tmp_path):
    path = parquet(tmp_path / "x.parquet", {"text": ["x" * 100_000] * 300, "other": ["y" * 200_000] * 300})     # one row group
    import pyarrow
    before = pyarrow.total_allocated_bytes()
    for number, _ in prepare.read_parquet(path, "text"):
        assert pyarrow.total_allocated_bytes() - before < 2 * 64 * 100_000
    assert number == 300


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({"datasets", "pyarrow", "huggingface_hub"}))      # as if they were not installed
import prepare, config
sys.argv[0] = "prepare.py"
config.run(prepare.main)
"""


def test_text_and_jsonl_need_no_datasets_and_parquet_and_the_hub_say_so(tmp_path):
    write(tmp_path, {**STORY, "x.jsonl": '{"text": "one"}\n{"text": "two"}\n', "x.parquet": "anything"})
    for source in ("a.txt", "x.jsonl"):
        done = script(source, cwd=tmp_path, code=WITHOUT)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
    for source, words in (("x.parquet", b"pip install pyarrow"), ("tinystories", b"pip install datasets")):
        done = script(source, cwd=tmp_path, code=WITHOUT)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and words in done.stderr and not done.stdout
    assert sorted(os.listdir(tmp_path / "data")) == ["a", "x"]


def stub_library(monkeypatch, folder):
    write(folder, {"json/decoder.py": "decode = 1\n", "os.py": "path = 2\n", "test_x.py": "no", "json/data.txt": "no",
                   **{f"{name}/no.py": "no" for name in prepare.NOT_STDLIB}})
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})


def test_stdlib_is_the_library_without_its_tests_and_packages(go, tmp_path, monkeypatch):
    stub_library(monkeypatch, tmp_path / "lib")
    monkeypatch.chdir(tmp_path)
    found = texts(prepare.prepare(quiet=True))
    assert sorted(found["train"] + found["val"]) == ["decode = 1\n", "path = 2\n"]
    assert [name for name, _ in prepare.Files("stdlib", "data").files] == ["json/decoder.py", "os.py"]


@pytest.mark.slow
def test_the_real_stdlib_is_enough_to_train_on(tmp_path):
    start = time.time()
    prepare.prepare(data_dir=tmp_path, quiet=True)
    meta = prepare.load_meta(tmp_path, "stdlib")
    assert 5e6 < meta["train"]["bytes"] < 4e7 and 2e5 < meta["val"]["bytes"] < 0.2 * meta["train"]["bytes"]
    assert meta["baselines"]["xz"] < 3 < meta["baselines"]["unigram"] < 6 < meta["baselines"]["uniform"] < 8.1
    assert time.time() - start < 60


# ---- at most so many tokens --------------------------------------------------------------------------------------

@pytest.mark.parametrize("num_proc", [1, 3])
@pytest.mark.parametrize("max_tokens", [100, 101, 1000, 1001, 4000])
def test_each_split_takes_its_share_and_cuts_its_last_document(go, max_tokens, num_proc, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 300)
    folder = go(many(100), name="whole", val_fraction=0.2)
    whole = {split: [i for ids in read(folder, split) for i in [*ids, EOT]] for split in prepare.SPLITS}
    folder = go(many(100), name="some", val_fraction=0.2, max_tokens=max_tokens, num_proc=num_proc)
    meta = prepare.load_meta("data", "some")
    for split, limit in (("train", max_tokens - round(0.2 * max_tokens)), ("val", round(0.2 * max_tokens))):
        assert limit < len(whole[split])
        got = [i for ids in read(folder, split) for i in [*ids, EOT]]
        assert got[:-1] == whole[split][:len(got) - 1] and limit - 1 <= len(got) <= limit
        assert len(got) == limit or whole[split][limit - 2] == EOT      # one less: another document would be nothing but its end
        assert meta[split]["documents"] == got.count(EOT) == len([ids for ids in read(folder, split) if ids])
        assert meta[split]["bytes"] == len(got) - got.count(EOT)


def test_each_split_gets_its_share_and_at_least_one_token():
    assert prepare.shares(1004, 0.2) == {"train": 803, "val": 201}
    assert prepare.shares(4, 0.99) == prepare.shares(4, 0.01) == {"train": 2, "val": 2}


def test_what_a_full_split_would_get_is_not_tokenised():
    items = [("train", "a"), ("val", "b"), ("train", None), ("val", None)]
    assert list(prepare.in_batches(items, lambda split: split == "val")) == [[("val", "b"), ("val", None)]]


@pytest.mark.parametrize("piece", [1, 1 << 20])         # the cut at the start of a batch, and inside one
def test_no_document_is_nothing_but_its_end(go, piece, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", piece)
    two = go({f"{i}.txt": "ab" for i in range(20)}, val_fraction=0.5, max_tokens=8)
    assert [read(two, split) for split in prepare.SPLITS] == [[[97, 98]]] * 2 and prepare.load_meta("data", "corpus")["val"]["tokens"] == 3


def test_more_tokens_than_there_are_is_all_of_them(go):
    assert {**files_of(go(STORY, name="all")), "meta.json": 0} == {**files_of(go(STORY, name="more", max_tokens=10**9)), "meta.json": 0}


def test_no_more_is_read_than_is_taken(go, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 100)
    seen, documents = [], prepare.Files.documents
    monkeypatch.setattr(prepare.Files, "documents", lambda *args: (seen.append(found) or found for found in documents(*args)))
    go(many(100), val_fraction=0.5, max_tokens=500)
    assert 5 < len(seen) < 40


def test_a_cut_inside_a_character_counts_its_bytes(go):
    folder = go({"a.txt": "🦊" * 50, "b.txt": "🦊" * 50}, val_fraction=0.5, max_tokens=22)
    assert read(folder, "train") == read(folder, "val") == [[*"🦊🦊".encode(), *"🦊".encode()[:2]]]
    assert prepare.load_meta("data", "corpus")["val"]["bytes"] == 10


def test_a_lone_document_is_cut_in_both_of_its_parts(go):
    found = texts(go({"a.txt": "".join(f"{i:3}\n" for i in range(100))}, val_fraction=0.25, max_tokens=36))
    assert found == {"train": ["".join(f"{i:3}\n" for i in range(7))[:26]], "val": [" 75\n 76\n"]}


# ---- meta.json ---------------------------------------------------------------------------------------------------

def test_meta_tells_what_it_was_made_of(go):
    folder = go(STORY)
    meta = prepare.load_meta("data", "corpus")
    assert meta["tokenizer"] == "bytes" and meta["vocab_size"] == 257 and meta["eot"] == EOT and meta["dtype"] == "uint16"
    assert meta["fingerprint"] == prepare.fingerprint(prepare.get_tokenizer("bytes"))
    assert meta["settings"] == {"val_fraction": 0.05, "field": "text", "max_tokens": None}
    assert meta["python"] == platform.python_version()
    for split in prepare.SPLITS:
        assert meta[split]["sha256"] == prepare.hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest()


def test_baselines_are_what_they_say(go):
    folder = go({"a.txt": "aab", "b.txt": "ba"}, val_fraction=0.5)
    train, val = ([i for ids in read(folder, split) for i in [*ids, EOT]] for split in prepare.SPLITS)
    text = bytes(i for i in val if i != EOT)
    bits = -sum(math.log2((train.count(i) + 1) / (len(train) + 257)) for i in val) / len(text)
    assert prepare.load_meta("data", "corpus")["baselines"] == pytest.approx(
        {"uniform": math.log2(257) * len(val) / len(text), "unigram": bits,
         "xz": 8 * len(lzma.compress(text, preset=6)) / len(text)})


def test_xz_looks_only_at_the_beginning_of_a_large_split(go, monkeypatch):
    monkeypatch.setattr(prepare, "XZ_BYTES", 40)
    monkeypatch.setattr(prepare, "PIECE", 16)
    text = "".join(f"{i * i}\n" for i in range(100))
    val = texts(go({"a.txt": text}, val_fraction=0.5))["val"][0].encode("utf-8")
    bits = 8 * len(lzma.compress(val[:40], preset=6)) / 40
    assert prepare.load_meta("data", "corpus")["baselines"]["xz"] == pytest.approx(bits)


def test_a_missing_set_is_reported_with_the_command_and_the_sets_there(go, tmp_path):
    go(STORY, name="here")
    write(tmp_path, {"data/.half.tmp-x-1/meta.json": "{}", "data/bare/train.bin": "xx"})
    for name in ("gone", "bare"):
        with pytest.raises(UserError, match=rf"no data set '{name}' in data/.*python prepare\.py SOURCE --name={name};.* here: here$"):
            prepare.load_meta("data", name)
    for name in ("stdlib", "fineweb-edu"):
        with pytest.raises(UserError, match=rf"python prepare\.py {name};.*none$"):
            prepare.load_meta("nowhere", name)


@pytest.mark.parametrize("file, text, words", [
    ("meta.json", "", "damaged"), ("meta.json", "[]", "damaged"), ("meta.json", '{"format": 1}', "damaged"),
    ("meta.json", b"\xff", "damaged"), ("meta.json", '{"format": 0}', "has format 0, wanted 1"),
    ("train.bin", "1", "1 bytes, its meta.json says"), ("val.bin", "", "0 bytes, its meta.json says")])
def test_a_damaged_set_is_refused_by_file(go, tmp_path, file, text, words):
    write(go(STORY), {file: text})
    with pytest.raises(UserError, match=f"{file}.*{words}.*make it with: python prepare.py"):
        prepare.load_meta("data", "corpus")
    go(STORY)                                       # and made again
    assert prepare.load_meta("data", "corpus")


# ---- a second run ------------------------------------------------------------------------------------------------

def test_a_second_run_on_the_same_text_is_skipped(go, capsys, monkeypatch):
    folder = go(STORY)
    monkeypatch.setattr(prepare, "make", None)
    assert go(STORY, quiet=False) == folder
    assert "up to date" in capsys.readouterr().out


def test_a_renamed_document_counts_as_a_change(go, tmp_path):
    go(STORY)
    before = prepare.load_meta("data", "corpus")["source_sha256"]
    (tmp_path / "corpus/a.txt").rename(tmp_path / "corpus/a2.txt")      # the same order, and another hash
    assert prepare.load_meta(go({}).parent, "corpus")["source_sha256"] != before


@pytest.mark.parametrize("files, settings, changed", [
    ({"a.txt": "other"}, {}, "source_sha256"), ({"new.txt": "new"}, {}, "source_sha256"), ({}, {"val_fraction": 0.5}, "settings"),
    pytest.param({}, {"tokenizer": "gpt2"}, "fingerprint", marks=needs_bpe)])
def test_a_second_run_on_anything_else_is_not_skipped_and_says_why(go, files, settings, changed, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(BPE))
    before = files_of(go(STORY))
    after = files_of(go(files, quiet=False, **settings))
    assert f"changed: {changed}" in capsys.readouterr().out and before["meta.json"] != after["meta.json"]


# ---- whole or not there ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, pathlib, prepare
calls = 0
def deadly(function):
    def call(*args):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call
prepare.Split.write, os.fsync, pathlib.Path.rename = map(deadly, (prepare.Split.write, os.fsync, pathlib.Path.rename))
prepare.prepare("corpus", val_fraction=0.5, quiet=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("call", range(1, 10))
def test_a_killed_run_leaves_an_old_set_or_none(go, tmp_path, call):
    """Steps: write x 2, fsync x 3, rename (in the way), rename old, rename new, done."""
    folder = go(STORY)
    old = files_of(folder)
    done = script(call, cwd=tmp_path, code=KILLED)
    assert done.returncode == (0 if call == 9 else -9), done.stderr
    if call == 8:                                   # between the two renames
        with pytest.raises(UserError, match="no data set"):
            prepare.load_meta("data", "corpus")
    else:
        assert prepare.load_meta("data", "corpus")["settings"]["val_fraction"] == (0.5 if call == 9 else 0.05)
        assert call == 9 or files_of(folder) == old
    go(STORY, val_fraction=0.4)                     # starts anew, and cleans up
    assert prepare.load_meta("data", "corpus")["settings"]["val_fraction"] == 0.4
    assert os.listdir("data") == ["corpus"]


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_a_full_disk_is_one_line_and_leaves_the_old_set(go, call, monkeypatch):
    old = files_of(go(STORY))

    def full(*args, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr({"write": prepare.Split, "fsync": os, "mkdir": Path}[call], call, full)
    with pytest.raises(UserError, match="No space left on device; no data set was made"):
        go({}, val_fraction=0.5)
    assert os.listdir("data") == ["corpus"] and files_of(Path("data/corpus")) == old


def test_a_file_that_may_not_grow_is_one_line_and_exit_code_2(tmp_path):
    resource = pytest.importorskip("resource")
    write(tmp_path / "corpus", many(50))
    done = script("corpus", cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"File too large" in done.stderr
    assert os.listdir(tmp_path / "data") == []


def test_a_data_dir_that_is_a_file_is_one_line(go, tmp_path):
    write(tmp_path, {"data": "I am a file"})
    with pytest.raises(UserError, match="data.*no data set was made"):
        go(STORY)


def test_a_folder_with_other_files_is_never_replaced(go, tmp_path):
    write(tmp_path, {"data/corpus/input.txt": "mine", "data/corpus/meta.json": "{}"})
    with pytest.raises(UserError, match="input.txt"):
        go(STORY)
    assert (tmp_path / "data/corpus/input.txt").read_text("utf-8") == "mine"


@pytest.mark.skipif(os.name != "posix", reason="cannot ask for a process there")
def test_leftovers_go_unless_their_process_lives(go, tmp_path):
    host = platform.node()
    write(tmp_path, {f"data/{name}/train.bin": "x" for name in (
        f".x.tmp-{host}-{2**22 + 1}", f".x.old-{host}-{2**22 + 1}", f".x.tmp-{host}-{os.getppid()}",
        ".x.tmp-elsewhere-7", "x.tmp-1")})
    go(STORY)
    assert sorted(os.listdir("data")) == sorted([f".x.tmp-{host}-{os.getppid()}", ".x.tmp-elsewhere-7", "corpus", "x.tmp-1"])


def test_two_processes_at_once_both_end_with_a_whole_set(go, tmp_path):
    go(STORY)
    code = "import prepare\nfor i in range(10): prepare.prepare('corpus', val_fraction=0.{}+i/100, quiet=True)"
    both = [subprocess.Popen([sys.executable, "-c", code.format(n)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
            for n in (1, 5)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert prepare.load_meta("data", "corpus") and os.listdir("data") == ["corpus"]


def test_a_set_that_another_process_moves_away_first_is_no_error(go, tmp_path, monkeypatch):
    go(STORY)
    rename = Path.rename

    def too_late(path, target):
        if path.name == "corpus":
            rename(path, tmp_path / "taken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", too_late)
    go({}, val_fraction=0.5)
    assert prepare.load_meta("data", "corpus")["settings"]["val_fraction"] == 0.5


# ---- GPT-2's tokenizer -------------------------------------------------------------------------------------------

@needs_bpe
def test_gpt2_gives_gpt2s_ids(go, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(BPE))
    folder = go({"a.txt": "Hello, world!", "b.txt": "<|endoftext|>", "c.txt": " 🦊\n"}, tokenizer="gpt2", val_fraction=1e-9)
    assert read(folder, "train") == [[15496, 11, 995, 0], [27, 91, 437, 1659, 5239, 91, 29]]        # the marker is text
    meta = prepare.load_meta("data", "corpus")
    assert (meta["dtype"], meta["vocab_size"], meta["eot"]) == ("uint16", 50257, 50256)
    assert np.fromfile(folder / "train.bin", "<u2").tolist()[4::8] == [50256, 50256]


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_bpe)])
def test_decoding_gives_the_text_back_without_a_space_more_or_less(tokenizer, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(BPE))
    encoding = prepare.get_tokenizer(tokenizer)
    for text in ("", "a", "Letter first", " space first", "  two", "\nline first", "\r\n", "\t", "🦊", "<|endoftext|>", "ends \n "):
        ids = prepare.encode(encoding, [("val", text), ("val", None)])["val"][0].tolist()
        assert ids[-1] == encoding.eot_token and ids.count(encoding.eot_token) == 1 and encoding.decode(ids[:-1]) == text


# ---- tokenizers that are not there -------------------------------------------------------------------------------

def test_a_dead_line_is_given_up_in_time(monkeypatch, tmp_path):
    assert prepare.PATIENCE < 9                     # the promise is 10 seconds, all told
    monkeypatch.setattr(prepare, "PATIENCE", 0.1)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(2))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    start = time.time()
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer=bytes"):
        prepare.get_tokenizer("gpt2")
    assert time.time() - start < 1


CAN_UNSHARE = shutil.which("unshare") and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_UNSHARE, reason="the network cannot be taken away here")
def test_without_a_network_bytes_work_and_gpt2_says_what_to_do(tmp_path):
    write(tmp_path, STORY)
    run = ["unshare", "-n", sys.executable, str(ROOT / "prepare.py"), "a.txt"]
    for more, code, words in (([], 0, b""), (["--tokenizer=gpt2"], 2, b"TIKTOKEN_CACHE_DIR")):
        env = {**os.environ, "TIKTOKEN_CACHE_DIR": "cache"}
        done = subprocess.run(run + more, cwd=tmp_path, env=env, capture_output=True, timeout=60)
        assert done.returncode == code and done.stderr.count(b"\n") == (code == 2) and words in done.stderr


def test_no_network_names_the_file_to_put_there_and_the_default(tmp_path):
    write(tmp_path, STORY)
    start = time.time()
    done = script("a.txt", "--tokenizer=cl100k_base", cwd=tmp_path,
                  env={"TIKTOKEN_CACHE_DIR": "cache", "HTTPS_PROXY": "http://127.0.0.1:9"})
    assert time.time() - start < 10 and done.returncode == 2
    message = done.stderr.decode("utf-8")
    assert message.count("\n") == 1 and "9b5ad71b2ce5302211f9c61530b329a4922fc6a4" in message and "--tokenizer=bytes" in message
    assert not (tmp_path / "data").exists()


@needs_bpe
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_vocabulary_is_named(tmp_path, monkeypatch, damage):
    for path in BPE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bad = tmp_path / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    bad.write_bytes(bad.read_bytes()[:1000] if damage == "cut" else b"")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", None)
    tiktoken.registry.ENCODINGS.pop("gpt2")         # nothing kept from another test
    with pytest.raises(UserError, match=f"{bad.name} is damaged"):
        prepare.get_tokenizer("gpt2")


def test_the_fingerprint_knows_tokenizers_apart():
    def made(pattern=".", ranks=((b"a", 0), (b"b", 1)), end=2):
        return prepare.fingerprint(tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=dict(ranks),
                                                     special_tokens={"<|endoftext|>": end}))

    assert made() == made(ranks=((b"b", 1), (b"a", 0)))
    assert len({made(), made(pattern=".."), made(ranks=((b"b", 0), (b"a", 1))), made(end=3)}) == 4


# ---- as a command ------------------------------------------------------------------------------------------------

def test_it_works_where_text_is_ascii_by_default(tmp_path):
    """LC_ALL=C: names and contents beyond ASCII give the same files; and a pipe gets no progress bar."""
    write(tmp_path, {f"🦊/{name}": text for name, text in {**STORY, **many(20), "é.txt": "é"}.items()})
    for data_dir, env in (("utf8", {"PYTHONUTF8": "1"}), ("c", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})):
        done = script("🦊", f"--data_dir={data_dir}", cwd=tmp_path, env=env)
        assert (done.returncode, done.stderr) == (0, b"") and "--dataset='🦊'".encode() in done.stdout
    for file in ("train.bin", "val.bin"):
        assert (tmp_path / "c/🦊" / file).read_bytes() == (tmp_path / "utf8/🦊" / file).read_bytes()


def test_the_summary_ends_with_the_next_command(go, capsys):
    go(STORY, name="my set", quiet=False)
    assert capsys.readouterr().out.endswith("\nnext: python train.py --dataset='my set'\n")


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    for args in (["nowhere.txt"], ["a", "b"], ["--tokeniser=bytes"]):
        done = script(*args, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and not done.stdout


def test_a_python_file_can_be_the_source(tmp_path):
    write(tmp_path, STORY)
    assert script("d.py", "--val_fraction=0.4", cwd=tmp_path).returncode == 0
    assert texts(tmp_path / "data/d") == {"train": ["print('<|endoftext|>')\n\n"], "val": ["\n"]}


def test_importing_does_nothing_and_needs_little(tmp_path):
    done = script(cwd=tmp_path, code="import sys, prepare; print(*{'torch', 'datasets'} & set(sys.modules))")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\n", b"") and not any(tmp_path.iterdir())
