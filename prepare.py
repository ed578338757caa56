"""Turns text into the token files that train.py reads: `data/NAME/train.bin`, `val.bin` and `meta.json`.

    python prepare.py [SOURCE] [--name=NAME] [--tokenizer=bytes] [--val_fraction=0.05]
    python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=1e9 --num_proc=8
    python prepare.py phop [--hops=4]             # or addition [--digits=4]: made on the spot, where depth has to pay
    python prepare.py weights out/gpt_tiny config/rrt_tiny.py --out_dir=out/rrt_start    # a dense run becomes a recursive model

SOURCE is `stdlib` (the default: the source code of Python's own library, so nothing is downloaded), a text file, a JSONL
(.jsonl) or Parquet (.parquet) file, a folder of such files, or a set on the Hugging Face Hub by its short name:
`shakespeare`, `tinystories`, `openwebtext`, `fineweb-edu`. A short name wins over a file of that name; write ./shakespeare
for the file. A file is one document, in JSONL a line is one, in Parquet and on the Hub a row; empty ones are left out.
`phop` and `addition` are synthetic: rows of one length, in which only answers count (a section of this file says how).
fineweb-edu is SmolLM's corpus, and trains here with GPT-2's vocabulary, as SmolLM's shapes do: tiktoken has none of 49,152.
A .bin file is nothing but token ids, little-endian uint16 or uint32, with one end-of-text token after each document.
Documents are packed: a training window may hold several, and they see each other.
The letters `<|endoftext|>` inside a document are ordinary text, never that token.
`weights RUN CONFIG` makes starting weights for train.py's --init_from=; its flags are the keys of a config and --shared=.
"""
import codecs
import errno
import hashlib
import inspect
import itertools
import json
import logging
import lzma
import math
import os
import platform
import queue
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

import config
from config import UserError, key

FORMAT = 1                  # of a data set's folder; load_meta refuses any other
SPLITS = ("train", "val")
PIECE = 1 << 20             # bytes of text read, tokenised and written at a time: memory does not grow with the corpus
XZ_BYTES = 1 << 19          # xz takes four times as long as a tokenizer: enough for scale, not for a benchmark of xz
PATIENCE = 7                # seconds for a first answer from the network; libraries retry for minutes, or wait for ever
STALL = 60                  # seconds for each further answer
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


@dataclass
class PrepareConfig:
    """Data set"""
    name: str | None = key(None, "Folder in data_dir to write; None: the source's own name.")
    tokenizer: str = key("bytes", "bytes (257 tokens, no download), gpt2, or another of tiktoken's encodings.")
    val_fraction: float = key(0.05, "Share of the documents for validation, chosen by a hash of their names.")
    max_tokens: int | None = key(None, "Total of both splits; each takes its share of it and cuts its last document to fit.")
    num_proc: int = key(1, "Texts tokenised at a time, in threads. The files are the same for any number.")
    field: str = key("text", "Where the text is: a field of JSONL, a column of Parquet or of a set on the Hub.")
    revision: str | None = key(None, "Version of a set on the Hub: a branch, tag or commit; None: what prepare.py names.")
    data_dir: str = key("data", "Where the data sets are.")
    seed: int = key(0, "phop, addition: all examples follow from it.")
    hops: int = key(4, "phop: rows ask for 1 to this many hops.")
    digits: int = key(4, "addition: numbers of 2 to this many digits.")


# ---- tokenizers --------------------------------------------------------------------------------------------------

def get_tokenizer(name):
    """A tiktoken.Encoding: a token per byte ("bytes"), or one of tiktoken's own. UserError: unknown, or not to be had."""
    if name == "bytes":
        # Nothing is merged, so the pattern decides only the speed: short pieces stay in the processor's cache.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"unknown tokenizer '{name}'; choose bytes, {', '.join(tiktoken.list_encoding_names())}")
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache"))
    cached = os.listdir(folder) if folder.is_dir() else []
    try:
        return start(lambda: tiktoken.get_encoding(name)).result(timeout=PATIENCE)
    except Exception as error:
        raise UserError(f"tokenizer '{name}': {why_not_loaded(error, folder, cached)}, or prepare the data with --tokenizer=bytes") from None


def start(function):
    """A Future of function(), which runs in a thread that nobody has to wait for."""
    future = Future()

    def work():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def why_not_loaded(error, folder, cached):
    """What happened and what to do. tiktoken deletes a cached file whose hash is wrong and downloads it again."""
    url = getattr(getattr(error, "request", None), "url", None)
    file = hashlib.sha1(url.encode()).hexdigest() if url else None
    damaged = [old for old in cached if old == file or not (folder / old).exists()]
    if damaged:
        return f"{folder / damaged[0]} is damaged and there is no download ({type(error).__name__}); put a good copy there"
    return (f"not in {folder}, and no download ({type(error).__name__}); put its files in a folder named by "
            f"TIKTOKEN_CACHE_DIR, each named by the sha1 of its URL{f' ({url} as {file})' if url else ''}")


def fingerprint(encoding):
    """A short hash of all that decides which ids a text gets."""
    tables = [sorted(table.items()) for table in (encoding._mergeable_ranks, encoding._special_tokens)]
    return hashlib.sha256(repr((tables, encoding._pat_str)).encode()).hexdigest()[:16]


# ---- documents: a name, and the text in pieces -------------------------------------------------------------------

class Files:
    """A file, or a folder of them. A first look at every byte tells what is text, and whether anything changed."""

    def __init__(self, source, data_dir):
        self.files, self.bytes, skipped, hashes = [], 0, Counter(), hashlib.sha256()
        for name, path in find_files(source, data_dir, skipped):
            try:
                digest, size = look(path)
            except ValueError as problem:
                if path == Path(source):
                    raise UserError(f"{source} is {problem}") from None
                skipped[str(problem)] += 1
                continue
            self.files.append((name, path))
            self.bytes += size
            hashes.update(os.fsencode(name) + b"\0" + digest)
        if any(path.suffix.lower() in RECORDS for _, path in self.files):
            self.bytes = None           # how much of it is text shows only when it is read
        self.identity = {"source_sha256": hashes.hexdigest()}
        left_out = ", ".join(f"{n} {problem}" for problem, n in (+skipped).items())
        self.title = f"{source}: {len(self.files):,} files{f' (left out: {left_out})' if left_out else ''}"

    def documents(self, field):
        """(name, pieces of text) of every document."""
        for name, path in self.files:
            read = RECORDS.get(path.suffix.lower())
            if read:
                yield from ((f"{name}:{number}", [text]) for number, text in read(path, field))
            else:
                yield name, TextFile(path)


def find_files(source, data_dir, skipped):
    """[(document name, path)] in order of name. Counts in `skipped` what is not even looked at."""
    root = Path(sysconfig.get_paths()["stdlib"] if source == "stdlib" else source)
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise UserError(f"no file or folder '{source}'{config.near(source, (*HUB, *TASKS))}; SOURCE is stdlib, a text file, "
                        f"a .jsonl or .parquet file, a folder of them, {', '.join(TASKS)}, or a set on the Hub: {', '.join(HUB)}")
    found = []
    for folder, folders, names in os.walk(root, onerror=lambda error: skipped.update(["unreadable"])):
        if source == "stdlib":
            folders[:] = set(folders) - set(NOT_STDLIB)
            names = [name for name in names if name.endswith(".py") and not name.startswith("test_")]
        skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = [f for f in folders if f[0] != "." and Path(folder, f).resolve() != Path(data_dir).resolve()]
        paths = (Path(folder, name) for name in names if name[0] != ".")
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(found)


def look(path):
    """The sha256 of a file's bytes and their number; ValueError says why it is no document. Contents decide, not names;
    but what is wrong in JSONL and Parquet is an error, with its place, when it is read."""
    is_text, sha256, size = path.suffix.lower() not in RECORDS, hashlib.sha256(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        if not path.is_file():          # opening a pipe would wait for ever
            raise ValueError("not a file")
        with open(path, "rb") as file:
            while raw := file.read(PIECE):
                sha256.update(raw)
                size += len(raw)
                if is_text and b"\0" in raw:
                    raise ValueError("not text")
                decoder.decode(raw if is_text else b"")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except OSError:
        raise ValueError("unreadable") from None
    if not size:
        raise ValueError("empty")
    return sha256.digest(), size


class TextFile:
    """A UTF-8 file in pieces of whole lines, every line end as it is; as often as one asks."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path, "rb") as file:
            while raw := file.read(PIECE):
                yield (raw if raw.endswith(b"\n") else raw + file.readline()).decode("utf-8")


def read_jsonl(path, field):
    """(line number, text) of each line that has text."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not a line of JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(f"{where}: wanted an object with the field '{field}', got {type(record).__name__}")
            if text := text_of(record, field, where):
                # JSON can name half of a surrogate pair, UTF-8 cannot: it becomes a question mark.
                yield number, text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_of(record, field, where):
    """A record's text; "" for null."""
    text = record.get(field)
    if isinstance(text, str):
        return text
    if text is None and field in record:
        return ""
    problem = f"field '{field}' holds no text" if field in record else f"no field '{field}'"
    raise UserError(f"{where}: {problem}; fields here: {', '.join(record) or 'none'}; choose one with --field")


def read_parquet(path, field):
    """(row number, text) of each row that has text. A few rows are in memory at a time."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: Parquet needs the package pyarrow; install it with: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=PIECE) as file:
            columns = [field] if field in file.schema_arrow.names else None     # None: all, and the error names them
            for batch in file.iter_batches(batch_size=64, columns=columns, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    if text := text_of(record, field, f"{path}:{number}"):
                        yield number, text
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}:{number + 1}: not to be read as Parquet ({one_line(error)}); get a good copy") from None


RECORDS = {".jsonl": read_jsonl, ".parquet": read_parquet}      # files that hold many documents, by their suffix


# ---- sets on the Hugging Face Hub --------------------------------------------------------------------------------

# Only splits made for training, so that other people's validation splits stay unseen; tiny Shakespeare is one text in
# three parts, of which the last becomes ours. Where the repository holds a loading script, which `datasets` no longer
# runs, the Hub's own conversion to Parquet is read.
HUB = {"shakespeare": dict(path="karpathy/tiny_shakespeare", config=None, split="train+validation+test",
                           revision="refs/convert/parquet"),
       "tinystories": dict(path="roneneldan/TinyStories", config=None, split="train", revision=None),
       "openwebtext": dict(path="Skylion007/openwebtext", config="plain_text", split="train", revision=None),
       "fineweb-edu": dict(path="HuggingFaceTB/smollm-corpus", config="fineweb-edu-dedup", split="train", revision=None)}


class HubSet:
    """A set on the Hub, streamed: one pass, and nothing but the .bin files on the disk."""

    bytes = None        # not known before the end

    def __init__(self, source, revision):
        self.source, self.hub = source, {**HUB[source], **({"revision": revision} if revision else {})}
        self.identity = {"hub": self.hub}
        self.title = f"{source}: " + ", ".join(str(value) for value in self.hub.values() if value)

    def documents(self, field):
        """(name, [text]) of every row that has text; its name is its running number."""
        number = 0
        try:
            for number, row in enumerate(patiently(self.load, self.ask), 1):
                if text := text_of(row, field, f"{self.source}:{number}"):
                    yield f"{self.source}:{number}", [text]
        except UserError:
            raise
        except Exception as error:
            todo = ("install datasets: pip install datasets" if isinstance(error, ImportError) else
                    "connect and run this again, or give a text, JSONL or Parquet file as SOURCE")
            raise UserError(f"{self.source}: {self.hub['path']} on the Hugging Face Hub, row {number + 1:,}: "
                            f"{one_line(error)}; {todo}") from None

    def load(self):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        import datasets
        for library in ("datasets", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)      # not a line for each retry
        for split in self.hub["split"].split("+"):                  # `datasets` before version 5 streams no sum of splits
            yield from datasets.load_dataset(self.hub["path"], self.hub["config"], split=split,
                                             revision=self.hub["revision"], streaming=True)

    def ask(self):
        import huggingface_hub
        return huggingface_hub.dataset_info(self.hub["path"], revision=self.hub["revision"], timeout=PATIENCE)


def patiently(load, ask):
    """load()'s rows, fetched by a thread of its own; TimeoutError when they stop coming. A long wait for the first is fine
    where ask() gets an answer meanwhile: a slow line is not a dead one."""
    fetched, enough = queue.Queue(64), threading.Event()

    def fetch():
        end = StopIteration()
        try:
            for row in load():
                fetched.put(row)
                if enough.is_set():
                    return
        except Exception as error:
            end = error
        fetched.put(end)

    threading.Thread(target=fetch, daemon=True).start()
    answer, waited = start(ask), PATIENCE
    try:
        while True:
            try:
                row = fetched.get(timeout=waited)
            except queue.Empty:
                if waited == STALL or not answer.done() or answer.exception():
                    raise TimeoutError(f"nothing came for {waited} seconds") from None
            else:
                if isinstance(row, StopIteration):
                    return
                if isinstance(row, Exception):
                    raise row
                yield row
            waited = STALL
    finally:
        enough.set()
        while not fetched.empty():      # the thread may wait for a place in it
            fetched.get()


def one_line(error):
    return config.clip(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)


# ---- synthetic sets: rows in which only answers count --------------------------------------------------------------

# A token is two bytes: its id below, above it the id of the answer that is asked for once it has been read (0: none is).
# Rows stand alone and have one length, so a training window is a row. A hash of the example decides its split, so none is
# in both; validation rows stand in order of difficulty, a group after the other.
EXAMPLE_TOKENS = 5_000_000  # of both splits, where max_tokens does not say: a few minutes of training on a laptop, once over
MOST_TOKENS = 100_000_000   # a set is made in memory, at up to some 70 bytes a token
N_LETTERS = 4               # few: each comes again soon, and hops stay short
ROW = 48                    # tokens: four hops go back a dozen, and short rows mean many steps a minute


class Task(NamedTuple):
    level: str              # what the groups count, and the key that says how far they go is its plural
    first: int              # the lowest level
    examples: Callable      # (generator, level, n) -> texts and answers (n, width) as ASCII, 0 = none asked; what decides the split (n)
    tables: dict            # {name: what a table sees to guess an answer: (how many of the last tokens, whether the place in the example)}
    hint: str               # how to ask a trained model, for sample.py


def hop_examples(rng, hops, n):
    """p-hop induction [Sanford et al. 2024, "Transformers, parallel computation, and logarithmic depth"]: the number of hops,
    then letters. A hop goes from a letter to its last occurrence before, and one place on; the answer after each letter is
    the one where that many hops end, and none where they leave the row. In "2abcab" the second b hops to c, and that c has
    not been seen before, so nothing is asked there. No letter stands beside itself, so a hop always moves."""
    letters = np.cumsum(rng.integers(1, N_LETTERS, (n, ROW - 1)), axis=1) % N_LETTERS
    row, last, back = np.arange(n), np.full((n, N_LETTERS), -2), np.empty_like(letters)
    for i, letter in enumerate(letters.T):
        back[:, i] = last[row, letter] + 1                                      # -1: never seen before
        last[row, letter] = i
    end = np.tile(np.arange(ROW - 1), (n, 1))
    for _ in range(hops):
        end = np.where(end < 0, -1, back[row[:, None], end])
    text = ord("a") + letters
    answers = np.where(end < 0, 0, text[row[:, None], end])
    first = np.full((n, 1), ord("0") + hops)
    return np.hstack([first, text]), np.hstack([0 * first, answers]), letters.astype(np.uint64) @ powers(ROW - 1)


def sum_examples(rng, digits, n):
    """`17+25=240;`: the sum has a digit more than the numbers, and its units come first, because carries come from there: a
    model that writes from left to right then has seen all that the next digit needs."""
    pair = rng.integers(0, 10**digits, (2, n))
    written = lambda number, width: ord("0") + number[:, None] // 10 ** np.arange(width) % 10          # units first
    sign = lambda mark: np.full((n, 1), ord(mark))
    total = written(pair.sum(0), digits + 1)
    text = np.hstack([written(pair[0], digits)[:, ::-1], sign("+"), written(pair[1], digits)[:, ::-1], sign("="), total, sign(";")])
    answers = np.zeros_like(text)
    answers[:, -digits - 3 : -2] = total                                        # each asked for one place before it stands there
    return text, answers, (pair[0] * 10**digits + pair[1]).astype(np.uint64)


def powers(n, base=0x9E3779B97F4A7C15):
    """base ** (1 .. n), modulo 2^64."""
    return np.cumprod(np.full(n, base, dtype=np.uint64))


def places(keys):
    """place(), of many whole numbers at once (the finish of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        keys = (keys ^ keys >> np.uint64(shift)) * np.uint64(factor)
    return keys / 2**64


def packed(text, answers):
    """Rows of ROW tokens, each of as many whole examples as it holds; what is left over of a row is `;`, and asks nothing."""
    n_each = ROW // text.shape[1]
    n = len(text) // n_each
    rows = np.full((n, ROW), ord(";"))
    rows[:, : n_each * text.shape[1]] = (text + 256 * answers)[: n * n_each].reshape(n, n_each * text.shape[1])
    return rows.astype("<u2")


# Sums begin at two digits: of a hundred pairs of single ones, five would be the whole validation group.
TASKS = {"phop": Task("hop", 1, hop_examples, {"by hops and letter": (1, False), "by hops and 4 letters": (4, False)},
                      "phop answers after every letter; try --start=1abcab --max_new_tokens=1 --temperature=0"),
         "addition": Task("digit", 2, sum_examples, {"by digits and place": (0, True), "by digits, place and character": (1, True)},
                          "addition answers a sum, units first; try --start=17+25= --max_new_tokens=3 --temperature=0")}


class Made:
    """A synthetic set: TASKS[source] at levels first .. most, as many tokens of each."""

    bytes = None

    def __init__(self, source, seed, most):
        self.task, self.seed, self.levels = TASKS[source], seed, range(TASKS[source].first, most + 1)
        if not self.task.first <= most <= 9:
            raise UserError(f"{self.task.level}s={most} is out of range; choose {self.task.first} to 9")
        # The tables' names are in it so that a set made before there were any is made again.
        self.identity = {"made": {"source": source, "seed": seed, f"{self.task.level}s": most, "row": ROW, "tables": [*self.task.tables]}}
        self.title = f"{source}: {self.task.first} to {most} {self.task.level}s, seed {seed}"

    def write(self, folder, val_fraction, max_tokens):
        """Both .bin files. Returns their part of meta.json."""
        rows, different, widths = {split: {} for split in SPLITS}, {}, {}
        n = math.ceil((max_tokens or EXAMPLE_TOKENS) / ROW / len(self.levels))
        for level in self.levels:
            name = f"{level} {self.task.level}{'s' * (level > 1)}"
            widths[name] = self.width(level)
            each = ROW // widths[name]
            text, answers, keys = self.task.examples(np.random.default_rng([self.seed, level]), level, n * each)
            is_val = places(keys) < val_fraction
            for split, chosen in (("train", ~is_val), ("val", is_val)):
                rows[split][name] = packed(text[chosen], answers[chosen])
            different[name] = len(np.unique(keys[is_val][: len(rows["val"][name]) * each]))
        for split in SPLITS:
            if short := [name for name, some in rows[split].items() if not len(some)]:
                raise UserError(f"{self.title}: no {split} row of {short[0]}; give more max_tokens, or a val_fraction nearer to one half")
        return {"dtype": "uint16", "row": ROW, "groups": {name: len(some) for name, some in rows["val"].items()}, "different": different,
                **{split: write_rows(folder / f"{split}.bin", np.concatenate([*rows[split].values()])) for split in SPLITS},
                **guesses(rows, self.task.tables, widths)}

    def width(self, level):
        """Tokens of an example."""
        return self.task.examples(np.random.default_rng(0), level, 1)[0].shape[1]


def write_rows(path, rows):
    raw = rows.tobytes()
    with open(path, "wb") as file:
        file.write(raw)
        sync(file)
    return {"tokens": rows.size, "documents": len(rows), "bytes": rows.size, "answers": int((rows >> 8 > 0).sum()),
            "sha256": hashlib.sha256(raw).hexdigest()}


def guesses(rows, tables, widths):
    """Share of the validation answers that are right without a model, in all and by group: always the commonest answer of
    training; the commonest after the same token; and the commonest where a group's own table saw the same. A model has
    learned to hop, or to carry, only where it is better than they are. rows: {split: {group: its rows}}."""
    split_up = np.cumsum([(some >> 8 > 0).sum() for some in rows["val"].values()])[:-1]
    pooled = [np.concatenate([*rows[split].values()]) for split in SPLITS]
    hits = {name: np.split(table_hits(*pooled, back), split_up) for name, back in (("commonest", 0), ("by token", 1))}
    for name, (back, by_place) in tables.items():
        hits[name] = [table_hits(rows["train"][group], rows["val"][group], back, widths[group] if by_place else 1) for group in rows["val"]]
    return {"baselines": {name: float(np.concatenate(of).mean()) for name, of in hits.items()},
            "baselines_by_group": {name: {group: float(some.mean()) for group, some in zip(rows["val"], of) if len(some)} for name, of in hits.items()}}


def table_hits(train, val, back, width=1):
    """For each answer asked for in the rows `val`, whether a table knows it that sees the last `back` tokens and the place
    modulo `width`: it says what was commonest there in `train`, and where it saw nothing the commonest of all. Every answer
    stands as a character in some row."""
    met = np.flatnonzero(np.bincount(train.ravel() & 255, minlength=256) + np.bincount(val.ravel() & 255, minlength=256))
    n = len(met) + 1
    small = np.zeros(256, np.int32)                                             # few characters are in use, so a table is small; 0: before the row
    small[met] = np.arange(1, n)

    def seen(rows):
        asked, key = rows >> 8 > 0, np.broadcast_to(np.arange(ROW, dtype=np.int32) % width, rows.shape)
        for j in range(back):
            key = key * n + np.pad(small[rows & 255], ((0, 0), (j, 0)))[:, :ROW]
        return key[asked], small[rows[asked] >> 8]

    (key, answer), (val_key, val_answer) = seen(train), seen(val)
    counts = np.bincount(key * n + answer, minlength=width * n**back * n).reshape(-1, n)
    return np.where(counts.any(1), counts.argmax(1), counts.sum(0).argmax())[val_key] == val_answer


def guess_rows(meta):
    """(name, share, {group: share}) of each guess; no groups in sets that were made before they were counted."""
    return [(name, share, meta.get("baselines_by_group", {}).get(name, {})) for name, share in meta["baselines"].items()]


def guess_lines(meta):
    width = max(map(len, meta["baselines"]))
    return [f"{name:{width}} {share:.3f}" + (" | " + "  ".join(f"{group}: {part:.3f}" for group, part in groups.items()) if groups else "")
            for name, share, groups in guess_rows(meta)]


# ---- which document goes where -----------------------------------------------------------------------------------

def place(name):
    """A number in [0, 1) that the name alone decides: a document stays in its split whatever else comes or goes."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def labelled(documents, val_fraction, title):
    """(split, text) for each piece of text, (split, None) where a document ends. One pass, and no split stays empty: the
    last document goes to the one that would be, and a lone document is cut in two."""
    empty, held = set(SPLITS), None
    for name, pieces in documents:
        if held:
            yield from whole(*held)
            empty.discard(held[0])
        held = "val" if place(name) < val_fraction else "train", pieces
    split, pieces = held or (None, [])
    if len(empty) == 1:
        yield from whole(*empty, pieces)
    elif not empty:
        yield from whole(split, pieces)
    else:
        chars = sum(map(len, pieces))
        if chars < 2:
            raise UserError(f"{title}: {chars} characters of text are too few for two splits")
        yield from halves(pieces, val_fraction)


def whole(split, pieces):
    yield from ((split, text) for text in pieces)
    yield split, None


def halves(pieces, val_fraction):
    """A lone document: the last val_fraction of its lines, or of the characters of its one line, are for validation."""
    by_line = sum(len(text.splitlines()) for text in pieces) > 1
    units = (lambda text: text.splitlines(keepends=True)) if by_line else list
    total = sum(len(units(text)) for text in pieces)
    left = total - min(total - 1, max(1, round(val_fraction * total)))      # what train still gets
    for text in pieces:
        head, tail = units(text)[:left], units(text)[left:]
        left -= len(head)
        if head:
            yield "train", "".join(head)
        if head and not left:
            yield "train", None
        if tail:
            yield "val", "".join(tail)
    yield "val", None


# ---- tokens ------------------------------------------------------------------------------------------------------

def in_batches(items, wanted=lambda split: True):
    """Lists of about PIECE characters: a thousand short documents are one piece of work."""
    batch, size = [], 0
    for split, text in items:
        if wanted(split):
            batch.append((split, text))
        size += len(text or "") + 16
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(encoding, batch):
    """{split: (ids, the text as UTF-8, its length, how many documents end in it)}; train's text itself is not needed."""
    encoded, end = {}, np.array([encoding.eot_token], dtype=np.uint32)
    for split in {split for split, _ in batch}:
        texts = [text for where, text in batch if where == split]
        ids = [end if text is None else encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts if text)
        raw = "".join(text or "" for text in texts).encode() if split == "val" else b""
        encoded[split] = np.concatenate(ids), raw, size, texts.count(None)
    return encoded


def encode_all(encoding, batches, num_proc):
    """encode() of each, in order, with few in memory. Threads, because tiktoken works without Python's lock and a second one
    made it 1.7 times as fast; a second process gained less, by sending texts and ids to and fro."""
    with ThreadPoolExecutor(num_proc) as pool:
        waiting = deque()
        for batch in batches:
            waiting.append(pool.submit(encode, encoding, batch))
            if len(waiting) > num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Split:
    """A .bin file while it is written, and what meta.json says of it. It is full at `limit` tokens: the document that
    would go beyond is cut, and ended."""

    def __init__(self, path, encoding, limit):
        self.file, self.sha256, self.encoding, self.limit = open(path, "wb"), hashlib.sha256(), encoding, limit
        self.dtype = np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
        self.counts = np.zeros(encoding.n_vocab, dtype=np.int64)
        self.tokens = self.documents = self.bytes = 0
        self.last, self.full = encoding.eot_token, False

    def write(self, ids, text, size, documents):
        """Returns the text that was kept, its length and its number of tokens."""
        if self.full:
            return b"", 0, 0
        if self.tokens + len(ids) >= self.limit:
            ids, text, size, documents = self.cut(ids)
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.sha256.update(raw)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.last = ids[-1] if len(ids) else self.last
        self.tokens += len(ids)
        self.bytes += size
        self.documents += documents
        return text, size, len(ids)

    def cut(self, ids):
        """What write() takes, of the ids that fit. No document is nothing but its end: then a token's place stays free."""
        end, ids, self.full = self.encoding.eot_token, ids[:self.limit - self.tokens].copy(), True
        if ids[-1] != end:
            ids[-1] = end
            if (ids[-2] if len(ids) > 1 else self.last) == end:
                ids = ids[:-1]
        text = self.encoding.decode_bytes(ids[ids != end].tolist())
        return ids, text, len(text), int((ids == end).sum())

    def summary(self):
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "sha256": self.sha256.hexdigest()}


def shares(max_tokens, val_fraction):
    """{split: its most tokens}: at least one, and its end."""
    if max_tokens is None:
        return dict.fromkeys(SPLITS, math.inf)
    val = min(max(2, round(val_fraction * max_tokens)), max_tokens - 2)
    return {"train": max_tokens - val, "val": val}


def baselines(train, val, xz):
    """Bits per byte of the validation text without a model: for scale. (xz may look back over all that it is shown.)"""
    share = (train.counts + 1) / (train.counts + 1).sum()       # add-one smoothing: no token is impossible
    return {"uniform": float(np.log2(len(val.counts)) * val.counts.sum() / val.bytes),
            "unigram": float(-(val.counts * np.log2(share)).sum() / val.bytes), "xz": xz}


# ---- a data set's folder: whole, or not there --------------------------------------------------------------------

def write_set(folder, encoding, items, num_proc, limits, bar):
    """Both .bin files. Returns their part of meta.json."""
    splits = {name: Split(folder / f"{name}.bin", encoding, limits[name]) for name in SPLITS}
    xz, xz_in, xz_out = lzma.LZMACompressor(preset=6), 0, 0
    try:
        for encoded in encode_all(encoding, in_batches(items, lambda name: not splits[name].full), num_proc):
            for name, found in encoded.items():
                text, n_bytes, n_tokens = splits[name].write(*found)
                bar.update(n_bytes if limits[name] == math.inf else n_tokens)
                sample = text[:XZ_BYTES - xz_in] if name == "val" else b""
                xz_in += len(sample)
                xz_out += len(xz.compress(sample))
            if all(split.full for split in splits.values()):
                break
        for split in splits.values():
            sync(split.file)
    finally:
        for split in splits.values():
            split.file.close()
    bits = 8 * (xz_out + len(xz.flush())) / xz_in
    return {**{name: split.summary() for name, split in splits.items()}, "dtype": splits["train"].dtype.name,
            "baselines": baselines(splits["train"], splits["val"], bits)}


def sync(file):
    file.flush()
    os.fsync(file.fileno())


def make(final, about, write):
    """Let write(folder) make all in a folder of this process's own, and rename it when it is on the disk. Returns meta.json's
    contents."""
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final.parent)
    work = final.parent / f".{final.name}.tmp-{platform.node()}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        written = write(work)
        # What was taken of a stream stands for it: a stream is not read twice.
        taken = hashlib.sha256("".join(written[name]["sha256"] for name in SPLITS).encode()).hexdigest()
        meta = {"source_sha256": taken, **about, **written}
        with open(work / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=2)
            sync(file)
        publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return meta


def publish(work, final):
    """Put the finished folder in place. If another process does the same, the last one wins, and both sets are whole."""
    old = work.with_name(work.name.replace(".tmp-", ".old-"))
    shutil.rmtree(old, ignore_errors=True)
    while True:
        try:
            work.rename(final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            final.rename(old)
            shutil.rmtree(old)
        except FileNotFoundError:       # the other process was faster
            pass


def remove_stale(data_dir):
    """Remove what killed runs on this computer left behind."""
    for path in data_dir.iterdir():
        match = re.fullmatch(rf"\..+\.(tmp|old)-{re.escape(platform.node())}-(\d+)", path.name)
        if match and os.name == "posix":        # elsewhere os.kill has no harmless signal to ask with
            try:
                os.kill(int(match[2]), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
            except PermissionError:             # alive, and somebody else's
                pass


def check_name(name, flag="name"):
    plain = re.compile(r"(?!\.)[^/\\:*?\"<>|\x00-\x1f]+")
    if not plain.fullmatch(name):
        better = Path(name).name if plain.fullmatch(Path(name).name) else "NAME"
        raise UserError(f"{flag}={name!r} is not a plain folder name; write --{flag}={shlex.quote(better)}")


def load_meta(data_dir, name):
    """meta.json of a whole data set as a dict; else a UserError with the command that makes one."""
    check_name(name, "dataset")
    folder = Path(data_dir, name)
    make_it = "make it with: python prepare.py " + (name if name in ("stdlib", *HUB, *TASKS) else f"SOURCE --name={shlex.quote(name)}")
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(f"{path} has format {meta['format']}, wanted {FORMAT}; {make_it}")
        for needed in ("source", "tokenizer", "fingerprint", "vocab_size", "baselines"):
            meta[needed]
        sizes = {split: meta[split]["tokens"] * np.dtype(meta["dtype"]).itemsize for split in SPLITS}
        for split, size in sizes.items():
            path = folder / f"{split}.bin"
            if path.stat().st_size != size:
                raise UserError(f"{path} has {path.stat().st_size} bytes, its meta.json says {size}; {make_it}")
        if "row" in meta and sum(meta["groups"].values()) * meta["row"] != meta["val"]["tokens"]:
            raise ValueError("groups and rows do not add up")
        return meta
    except OSError as error:
        others = sorted(other.parent.name for other in Path(data_dir).glob("[!.]*/meta.json") if other.parent != folder)
        raise UserError(f"no data set '{name}' in {data_dir}/ ({path.name}: {error.strerror}); {make_it}; "
                        f"other sets here: {', '.join(others) or 'none'}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {make_it}") from None


# ---- starting weights: a dense run becomes a recursive model  [Relaxed Recursive Transformers, Bae et al. 2024] --------

# (core block, how many there are, the block that stands for each of the loop's layers) -> the layers whose mean it is.
SHARED = {"stepwise": lambda b, n, plan: [round(b * (len(plan) - 1) / max(1, n - 1))],      # the first and the last among them
          "average": lambda b, n, plan: [i for i, block in enumerate(plan) if block == b],
          "lower": lambda b, n, plan: [b]}
READS = {"query": "attention_norm", "key": "attention_norm", "value": "attention_norm", "gate": "mlp_norm", "up": "mlp_norm"}


@dataclass
class WeightsConfig:
    """Conversion of a dense run"""
    shared: str | None = key(None, "Where the core's weights come from: stepwise = layers evenly spaced over the loop; average = each block "
                             "is the mean of the layers that it stands for; lower = the loop's first; None = average with lora_rank above 0, "
                             "else stepwise.", choices=tuple(SHARED))


def prefixes(cfg):
    """Of the weights of every block, in the order in which a token first meets them."""
    parts = ("prelude", cfg.n_prelude), ("recursion.core", cfg.n_core), ("coda", cfg.n_coda)
    return [f"{part}.{i}." for part, n in parts for i in range(n)]


def folded(block):
    """The same function with norms that only normalise: W (g n + b) + c = (W diag g) n + (W b + c). What differs between two
    layers is then linears alone, which is what low-rank additions reach."""
    new = dict(block)
    for name, W in block.items():
        linear, _, kind = name.rpartition(".")
        norm = READS.get(linear.rpartition(".")[2])
        if norm and kind == "weight":
            new[name], new[f"{norm}.weight"] = W * block[f"{norm}.weight"], block[f"{norm}.weight"].new_ones(W.size(1))
            if f"{norm}.bias" in block:
                new[f"{linear}.bias"] = block[f"{linear}.bias"] + W @ block[f"{norm}.bias"]
                new[f"{norm}.bias"] = block[f"{norm}.bias"].new_zeros(W.size(1))
    return new


def mean(blocks):
    return {name: sum(block[name] for block in blocks) / len(blocks) for name in blocks[0]}


def matrices(block):
    """{name of its addition: matrix (out, in)} of a block; query, key and value are one."""
    import torch
    own = {name.split(".")[-2]: W for name, W in block.items() if W.dim() == 2}
    return {"qkv": torch.cat([own.pop(name) for name in ("query", "key", "value")]), **own}


def low_rank(residual, A, rank):
    """(A, B, singular values): B A is the nearest to `residual` of its rank, B = U S and A = V^T. Where nothing is left to
    add, B is 0 and A stays as it was given, so that it can learn."""
    import torch
    U, S, V = torch.linalg.svd(residual, full_matrices=False)
    n = min(rank, int((S > 0).sum()))
    A, B = A.clone(), residual.new_zeros(len(residual), rank)
    A[:n], B[:, :n] = V[:n], U[:, :n] * S[:n]
    return A, B, S


def convert(dense, there, start, cfg, shared):
    """(state, kept): the state dict of a recursive model (config cfg) that does what a dense one does (dense, config there), as
    far as its additions reach. What no layer gives stays as in `start`, the state dict of the model when it is new.

    kept: {addition: for each step the share of the squared norm of W_layer - W_shared that it holds; None: nothing to add}"""
    from model import block_table
    layers = [{name.removeprefix(prefix): w for name, w in dense.items() if name.startswith(prefix)} for prefix in prefixes(there)]
    plan = [block for row in block_table(cfg) for block in row]
    prelude, loop, coda = layers[:cfg.n_prelude], layers[cfg.n_prelude:][:len(plan)], layers[cfg.n_prelude + len(plan):]
    loop = [folded(layer) for layer in loop]
    core = [mean([loop[i] for i in SHARED[shared](b, cfg.n_core, plan)]) for b in range(cfg.n_core)]
    state = {**start, **{name: w for name, w in dense.items() if name in start and not name.startswith(tuple(prefixes(there)))}}
    for prefix, block in zip(prefixes(cfg), [*prelude, *core, *coda]):
        state |= {prefix + name: w for name, w in block.items()}
    added, kept = additions(loop, [core[b] for b in plan], start, cfg)
    return {**state, **added}, kept


def additions(layers, blocks, start, cfg):
    """convert()'s low-rank part: what turns each of `blocks`, in the order in which they are run, into its layer."""
    new = {name: w.clone() for name, w in start.items() if name.startswith("recursion.lora.")}
    norms = {}                          # of an addition, for each step: [squared norm that is kept, all of it]
    for i, (layer, block) in enumerate(zip(tqdm(layers if new else [], unit="block", disable=None), blocks)):
        (step, j), common = divmod(i, cfg.n_core), matrices(block)
        for name, W in matrices(layer).items():
            A, B = new[f"recursion.lora.down.{j}.{name}"], new[f"recursion.lora.up.{j}.{name}"]
            A[step], B[step], S = low_rank(W - common[name], A[step], cfg.lora_rank)
            squares, so_far = S.double().square(), norms.setdefault(name, [[0.0, 0.0] for _ in range(cfg.n_recur)])[step]
            so_far[:] = so_far[0] + float(squares[:cfg.lora_rank].sum()), so_far[1] + float(squares.sum())
    return new, {name: [part / whole if whole else None for part, whole in steps] for name, steps in norms.items()}


def check_pair(path, there, cfg, origins):
    """Refuse a source (its config: there) and a config between which no rank would give an exact conversion."""
    plain = {"update": "replace", "router": "none", "kv": "own", "sandwich_norm": False, "loop_norm": False}
    if there.n_recur != 1 or any(getattr(there, name) != only for name, only in plain.items()):
        raise UserError(f"{path} is no dense run: {there.layout}, update={there.update!r}, router={there.router!r}; give one with n_recur=1")
    for name, only in plain.items():
        if getattr(cfg, name) != only:
            raise UserError(f"{origins[name]}: {name}={getattr(cfg, name)!r} is more than a dense run can start; convert with {name}={only!r}")
    n, executed = there.executed_blocks(), cfg.executed_blocks()
    if executed != n:
        raise UserError(f"{path} has {n} layers, and {cfg.layout} executes {executed} blocks; choose n_prelude + n_core x n_recur + n_coda = {n}")
    shape = lambda cfg: {**{name: getattr(cfg, name) for name in ("block", "n_embd", "n_head", "vocab_size", "block_size", "bias", "norm_eps")},
                         "n_kv_head": cfg.kv_heads, "n_ffn": cfg.ffn_width, "rope_theta": cfg.block == "llama" and cfg.rope_theta}
    for (name, value), found in zip(shape(cfg).items(), shape(there).values()):
        if value != found:
            raise UserError(f"{origins[name]}: {name}={value!r}, but {path} has {found!r}; give the same")


def measure(model, s, state):
    """The validation loss, as train.py takes it; nan, and a note, where the data are not here."""
    import train
    try:
        meta = load_meta(s.data_dir, s.dataset)
        train.check_tokenizer(state, meta, s)
        split = train.open_split(s.data_dir, s.dataset, "val", meta, model.cfg.block_size)
    except UserError as error:
        print(f"note: no validation loss: {error}", file=sys.stderr)
        return math.nan
    device, _, autocast = train.pick_device(s)
    starts, full = train.fixed_windows(split, s.eval_tokens), model.cfg.n_recur
    return train.evaluate(model.to(device), split, starts, [full], s.batch_size, device, autocast)[full]


def weights(argv):
    """Starting weights for a recursive model, out of a dense run with as many layers as it executes blocks.

    python prepare.py weights out/gpt_tiny config/rrt_tiny.py --out_dir=out/rrt_start
    python train.py --init_from=out/rrt_start --out_dir=out/rrt_tiny --learning_rate=6e-4

    First and last layers become prelude and coda. Those between share the core's weights, and where lora_rank is above 0
    each step adds to each linear what the shared weights miss, as far as the rank reaches. The folder that is written is
    a run's: train.py starts from it, sample.py and eval.py read it."""
    import torch
    import train
    from model import GPT, GPTConfig
    s = config.parse(argv, [GPTConfig, train.TrainConfig, WeightsConfig], inspect.getdoc(weights), words=("weights RUN", 2))
    train.check_ranges(s, train.RANGES)
    if len(s.words) != 2 or not s.files:
        raise UserError(f"weights takes a dense run and a config file, got {shlex.join(argv[1:]) or 'neither'}; for example: "
                        f"python prepare.py weights out/gpt_tiny config/rrt_tiny.py")
    shared, folder, path = s.values.pop("shared") or ("average" if s.lora_rank else "stepwise"), train.wanted_folder(s), train.checkpoint_of(s.words[1])
    if (folder / "ckpt.pt").exists():
        raise UserError(f"{folder} holds a run already; choose another --out_dir=")
    dense = train.load_checkpoint(path)
    with train.fitting(path):
        there, step, then = GPTConfig(**dense["model_config"]), dense["step"], f"step {dense.get('val_step', dense['step'])}: {dense['val_loss']:.4f}"
        kin = {name: dense[name] for name in ("tokenizer", "fingerprint")}
        for name, value in {"vocab_size": there.vocab_size, **{name: dense["settings"][name] for name in ("dataset", "data_dir")}}.items():
            if s.origins[name] == "default":
                s.values[name], s.origins[name] = value, ascii(str(path))
    cfg = s.build(GPTConfig)
    check_pair(path, there, cfg, s.origins)
    torch.manual_seed(s.seed)
    model = GPT(cfg)
    with train.fitting(path):
        state, kept = convert(dense["model"], there, model.state_dict(), cfg, shared)
        model.load_state_dict(state)
    about = {"source": str(path), "source_step": step, "shared": shared, "lora_rank": cfg.lora_rank, "kept": kept}
    print(conversion(about, there, cfg))
    loss = measure(model, s, kin)
    save_start(folder, s, {"model": state, "val_loss": loss, "model_config": asdict(cfg), **kin, "converted": about})
    print(f"validation {loss:.4f} nats/token; the source, at its {then}\n"
          f"next: python train.py --init_from={shlex.quote(str(folder))} --out_dir={shlex.quote(f'{folder}_tuned')} "
          f"--learning_rate={0.3 * s.learning_rate:.2g}")


def save_start(folder, s, state):
    """A run's folder that stands at step 0, without an optimizer."""
    import torch
    import train
    about, lock = state["converted"], train.hold(folder)
    if not lock:
        raise UserError(f"another process is at work in {folder}; choose another --out_dir=")
    with lock:
        train.save_checkpoint(folder / "ckpt.pt", {"format": train.FORMAT, "step": 0, "val_step": 0, "settings": dict(s.values), "commit": train.commit(),
                                                   "torch": str(torch.__version__), **state})
        head = f"# Converted from {ascii(about['source'])}, step {about['source_step']}, by prepare.py weights --shared={about['shared']}\n"
        train.write_whole(folder / "config.py", lambda file: file.write((head + s.dump()).encode("utf-8")))


def conversion(about, there, cfg):
    """A page about a conversion."""
    lines = [f"{about['source']}, step {about['source_step']}: {there.layout}, {there.n_params():,} parameters, as {cfg.layout}, {cfg.n_params():,}; "
             f"core blocks: {about['shared']}, lora_rank {cfg.lora_rank}"]
    if cfg.lora_rank:
        lines += [f"share of the squared norm of W_layer - W_shared that rank {cfg.lora_rank} keeps (- where they are equal)",
                  f"{'step':>6}" + "".join(f"{name:>9}" for name in about["kept"])]
        lines += [f"{step:6}" + "".join(f"{'-' if share is None else f'{share:.3f}':>9}" for share in row)
                  for step, row in enumerate(zip(*about["kept"].values()))]
    if cfg.bias:
        lines.append("note: biases have no additions: the steps share them, so that no rank makes the two models equal")
    return "\n".join(lines)


# ---- all of it ---------------------------------------------------------------------------------------------------

def prepare(source="stdlib", name=None, tokenizer="bytes", val_fraction=0.05, num_proc=1, field="text", data_dir="data",
            max_tokens=None, revision=None, seed=0, hops=4, digits=4, quiet=False):
    """Make a data set unless it is there already. Returns its folder."""
    path, say = Path(source), (lambda line: None) if quiet else print
    name = name or (path.stem if path.is_file() else path.resolve().name)
    check_name(name)
    final = Path(data_dir, name)
    try:
        check_settings(final, source, val_fraction, num_proc, max_tokens, revision)
        check_task(source, tokenizer, field, max_tokens, seed=seed, hops=hops, digits=digits)
        if source in TASKS:
            origin = Made(source, seed, {"phop": hops, "addition": digits}[source])
        else:
            origin = HubSet(source, revision) if source in HUB else Files(str(source), data_dir)
        encoding = get_tokenizer(tokenizer)
        wanted = {"format": FORMAT, **origin.identity, "fingerprint": fingerprint(encoding),
                  "settings": {"val_fraction": val_fraction, "field": field, "max_tokens": max_tokens}}
        changed = changes(data_dir, name, wanted)
        if changed == []:
            say(f"{final} is up to date: same text, tokenizer and settings")
            return final
        if source not in TASKS:
            items = labelled(origin.documents(field), val_fraction, origin.title)
            items = itertools.chain([next(items)], items)       # what fails at once, fails before there is a folder
        say(f"{origin.title}{'; changed: ' + ', '.join(changed) if changed else ''}")
        about = {**wanted, "source": str(source), "tokenizer": tokenizer, "vocab_size": encoding.n_vocab,
                 "eot": encoding.eot_token, "python": platform.python_version()}
        with tqdm(total=max_tokens or origin.bytes, unit="tok" if max_tokens else "B", unit_scale=True,
                  disable=quiet or None) as bar:            # None: only on a terminal
            meta = make(final, about, lambda folder: origin.write(folder, val_fraction, max_tokens) if source in TASKS else
                        write_set(folder, encoding, items, num_proc, shares(max_tokens, val_fraction), bar))
    except OSError as error:
        raise UserError(f"{error.filename or final}: {error.strerror or error}; no data set was made") from None
    say(summary(final, meta))
    return final


def check_settings(final, source, val_fraction, num_proc, max_tokens, revision):
    """Refuse what cannot work, and to replace a folder that holds more than a data set."""
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} leaves a split empty; choose between 0 and 1")
    if num_proc < 1:
        raise UserError(f"num_proc={num_proc} can do no work; choose 1 or more")
    if max_tokens is not None and max_tokens < 4:
        raise UserError(f"max_tokens={max_tokens} leaves a split empty; choose 4 or more")
    if revision and source not in HUB:
        raise UserError(f"revision={revision} needs a set on the Hub, {source} is none; choose one of {', '.join(HUB)}")
    if final.is_symlink() or final.is_file():
        raise UserError(f"{final} is not a folder; move it away or choose another --name")
    _, folders, files = next(os.walk(final), ("", [], []))
    others = {*folders, *files} - {"train.bin", "val.bin", "meta.json"}
    if others:
        raise UserError(f"{final} holds other files than a data set's ({min(others)}) and is not replaced; "
                        "choose another --name")


def check_task(source, tokenizer, field, max_tokens, **of_tasks):
    """Refuse keys that mean nothing for this source."""
    default = {each.name: each.default for each in fields(PrepareConfig)}
    for name, value in of_tasks.items():
        users = [task for task in TASKS if name in ("seed", TASKS[task].level + "s")]
        if value != default[name] and source not in users:
            raise UserError(f"{name}={value} means nothing to {source}; it belongs to {' and '.join(users)}")
    if source in TASKS and tokenizer != "bytes":
        raise UserError(f"tokenizer={tokenizer!r}: {source} is made of single characters; leave it out")
    if source in TASKS and field != default["field"]:
        raise UserError(f"field={field!r} means nothing to {source}, which is made, not read; leave it out")
    if source in TASKS and (max_tokens or 0) > MOST_TOKENS:
        raise UserError(f"max_tokens={max_tokens}: {source} is made in memory; choose up to {MOST_TOKENS}")
    if of_tasks["seed"] < 0:
        raise UserError(f"seed={of_tasks['seed']} is negative; choose 0 or more")


def changes(data_dir, name, wanted):
    """What differs between the data set that is there and the wanted one; None if there is no whole one."""
    try:
        meta = load_meta(data_dir, name)
    except UserError:
        return None
    return [what for what in wanted if meta.get(what) != wanted[what]]


def summary(final, meta):
    lines = [f"{final}: tokenizer {meta['tokenizer']}, {meta['vocab_size']:,} ids, {meta['dtype']}",
             f"{'':5}{'documents':>12}{'bytes':>16}{'tokens':>16}{'bytes/token':>13}"]
    for split in SPLITS:
        m = meta[split]
        lines.append(f"{split:5}{m['documents']:12,}{m['bytes']:16,}{m['tokens']:16,}{m['bytes'] / m['tokens']:13.3f}")
    if "row" in meta:
        lines += ["different examples in val: " + ", ".join(f"{group}: {n:,}" for group, n in meta["different"].items()),
                  f"share of {meta['val']['answers']:,} val answers right, no model:", *("  " + line for line in guess_lines(meta))]
    else:
        lines.append("bits per byte of val, no model: " + ", ".join(f"{k} {v:.3f}" for k, v in meta["baselines"].items()))
    where = "" if str(final.parent) == "data" else f" --data_dir={shlex.quote(str(final.parent))}"
    return "\n".join(lines + [f"next: python train.py --dataset={shlex.quote(final.name)}{where}"])


def main(argv):
    if argv[:1] == ["weights"]:
        return weights(argv)
    settings = config.parse(argv, [PrepareConfig], __doc__, words=("[SOURCE]", 1))
    if len(settings.words) > 1:
        raise UserError(f"one SOURCE at a time, got {' and '.join(settings.words)}")
    prepare(*settings.words or ["stdlib"], **settings.values)


def run():
    """config.run(main). Threads of pyarrow's that still read a stream abort an ordinary exit, so after one there is none."""
    code = 0
    try:
        config.run(main)
    except SystemExit as end:
        code = end.code
    if "pyarrow" in sys.modules:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
