"""Turns text into the token files that train.py reads: `data/NAME/train.bin`, `val.bin` and `meta.json`.

    python prepare.py [SOURCE] [--name=NAME] [--tokenizer=bytes] [--val_fraction=0.05]
    python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=1e9 --num_proc=8
    python prepare.py phop [--hops=4]             # or addition [--digits=4]: made on the spot, where depth has to pay
    python prepare.py weights out/gpt_tiny config/rrt_tiny.py --out_dir=out/rrt_start    # a dense run becomes a recursive model
    python prepare.py weights HuggingFaceTB/SmolLM2-135M --out_dir=out/smollm2           # other people's weights become a run
    python prepare.py weights out/gpt_tiny --export=gpt_tiny_for_transformers            # and a run what transformers loads

SOURCE is `stdlib` (the default: the source code of Python's own library, so nothing is downloaded), a text file, a JSONL
(.jsonl) or Parquet (.parquet) file, a folder of such files, or a set on the Hugging Face Hub by its short name:
`shakespeare`, `tinystories`, `openwebtext`, `fineweb-edu`. A short name wins over a file of that name; write ./shakespeare
for the file. A file is one document, in JSONL a line is one, in Parquet and on the Hub a row; empty ones are left out.
`phop` and `addition` are synthetic: rows of one length, in which only answers count (a section of this file says how).
fineweb-edu is SmolLM's corpus, and trains here with GPT-2's vocabulary, as SmolLM's shapes do: tiktoken has none of 49,152; SmolLM's
own, a tokenizer.json, comes with its weights (--tokenizer=FOLDER).
A .bin file is nothing but token ids, little-endian uint16 or uint32, with one end-of-text token after each document.
Documents are packed: a training window may hold several, and they see each other.
The letters `<|endoftext|>` inside a document are ordinary text, never that token.
`weights SOURCE [CONFIG]` makes starting weights for train.py's --init_from=; its flags are the keys of a config, --shared= and
--export=, and with --help after `weights` it says what SOURCE may be.
"""
import codecs
import contextlib
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
from dataclasses import asdict, dataclass, fields, replace
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
    tokenizer: str = key("bytes", "bytes (257 tokens, no download), gpt2, another of tiktoken's encodings, or a tokenizer.json: its path or its folder's.")
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
    """A tiktoken.Encoding: a token per byte ("bytes"), one of tiktoken's own, or that of a tokenizer.json (its path, or its folder's).
    UserError: unknown, or not to be had."""
    if name == "bytes":
        # Nothing is merged, so the pattern decides only the speed: short pieces stay in the processor's cache.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if file := tokenizer_file(name):
        return read_tokenizer(file)
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"unknown tokenizer '{name}'; choose bytes, {', '.join(tiktoken.list_encoding_names())}, or a tokenizer.json")
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache"))
    cached = os.listdir(folder) if folder.is_dir() else []
    try:
        return start(lambda: tiktoken.get_encoding(name)).result(timeout=PATIENCE)
    except Exception as error:
        raise UserError(f"tokenizer '{name}': {why_not_loaded(error, folder, cached)}, or prepare the data with --tokenizer=bytes") from None


def tokenizer_file(name):
    """The file that is meant where a tokenizer is no name of one, or None."""
    if name == "bytes" or name in tiktoken.list_encoding_names():
        return None
    return Path(name) if name.endswith(".json") else Path(name, "tokenizer.json") if Path(name, "tokenizer.json").is_file() else None


def run_tokenizer(folder, name):
    """The tokenizer of a run: by name, or the tokenizer.json that lies in its folder, wherever that was moved to."""
    own = Path(folder, "tokenizer.json")
    return get_tokenizer(str(own) if own.is_file() else name)


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


# How GPT-2 cuts a text before anything is merged, as tiktoken writes it; and with every digit a piece of its own, as SmolLM has
# it: digits are cut out first, and spaces before one are then the end of a text.
GPT2_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
DIGIT_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s+"""
OTHERS = r"[^\s\p{L}\p{N}]"
# Bytes that a vocabulary may lack: no text has them, or only control characters and planes of Unicode that stand empty do.
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
SELDOM = {**{byte: f"\\x{{{byte:X}}}" for byte in (*range(9), *range(14, 32), 127)},
          **{0xF0 + i: f"\\x{{{0x40000 * i:X}}}-\\x{{{min(0x40000 * (i + 1), 0x110000) - 1:X}}}" for i in range(1, 5)}}
PROBE = "".join(map(chr, range(1, 0x250))) + "it's 12 345\r\n\n  x \t 1\n  2 \u4e2d\u6587 \U0001f98a  "


def byte_letters():
    """{letter: byte}: how a vocabulary file writes bytes, as GPT-2's does: printable ones as themselves, the others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_tokenizer(path):
    """The byte-level BPE of a tokenizer.json, Hugging Face's format, with the same ids for the same text. The letters of a special
    token inside a text are ordinary text here. A character that the vocabulary has no bytes for is left out, as there; but here
    nothing is merged across its place, and of a character in the empty planes nothing is kept, where there the known bytes are.
    UserError: another kind of tokenizer, or no such file."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        special = {token["content"]: token["id"] for token in about.get("added_tokens") or []}
        letters, vocab = byte_letters(), {word: i for word, i in about["model"]["vocab"].items() if word not in special}
        merges = [pair.split(" ") if type(pair) is str else pair for pair in about["model"].get("merges", [])]
        lacking = {byte for letter, byte in letters.items() if letter not in vocab} - NEVER_IN_UTF8
        pieces = pieces_of(about.get("pre_tokenizer"), [SELDOM[byte] for byte in sorted(lacking & set(SELDOM))])
        problem = why_not_ours(about, vocab, merges, pieces, special, lacking - set(SELDOM), lacking & set(SELDOM))
        if problem:
            raise UserError(f"tokenizer {path} {problem}; only byte-level BPE as GPT-2's and SmolLM's is read here")
        ranks = {bytes(map(letters.__getitem__, word)): i for word, i in vocab.items()}
        encoding = tiktoken.Encoding(str(path), pat_str=pieces, mergeable_ranks=ranks, special_tokens=special)
        probe = "".join(char for char in PROBE if not lacking & set(char.encode()))
        if encoding.decode(encoding.encode_ordinary(PROBE)) != probe:
            raise ValueError("text is lost on the way to ids and back")
        return encoding
    except OSError as error:
        raise UserError(f"no tokenizer at {path} ({error.strerror}); put the tokenizer.json there that it was when the data or the run was made") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"tokenizer {path} is damaged ({one_line(error)}); get a good copy") from None


def why_not_ours(about, vocab, merges, pieces, special, lacking, seldom):
    """What in a tokenizer.json tiktoken would do otherwise, or None. tiktoken merges by the ids of what comes out, so merges have to
    be in the order of ids, and nothing may be in the vocabulary that no merge makes."""
    letters, made, ids, model = byte_letters(), [vocab.get(a + b, -1) for a, b in merges], [*vocab.values(), *special.values()], about["model"]
    problems = {"is no BPE": model.get("type", "BPE") != "BPE" or model.get("byte_fallback"),
                "marks the ends of words": model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"),
                "leaves merges out at random (dropout)": model.get("dropout"),
                "gives an id to two tokens": len(set(ids)) != len(ids),
                "changes the text first (normalizer)": about.get("normalizer"),
                "cuts the text in a way that is not known here (pre_tokenizer)": not pieces,
                "has added tokens that are not special": not all(token.get("special") for token in about.get("added_tokens") or []),
                "has no <|endoftext|>": "<|endoftext|>" not in special,
                f"has no token for {len(lacking)} of the bytes": lacking,
                "has a token for what it does not know (unk_token)": model.get("unk_token") and seldom,
                "merges in another order than that of its ids": made != sorted(set(made)) or -1 in made,
                "has tokens that nothing is merged to": len(vocab) != len(made) + sum(word in letters for word in vocab)}
    return next((problem for problem, holds in problems.items() if holds), None)


def pieces_of(cut, left_out):
    """The pattern of a pre_tokenizer, but for the characters of these ranges; None where there is none that does the same."""
    spoken = lambda pattern: pattern.replace(OTHERS, OTHERS[:-1] + "".join(left_out) + "]")
    cuts = (cut or {}).get("pretokenizers") or [cut or {}]
    kinds, last, first = [one.get("type") for one in cuts], cuts[-1], cuts[0]
    if last.get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return spoken(GPT2_PIECES)
    if kinds == ["Digits", "ByteLevel"] and first.get("individual_digits") and last.get("use_regex", True):
        return spoken(DIGIT_PIECES)
    if kinds == ["Split", "ByteLevel"] and not left_out and not last.get("use_regex", True) and (first["behavior"], first["invert"]) == ("Isolated", False):
        return first["pattern"].get("Regex")
    return None


def tokenizer_json(encoding):
    """What read_tokenizer reads, and Hugging Face's libraries: the counterpart of a tiktoken.Encoding."""
    letters, ranks = {byte: letter for letter, byte in byte_letters().items()}, encoding._mergeable_ranks
    written = lambda token: "".join(letters[byte] for byte in token)
    merges = [list(map(written, pair_of(token, ranks))) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    special = [{"id": i, "content": name, "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
               for name, i in encoding._special_tokens.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated", "invert": False}
    vocab = {**{written(token): i for token, i in ranks.items()}, **encoding._special_tokens}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, byte_level]}, "post_processor": None,
            "decoder": {**byte_level, "use_regex": True}, "model": model}


def pair_of(token, ranks):
    """The two tokens that the last merge joins to this one."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


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


# ---- other people's weights: folders with config.json, model.safetensors and tokenizer.json, as `transformers` keeps them ----------

class Release(NamedTuple):
    """How others call what is here, {theirs: ours}. Several of ours are one tensor there: in a block side by side as outputs (query,
    key, value), outside as inputs (the halves of W_proj)."""
    outer: dict
    block: dict
    turned: bool            # the matrices of blocks are stored (in, out)


GPT2 = Release({"transformer.wte": "embed", "transformer.wpe": "positions.table", "transformer.ln_f": "norm"},
               {"ln_1": "attention_norm", "attn.c_attn": "attention.query attention.key attention.value", "attn.c_proj": "attention.output",
                "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, turned=True)
LLAMA = Release({"model.embed_tokens": "embed", "model.norm": "norm"},
                {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
                 **{f"self_attn.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value", "output")},
                 **{f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")}}, turned=False)
# The four checkpoints of the GRT paper. What they share with GPT-2, the stacks and W_proj are called as in the authors' earlier public
# code; the six names with "gate" are not verified. A file that has others is refused with a list of both: change them here.
GRT = Release({**GPT2.outer, "recurrent_prelude_proj": "recursion.update.from_state recursion.update.from_anchor",
               **{f"recurrent_gate.{theirs}": f"recursion.update.gate.{ours}" for theirs, ours in
                  {"ln_state": "state_norm", "ln_prelude": "anchor_norm", "ln": "joint_norm", "fc1": "up", "fc2": "down"}.items()}},
              GPT2.block, turned=False)
GRT_STACKS = {"fixed_head": "prelude", "transformer.h": "recursion.core", "fixed_tail": "coda"}
# (n_prelude, n_core, n_coda, n_embd) -> steps that it was trained for, which their config.json leaves out. Layouts are read off the
# tensors, because on the Hub grt-medium-isoflop and grt-medium-isoparam hold each other's.
GRT_STEPS = {(2, 5, 2, 1024): 4, (2, 20, 2, 1024): 4, (1, 5, 5, 1280): 6, (3, 30, 3, 1280): 6}

STACKS = {"gpt2": (GPT2, "transformer.", "transformer.h"), "llama": (LLAMA, "model.", "model.layers")}
KEYS = {"gpt2": {"vocab_size": "vocab_size", "n_positions": "block_size", "n_embd": "n_embd", "n_head": "n_head", "n_layer": "n_core",
                 "n_inner": "n_ffn", "layer_norm_epsilon": "norm_eps"},
        "llama": {"vocab_size": "vocab_size", "max_position_embeddings": "block_size", "hidden_size": "n_embd", "num_attention_heads": "n_head",
                  "num_key_value_heads": "n_kv_head", "num_hidden_layers": "n_core", "intermediate_size": "n_ffn", "rms_norm_eps": "norm_eps"}}
OPTIONAL = ("n_inner", "num_key_value_heads")
ONLY = {"gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}}
ACTIVATIONS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
NO_WEIGHTS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")           # masks and tables that old files keep too
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_safetensors(path):
    """{name: tensor}, read when they are used; masks and tables of old files are left out. The format: 8 bytes for the length of a
    JSON header, the header, raw numbers, in which the tensors lie side by side and leave nothing over."""
    import torch
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 100 * PIECE)))
        raw, tensors, end = np.memmap(path, np.uint8, "c", offset=8 + size), {}, 0
        for name, about in sorted(((name, about) for name, about in header.items() if name != "__metadata__"), key=lambda item: item[1]["data_offsets"]):
            (start, stop), shape = about["data_offsets"], about["shape"]
            if start != end or stop < start or min(shape, default=0) < 0:
                raise ValueError(f"{name} of shape {shape} is at {start} to {stop}, and {end} was next")
            end = stop
            if NO_WEIGHTS.fullmatch(name):
                continue
            if about["dtype"] not in FLOATS:
                raise UserError(f"{path}: {name} has numbers of type {about['dtype']}; give weights of type {', '.join(FLOATS)}")
            tensors[name] = torch.from_numpy(raw[start:stop]).view(getattr(torch, FLOATS[about["dtype"]])).reshape(shape)
        if end != len(raw):
            raise ValueError(f"its tensors are {end} bytes, and there are {len(raw)}")
        return tensors
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}); get a good copy") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); get a good copy") from None


def write_safetensors(file, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, W in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(W.shape), "data_offsets": [end, end + 4 * W.numel()]}
        end += 4 * W.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for W in tensors.values():
        file.write(W.float().contiguous().numpy().data)


def tensors_of(folder):
    """All tensors of a folder's model.safetensors, or of the parts that its index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return read_safetensors(whole)
    if not index.is_file():
        raise UserError(f"{folder} has no model.safetensors; have transformers write it: from_pretrained(...).save_pretrained(FOLDER)")
    tensors = {}
    for name in read_json(index, lambda about: sorted({name + "" for name in about["weight_map"].values()})):
        part = read_safetensors(folder / name) if Path(name).name == name else {}
        if not part or part.keys() & tensors:
            raise UserError(f"{index}: {name!r} is no further part of these weights in this folder; get a good copy")
        tensors |= part
    return tensors


def read_json(path, take=lambda about: about):
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); get a good copy") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}); get a good copy") from None


def rows_of(release, stacks, names):
    """[(their tensor, ours, the axis along which it holds them, whether it is turned)], as far as `names`, ours, are there.
    stacks: [(their prefix, ours)] of each block."""
    modules = [(theirs, ours.split(), 1, False) for theirs, ours in release.outer.items()]
    for there, here in stacks:
        modules += [(f"{there}.{theirs}", [f"{here}.{one}" for one in ours.split()], 0, release.turned) for theirs, ours in release.block.items()]
    return [(f"{theirs}.{kind}", [f"{one}.{kind}" for one in ours], axis, turned and kind == "weight" and "norm" not in ours[0])
            for theirs, ours, axis, turned in modules for kind in ("weight", "bias") if f"{ours[0]}.{kind}" in names]


def ours_of(tensors, rows, shapes, path):
    """The state dict of our model, in float32, from their tensors. UserError: one is missing, left over, or of another shape."""
    import torch
    missing = [theirs for theirs, *_ in rows if theirs not in tensors]
    over = sorted(set(tensors) - {theirs for theirs, *_ in rows})
    if missing or over:
        raise UserError(f"{path} does not hold the weights of a model that can be built here: "
                        + "; ".join(f"{what}: {listed(names, tensors)}" for what, names in (("missing", missing), ("without a place", over)) if names))
    state = {}
    for theirs, ours, axis, turned in rows:
        W, parts = tensors[theirs].T if turned else tensors[theirs], [shapes[name] for name in ours]
        wanted = list(parts[0])
        if len(parts) > 1:
            wanted[axis] = sum(shape[axis] for shape in parts)
        if list(W.shape) != wanted:
            raise UserError(f"{path}: {theirs} is {tuple(tensors[theirs].shape)}, and its config.json makes it {tuple(wanted[::-1] if turned else wanted)}")
        pieces = [W] if len(ours) == 1 else W.split([shape[axis] for shape in parts], axis)
        state |= {name: piece.to(torch.float32, copy=True, memory_format=torch.contiguous_format) for name, piece in zip(ours, pieces)}
    return state


def listed(names, tensors, most=8):
    return ", ".join(f"{name} {tuple(tensors[name].shape)}" if name in tensors else name for name in names[:most]) + \
        f" and {len(names) - most} more" * (len(names) > most)


def shapes_of(cfg):
    """{name: shape} of a model's state dict; nothing is allocated."""
    import torch
    from model import GPT
    with torch.device("meta"):
        return {name: tuple(W.shape) for name, W in GPT(cfg).state_dict().items()}


def config_of(about, path):
    """The GPTConfig of a config.json of `transformers` (GPT-2 with biases, whether or not they do anything)."""
    from model import GPTConfig
    kind = about.get("model_type")
    if kind not in KEYS:
        raise UserError(f"{path}: model_type {kind!r} is not one of {', '.join(KEYS)}, the blocks that are here")
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    found = {**{name: about.get(name, only) for name, only in ONLY[kind].items()}, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    for name, only in {**ONLY[kind], "rope_type": "default"}.items():
        if found[name] != only:
            raise UserError(f"{path}: {name} is {found[name]!r}, and {kind} blocks have {name} {only!r} here")
    values = {ours: about[theirs] for theirs, ours in KEYS[kind].items() if theirs in about or theirs not in OPTIONAL}
    if kind == "gpt2":
        activation = about.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            raise UserError(f"{path}: activation_function is {activation!r}, and gpt2 blocks have {', '.join(ACTIVATIONS)} here")
        return GPTConfig(block=kind, bias=True, gelu=ACTIVATIONS[activation], **values)
    if about.get("head_dim") not in (None, values["n_embd"] // values["n_head"]):
        raise UserError(f"{path}: head_dim is {about['head_dim']}, and heads share the width here: {values['n_embd']} / {values['n_head']}")
    return GPTConfig(block=kind, rope_theta=float(rope.get("rope_theta", about.get("rope_theta", 10000.0))), **values)


def read_release(folder, n_recur=None):
    """(config, state dict) of a folder of other people's weights: GPT-2, Llama and what is built as they are, GRT."""
    path, tensors = folder / "config.json", tensors_of(folder)
    about = read_json(path)
    if about.get("model_type") not in KEYS and any(re.search("fixed_head|prelude|recur", name) for name in tensors):
        return read_grt(folder, tensors, n_recur)
    cfg = read_json(path, lambda about: config_of(about, path))
    release, prefix, stack = STACKS[cfg.block]
    tensors = {name if name.startswith((prefix, "lm_head.")) else prefix + name: W for name, W in tensors.items()}
    untie(tensors, f"{next(iter(release.outer))}.weight", about.get("tie_word_embeddings", cfg.block == "gpt2"), folder)
    if cfg.bias and not any(W.any() for name, W in tensors.items() if name.endswith(".bias")):       # the same function, and ours without them
        cfg, tensors = replace(cfg, bias=False), {name: W for name, W in tensors.items() if not name.endswith(".bias")}
    shapes = shapes_of(cfg)
    return cfg, ours_of(tensors, rows_of(release, [(f"{stack}.{i}", f"recursion.core.{i}") for i in range(cfg.n_core)], shapes), shapes, folder)


def untie(tensors, table, tied, folder):
    """Leave out a head that is the token table; UserError where it is another matrix."""
    import torch
    head = tensors.pop("lm_head.weight", None)
    if head is not None and table in tensors and not torch.equal(head, tensors[table]) or head is None and not tied:
        raise UserError(f"{folder}: the head (lm_head.weight) is {'missing and' if head is None else 'a matrix of its own,'} not the token table; "
                        "the models here have tied heads alone")


def read_grt(folder, tensors, n_recur):
    """(config, state dict) of one of the GRT paper's checkpoints. Heads have 64 features, as at all of its sizes."""
    from model import GPTConfig
    stacks = {there: len({name[len(there) + 1 :].split(".")[0] for name in tensors if name.startswith(f"{there}.")}) for there in GRT_STACKS}
    untie(tensors, "transformer.wte.weight", True, folder)
    absent = [there for there, n in stacks.items() if not n]
    if absent:
        raise UserError(f"{folder} looks like a checkpoint of the GRT paper, but has no {' and no '.join(absent)}; its tensors: {', '.join(sorted(tensors))[:400]}")
    try:
        (V, D), S = tensors["transformer.wte.weight"].shape, len(tensors["transformer.wpe.weight"])
        layout = (stacks["fixed_head"], stacks["transformer.h"], stacks["fixed_tail"])
        steps = n_recur or GRT_STEPS[(*layout, D)]
        cfg = GPTConfig(vocab_size=V, block_size=S, n_embd=D, n_head=D // 64, n_prelude=layout[0], n_core=layout[1], n_recur=steps, n_coda=layout[2],
                        update="gate", depth_sampling="uniform", state_noise=0.1, gate_noise=0.1)
    except KeyError as error:
        what = f"{'+'.join(map(str, layout))} blocks of width {D} are none of the paper's: say with --n_recur= how many steps they are for" \
            if type(error.args[0]) is tuple else f"{error.args[0]} is missing"
        raise UserError(f"{folder}: {what}") from None
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    shapes, blocks = shapes_of(cfg), [(f"{there}.{i}", f"{here}.{i}") for there, here in GRT_STACKS.items() for i in range(stacks[there])]
    return cfg, ours_of(tensors, rows_of(GRT, blocks, shapes), shapes, folder)


def from_hub(name):
    """The folder that `huggingface_hub` keeps a model in, fetched if it is new; UserError without it or a network."""
    try:
        import huggingface_hub
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        get = lambda **how: Path(huggingface_hub.snapshot_download(name, allow_patterns=[                            # noqa: E731
            "config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer.json"], **how))
        try:
            start(lambda: huggingface_hub.model_info(name, timeout=PATIENCE)).result(timeout=PATIENCE)
            return get()
        except Exception as error:
            try:
                return get(local_files_only=True)
            except Exception:
                raise error from None
    except Exception as error:
        todo = "install it: pip install huggingface_hub" if isinstance(error, ImportError) else \
            "connect and run this again, or give the folder of a run, or one with config.json and model.safetensors"
        raise UserError(f"{name}: no such file or folder, and not to be had from the Hugging Face Hub ({one_line(error)}); {todo}") from None


def tokenizer_of(folder, cfg):
    """(its name here, or None where it is the folder's own; tiktoken.Encoding) of a folder of weights."""
    path = folder / "tokenizer.json"
    if not path.is_file() and (cfg.block != "gpt2" or cfg.vocab_size not in (50257, 50304)):                # GPT-2's, or padded to a multiple of 64
        raise UserError(f"{path} is missing, and GPT-2's tokenizer is not that of {cfg.vocab_size} ids in {cfg.block} blocks; put it there")
    encoding = read_tokenizer(path) if path.is_file() else get_tokenizer("gpt2")
    if encoding.n_vocab > cfg.vocab_size:
        raise UserError(f"{path} has {encoding.n_vocab} ids, and the token table {cfg.vocab_size} rows; they are not of one model")
    for name in {257: ["bytes"], 50257: ["gpt2"]}.get(encoding.n_vocab, []):
        with contextlib.suppress(UserError):
            if fingerprint(get_tokenizer(name)) == fingerprint(encoding):
                return name, encoding
    return None, encoding


def check_counterpart(cfg):
    """ValueError about a model that is no stack of layers as `transformers` has it."""
    wanted = {"update": "replace", "router": "none", "kv": "own", "loss": "last", "lora_rank": 0, "sandwich_norm": False, "loop_norm": False}
    for name, only in wanted.items():
        if getattr(cfg, name) != only:
            raise ValueError(f"{name}={getattr(cfg, name)!r} has no counterpart in the {cfg.block} models of transformers; export one with {name}={only!r}")
    if cfg.block == "gpt2" and cfg.kv_heads != cfg.n_head:
        raise ValueError(f"n_kv_head={cfg.n_kv_head} has no counterpart in the gpt2 models of transformers; export one with n_kv_head={cfg.n_head}")


def theirs_of(state, cfg):
    """{their name: tensor} of our state dict. A loop is unrolled: blocks that run again are layers again."""
    import torch
    from model import block_table
    check_counterpart(cfg)
    release, _, stack = STACKS[cfg.block]
    executed = [f"prelude.{i}" for i in range(cfg.n_prelude)] + [f"recursion.core.{block}" for row in block_table(cfg) for block in row] + \
        [f"coda.{i}" for i in range(cfg.n_coda)]
    tensors = {}
    for theirs, ours, axis, turned in rows_of(release, [(f"{stack}.{i}", here) for i, here in enumerate(executed)], state):
        W = torch.cat([state[name] for name in ours], axis) if len(ours) > 1 else state[ours[0]]
        tensors[theirs] = W.T if turned else W
    if cfg.block == "gpt2" and not cfg.bias:                                    # their GPT-2 has biases in any case
        tensors |= {name.replace("weight", "bias"): W.new_zeros(W.shape[-1]) for name, W in tensors.items() if ".h." in name or "ln_f" in name}
    return tensors


def their_config(cfg, end):
    """config.json of what theirs_of gives; end: the id of end-of-text."""
    about = {theirs: {"n_core": cfg.executed_blocks(), "n_ffn": cfg.ffn_width, "n_kv_head": cfg.kv_heads}.get(ours, getattr(cfg, ours))
             for theirs, ours in KEYS[cfg.block].items()}
    own = {"gpt2": {"architectures": ["GPT2LMHeadModel"], "activation_function": {"exact": "gelu", "tanh": "gelu_new"}[cfg.gelu],
                    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
           "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": cfg.head_width, "rope_theta": cfg.rope_theta,
                     "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}}}[cfg.block]
    return {"model_type": cfg.block, **about, **ONLY[cfg.block], **own, "tie_word_embeddings": True, "bos_token_id": end, "eos_token_id": end,
            "dtype": "float32"}


def export_run(path, folder):
    """--export: a run's folder as `transformers` reads it."""
    import train
    from model import GPTConfig
    dense = train.load_checkpoint(path)
    with train.fitting(path):
        cfg, state, name, mark = GPTConfig(**dense["model_config"]), dense["model"], dense["tokenizer"], dense["fingerprint"]
    try:
        check_counterpart(cfg)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; choose another --export=")
    encoding = run_tokenizer(path.parent, name)
    if fingerprint(encoding) != mark:
        raise UserError(f"{path} was trained with another tokenizer of the name {name!r} than the one that is here ({mark} and {fingerprint(encoding)})")
    with train.fitting(path):
        tensors, end = theirs_of(state, cfg), encoding.eot_token
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "model_max_length": cfg.block_size}
    own = path.parent / "tokenizer.json" if (path.parent / "tokenizer.json").is_file() else tokenizer_file(name)
    pages = {"config.json": their_config(cfg, end), "tokenizer_config.json": words, "tokenizer.json": read_json(own) if own else tokenizer_json(encoding)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--export={folder} cannot be made ({error.strerror}); choose another") from None
    train.write_whole(folder / "model.safetensors", lambda file: write_safetensors(file, tensors))
    for page, about in pages.items():
        train.write_whole(folder / page, lambda file, about=about: file.write(json.dumps(about, indent=1, ensure_ascii=False).encode("utf-8")))
    unrolled = f", its loop unrolled to {cfg.executed_blocks()} layers" if cfg.n_recur > 1 else ""
    print(f"{path} as {folder}: {their_config(cfg, end)['architectures'][0]}, {sum(W.numel() for W in tensors.values()):,} parameters{unrolled}\n"
          f"next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


# ---- starting weights: a dense run becomes a recursive model  [Relaxed Recursive Transformers, Bae et al. 2024] --------

# (core block, how many there are, the block that stands for each of the loop's layers) -> the layers whose mean it is.
SHARED = {"stepwise": lambda b, n, plan: [round(b * (len(plan) - 1) / max(1, n - 1))],      # the first and the last among them
          "average": lambda b, n, plan: [i for i, block in enumerate(plan) if block == b],
          "lower": lambda b, n, plan: [b]}
READS = {"query": "attention_norm", "key": "attention_norm", "value": "attention_norm", "gate": "mlp_norm", "up": "mlp_norm"}


@dataclass
class WeightsConfig:
    """Weights to begin with"""
    shared: str | None = key(None, "Where the core's weights come from: stepwise = layers evenly spaced over the loop; average = each block "
                             "is the mean of the layers that it stands for; lower = the loop's first; None = average with lora_rank above 0, "
                             "else stepwise.", choices=tuple(SHARED))
    export: str | None = key(None, "Folder to write a run to as transformers reads it; the run is SOURCE, and nothing else is done.")


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


def check_layout(path, there, cfg, origins):
    """Refuse a source (its config: there) and a layout between which no rank would give an exact conversion."""
    plain = {"update": "replace", "router": "none", "kv": "own", "sandwich_norm": False, "loop_norm": False}
    if there.n_recur != 1 or any(getattr(there, name) != only for name, only in plain.items()):
        raise UserError(f"{path} is no dense run: {there.layout}, update={there.update!r}, router={there.router!r}; give one with n_recur=1")
    for name, only in plain.items():
        if getattr(cfg, name) != only:
            raise UserError(f"{origins[name]}: {name}={getattr(cfg, name)!r} is more than a dense run can start; convert with {name}={only!r}")
    n, executed = there.executed_blocks(), cfg.executed_blocks()
    if executed != n:
        raise UserError(f"{path} has {n} layers, and {cfg.layout} executes {executed} blocks; choose n_prelude + n_core x n_recur + n_coda = {n}")


def check_same(path, there, cfg, origins):
    """Refuse a config whose tensors, or what is done with them, are not the source's."""
    meant = {"n_kv_head": lambda cfg: cfg.kv_heads, "n_ffn": lambda cfg: cfg.ffn_width, "rope_theta": lambda cfg: cfg.block == "llama" and cfg.rope_theta}
    for name in SAME:
        value, found = (meant.get(name, lambda cfg, name=name: getattr(cfg, name))(each) for each in (cfg, there))
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


SAME = ("block", "n_embd", "n_head", "n_kv_head", "n_ffn", "bias", "gelu", "norm_eps", "rope_theta", "vocab_size", "block_size")
LAYOUT = ("n_prelude", "n_core", "n_recur", "n_coda", "sharing", "update", "router", "kv", "lora_rank", "sandwich_norm", "loop_norm")


class Donor(NamedTuple):
    """Whose weights a run begins with."""
    path: Path              # a checkpoint, or a folder of other people's weights
    cfg: object
    state: dict
    kin: dict               # tokenizer and fingerprint, as a checkpoint has them
    step: int | None        # None: not a run of ours
    loss: str
    data: dict              # where its own data are
    tokenizer: Path | None  # a tokenizer.json to be kept beside the weights


def find_source(word):
    """A run's checkpoint, or the folder of other people's weights that is meant."""
    import train
    path = Path(word)
    checkpoint = train.checkpoint_of(path)
    if checkpoint.is_file():
        return checkpoint
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise UserError(f"{word} holds neither ckpt.pt, as a run does, nor config.json and model.safetensors, as other people's weights do")
    known_here = "/" in word and path.parent.exists()                            # out/NAME is a run that is not there
    return checkpoint if known_here or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", word) else from_hub(word)


def read_run(path):
    import train
    from model import GPTConfig
    dense = train.load_checkpoint(path)
    with train.fitting(path):
        return Donor(path, GPTConfig(**dense["model_config"]), dense["model"], {name: dense[name] for name in ("tokenizer", "fingerprint")}, dense["step"],
                     f"; the source, at its step {dense.get('val_step', dense['step'])}: {dense['val_loss']:.4f}",
                     {name: dense["settings"][name] for name in ("dataset", "data_dir")}, None)


def read_others(folder, s, home):
    """home: the folder of the run to be. A shorter context may be asked for."""
    cfg, state = read_release(folder, s.n_recur if s.origins["n_recur"] != "default" else None)
    if s.block_size < 1:
        raise UserError(f"{s.origins['block_size']}: block_size={s.block_size} is too small; choose 1 to {cfg.block_size}")
    if s.origins["block_size"] != "default" and s.block_size < cfg.block_size:
        cfg, cut = replace(cfg, block_size=s.block_size), slice(s.block_size)
        state |= {name: W[cut].clone() for name, W in state.items() if name == "positions.table.weight"}
    name, encoding = tokenizer_of(folder, cfg)
    kin = {"tokenizer": name or (home / "tokenizer.json").as_posix(), "fingerprint": fingerprint(encoding)}
    return Donor(folder, cfg, state, kin, None, "", {}, None if name else folder / "tokenizer.json")


def weights(argv):
    """Starting weights: a dense run, or other people's weights, for a recursive model; or other people's as they are.

    python prepare.py weights out/gpt_tiny config/rrt_tiny.py --out_dir=out/rrt_start
    python train.py --init_from=out/rrt_start --out_dir=out/rrt_tiny --learning_rate=6e-4
    python prepare.py weights HuggingFaceTB/SmolLM2-135M --out_dir=out/smollm2 --block_size=1024
    python prepare.py weights out/gpt_tiny --export=gpt_tiny_for_transformers

    SOURCE is a run, a folder with config.json and model.safetensors (GPT-2, Llama, SmolLM, or a checkpoint of the GRT paper), or
    the name of one on the Hugging Face Hub. With a layout, in a config or as flags, it needs as many layers as the layout
    executes blocks: first and last layers become prelude and coda, those between share the core's weights, and where lora_rank
    is above 0 each step adds to each linear what the shared weights miss, as far as the rank reaches. The folder that is written
    is a run's: train.py starts from it, sample.py and eval.py read it. A tokenizer.json that comes with the weights is kept
    there: prepare.py TEXT --tokenizer=out/smollm2 makes data with it."""
    import torch
    import train
    from model import GPT, GPTConfig
    s = config.parse(argv, [GPTConfig, train.TrainConfig, WeightsConfig], inspect.getdoc(weights), words=("weights SOURCE", 2))
    train.check_ranges(s, train.RANGES)
    shared, export = s.values.pop("shared"), s.values.pop("export")
    if len(s.words) != 2:
        raise UserError(usage(argv))
    source = find_source(s.words[1])
    if export is not None:
        return export_run(check_export(source, s), Path(export))
    laid_out = bool(s.files) or any(s.origins[name] != "default" for name in LAYOUT)
    if source.is_file() and not laid_out:
        raise UserError(usage(argv))
    if not s.files and not s.out_dir:
        s.values["out_dir"] = str(Path("out", Path(s.words[1]).name))
    shared, folder = shared or ("average" if s.lora_rank else "stepwise"), train.wanted_folder(s)
    if (folder / "ckpt.pt").exists():
        raise UserError(f"{folder} holds a run already; choose another --out_dir=")
    donor = read_run(source) if not source.is_dir() else read_others(source, s, folder)
    there = donor.cfg
    as_it_is = donor.step is None and not s.files and all(s.origins[name] == "default" or s.values[name] == getattr(there, name) for name in LAYOUT)
    if as_it_is and s.origins["shared"] != "default":
        raise UserError(f"--shared={shared} says whose weights a loop has, and {donor.path} is taken as it is; give a layout too, or leave it out")
    for name, value in {**{name: getattr(there, name) for name in (GPTConfig.__dataclass_fields__ if as_it_is else SAME)}, **donor.data}.items():
        if s.origins[name] == "default":
            s.values[name], s.origins[name] = value, ascii(str(donor.path))
    cfg = s.build(GPTConfig)
    if not as_it_is:
        check_layout(donor.path, there, cfg, s.origins)
    check_same(donor.path, there, cfg, s.origins)
    about = {"source": str(donor.path), "source_step": donor.step, "shared": None if as_it_is else shared, "lora_rank": cfg.lora_rank, "kept": {}}
    torch.manual_seed(s.seed)
    model, state = GPT(cfg), donor.state
    if not as_it_is:
        with train.fitting(donor.path):
            state, about["kept"] = convert(donor.state, there, model.state_dict(), cfg, shared)
    with train.fitting(donor.path):
        model.load_state_dict(state)
    print(conversion(about, there, cfg))
    loss = measure(model, s, donor.kin)
    save_start(folder, s, {"model": state, "val_loss": loss, "model_config": asdict(cfg), **donor.kin, "converted": about}, donor.tokenizer)
    has_data = donor.step is not None or not math.isnan(loss)
    print(f"validation {loss:.4f} nats/token{donor.loss}\n" * has_data + what_next(folder, s, donor, has_data))


def usage(argv):
    return (f"weights takes a dense run and a config file, or other people's weights (a folder or a name on the Hub), got {shlex.join(argv[1:]) or 'neither'}; "
            "for example: python prepare.py weights out/gpt_tiny config/rrt_tiny.py")


def check_export(source, s):
    """The checkpoint to be exported; UserError where more is asked for than that."""
    given = [*s.files, *(f"--{name}" for name, origin in s.origins.items() if origin == "command line" and name != "export")]
    if given:
        raise UserError(f"--export writes a run as it is; leave out {', '.join(given)}")
    if source.is_dir():
        raise UserError(f"--export writes a run for transformers, and {source} is a folder of theirs already")
    return source


def what_next(folder, s, donor, has_data):
    run = shlex.quote(str(folder))
    train = f"python train.py --init_from={run} --out_dir={shlex.quote(f'{folder}_tuned')} --learning_rate={0.3 * s.learning_rate:.2g}"
    if has_data:
        return f"next: {train}"
    name = run if donor.tokenizer else donor.kin["tokenizer"]
    return f"next: python sample.py --out_dir={run} --start='Once upon a time'\n   or: python eval.py benchmarks --out_dir={run} --tasks=mor\n   or: python prepare.py stdlib --tokenizer={name} --name=mine && {train} --dataset=mine"


def save_start(folder, s, state, tokenizer=None):
    """A run's folder that stands at step 0, without an optimizer. tokenizer: a file to be kept beside it."""
    import torch
    import train
    about, lock = state["converted"], train.hold(folder)
    if not lock:
        raise UserError(f"another process is at work in {folder}; choose another --out_dir=")
    with lock:
        if tokenizer and tokenizer.resolve() != (folder / "tokenizer.json").resolve():
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
        train.save_checkpoint(folder / "ckpt.pt", {"format": train.FORMAT, "step": 0, "val_step": 0, "settings": dict(s.values), "commit": train.commit(),
                                                   "torch": str(torch.__version__), **state})
        head = f"# Converted from {ascii(about['source'])}{said_step(about)}, by prepare.py weights{' --shared=' + about['shared'] if about['shared'] else ''}\n"
        train.write_whole(folder / "config.py", lambda file: file.write((head + s.dump()).encode("utf-8")))


def said_step(about):
    return "" if about["source_step"] is None else f", step {about['source_step']}"


def conversion(about, there, cfg):
    """A page about a conversion."""
    lines = [f"{about['source']}{said_step(about)}: {there.layout}, {there.n_params():,} parameters, as {cfg.layout}, {cfg.n_params():,}"
             + (f"; core blocks: {about['shared']}, lora_rank {cfg.lora_rank}" if about["shared"] else f"; {cfg.block}, context {cfg.block_size}")]
    if cfg.lora_rank:
        lines += [f"share of the squared norm of W_layer - W_shared that rank {cfg.lora_rank} keeps (- where they are equal)",
                  f"{'step':>6}" + "".join(f"{name:>9}" for name in about["kept"])]
        lines += [f"{step:6}" + "".join(f"{'-' if share is None else f'{share:.3f}':>9}" for share in row)
                  for step, row in enumerate(zip(*about["kept"].values()))]
    if cfg.bias and about["shared"]:
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
