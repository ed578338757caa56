"""Turns text into the token files that train.py reads: `data/NAME/train.bin`, `val.bin` and `meta.json`.

    python prepare.py [SOURCE] [--name=NAME] [--tokenizer=bytes] [--val_fraction=0.05]

SOURCE is `stdlib` (the default: the source code of Python's own library, so nothing is downloaded), a text file, a
JSONL file (.jsonl), or a folder of such files. A file is one document, in JSONL a line is one; empty ones are left out.
A .bin file is nothing but token ids, little-endian uint16 or uint32, with one end-of-text token after each document.
Documents are packed: a training window may hold several, and they see each other.
The letters `<|endoftext|>` inside a document are ordinary text, never that token.
"""
import errno
import hashlib
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import sysconfig
import tempfile
import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

import config
from config import UserError, key

FORMAT = 1                  # of a data set's folder; load_meta refuses any other
SPLITS = ("train", "val")
PIECE = 1 << 20             # bytes of text read, tokenised and written at a time: memory does not grow with the corpus
XZ_BYTES = 8 << 20          # xz is slow, and by then its ratio has settled
PATIENCE = 8                # seconds for tiktoken to load or download; by itself it waits for ever on a dead line
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


@dataclass
class PrepareConfig:
    """Data set"""
    name: str | None = key(None, "Folder in data_dir to write; None: the source's own name.")
    tokenizer: str = key("bytes", "bytes (257 tokens, no download), gpt2, or another of tiktoken's encodings.")
    val_fraction: float = key(0.05, "Share of the documents for validation, chosen by a hash of their names.")
    num_proc: int = key(1, "Texts tokenised at a time, in threads. The files are the same for any number.")
    field: str = key("text", "Where the text is in a line of JSONL.")
    data_dir: str = key("data", "Where the data sets are.")


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
    loaded = Future()

    def load():
        try:
            loaded.set_result(tiktoken.get_encoding(name))
        except Exception as error:
            loaded.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    try:
        return loaded.result(timeout=PATIENCE)
    except Exception as error:
        raise UserError(f"tokenizer '{name}': {why_not_loaded(error, folder, cached)}, or use --tokenizer=bytes") from None


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

def find_files(source, data_dir):
    """[(document name, path)] in order of name, and a Counter of what was left out and why."""
    root, skipped = Path(sysconfig.get_paths()["stdlib"] if source == "stdlib" else source), Counter()
    if root.is_file():
        problem = why_skip(root)
        if problem:
            raise UserError(f"{source} is {problem}")
        return [(root.name, root)], skipped
    if not root.is_dir():
        raise UserError(f"no file or folder '{source}'; SOURCE is stdlib, a text file, a .jsonl file or a folder of them")
    found = []
    for folder, folders, names in os.walk(root, onerror=lambda error: skipped.update(["unreadable"])):
        if source == "stdlib":
            folders[:] = set(folders) - set(NOT_STDLIB)
            names = [name for name in names if name.endswith(".py") and not name.startswith("test_")]
        skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = [f for f in folders if f[0] != "." and Path(folder, f).resolve() != Path(data_dir).resolve()]
        for path in (Path(folder, name) for name in names if name[0] != "."):
            problem = why_skip(path)
            if problem:
                skipped[problem] += 1
            else:
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found), +skipped


def why_skip(path):
    """Why a file is no document; None if it is one. Its contents decide, not its name."""
    try:
        if not path.is_file():
            return "not a file"
        if path.stat().st_size == 0:
            return "empty"
        if path.suffix.lower() != ".jsonl" and any("\0" in text for text in read_text(path)):
            return "not text"
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except OSError:
        return "unreadable"


def read_text(path):
    """A UTF-8 file in pieces of whole lines, every line end as it is."""
    with open(path, "rb") as file:
        while lines := file.readlines(PIECE):
            yield b"".join(lines).decode("utf-8")


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
            text = record.get(field)
            if not isinstance(text, str):
                problem = f"field '{field}' holds no text" if field in record else f"no field '{field}'"
                raise UserError(f"{where}: {problem}; fields here: {', '.join(record) or 'none'}; choose one with --field")
            if text:    # JSON can name half of a surrogate pair, UTF-8 cannot: it becomes a question mark
                yield number, text.encode("utf-8", "replace").decode("utf-8")


def documents(files, field):
    """(name, pieces of text) of every document."""
    for name, path in files:
        if path.suffix.lower() == ".jsonl":
            yield from ((f"{name}:{number}", [text]) for number, text in read_jsonl(path, field))
        else:
            yield name, read_text(path)


# ---- which document goes where -----------------------------------------------------------------------------------

def place(name):
    """A number in [0, 1) that the name alone decides: a document stays in its split whatever else comes or goes."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


class Scan:
    """A first reading, for what must be known before the first token is written."""

    def __init__(self, files, field):
        self.documents = self.bytes = self.lines = self.chars = 0
        self.lowest, self.highest = (2.0, ""), (-1.0, "")
        source = hashlib.sha256()
        for name, pieces in documents(files, field):
            content = hashlib.sha256()
            for text in pieces:
                raw = text.encode()
                content.update(raw)
                self.bytes += len(raw)
                self.chars += len(text)
                self.lines += len(text.splitlines())
            self.documents += 1
            placed = place(name), name
            self.lowest, self.highest = min(self.lowest, placed), max(self.highest, placed)
            source.update(os.fsencode(name) + b"\0" + content.digest())
        self.sha256 = source.hexdigest()


def labelled(files, field, scan, val_fraction):
    """(split, text) for each piece of text, (split, None) where a document ends. No split stays empty."""
    if scan.documents == 1:
        (_, pieces), = documents(files, field)
        yield from halves(pieces, scan, val_fraction)
        return
    moved = {}
    if scan.lowest[0] >= val_fraction:
        moved[scan.lowest[1]] = "val"
    if scan.highest[0] < val_fraction:
        moved[scan.highest[1]] = "train"
    for name, pieces in documents(files, field):
        split = moved.get(name) or ("val" if place(name) < val_fraction else "train")
        yield from ((split, text) for text in pieces)
        yield split, None


def halves(pieces, scan, val_fraction):
    """A lone document: the last val_fraction of its lines, or of the characters of its one line, are for validation."""
    total = scan.lines if scan.lines > 1 else scan.chars
    left = total - min(total - 1, max(1, round(val_fraction * total)))      # what train still gets
    for text in pieces:
        units = text.splitlines(keepends=True) if scan.lines > 1 else text
        head, tail = units[:left], units[left:]
        left -= len(head)
        if head:
            yield "train", "".join(head)
        if head and not left:
            yield "train", None
        if tail:
            yield "val", "".join(tail)
    yield "val", None


# ---- tokens ------------------------------------------------------------------------------------------------------

def in_batches(items):
    """Lists of about PIECE characters: a thousand short documents are one piece of work."""
    batch, size = [], 0
    for split, text in items:
        batch.append((split, text))
        size += len(text or "") + 16
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(encoding, batch):
    """{split: (ids, the same text as UTF-8, how many documents end in it)}"""
    encoded = {}
    for split in {split for split, _ in batch}:
        texts = [text for where, text in batch if where == split]
        ids = [[encoding.eot_token] if text is None else encoding.encode_to_numpy(text, disallowed_special=())
               for text in texts]
        encoded[split] = np.concatenate(ids), "".join(text or "" for text in texts).encode(), texts.count(None)
    return encoded


def encode_all(encoding, batches, num_proc):
    """encode() of each, in order, with few in memory. Threads suffice: tiktoken works without Python's lock."""
    with ThreadPoolExecutor(num_proc) as pool:
        waiting = deque()
        for batch in batches:
            waiting.append(pool.submit(encode, encoding, batch))
            if len(waiting) > num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Split:
    """A .bin file while it is written, and what meta.json says of it."""

    def __init__(self, path, vocab_size):
        self.file, self.sha256 = open(path, "wb"), hashlib.sha256()
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.documents = self.bytes = 0

    def write(self, ids, text, documents):
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.sha256.update(raw)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.bytes += len(text)
        self.documents += documents

    def summary(self):
        return {"tokens": int(self.counts.sum()), "documents": self.documents, "bytes": self.bytes,
                "sha256": self.sha256.hexdigest()}


def baselines(train, val, xz):
    """Bits per byte of the validation text without a model: for scale. (xz may look back over all of that text.)"""
    share = (train.counts + 1) / (train.counts + 1).sum()       # add-one smoothing: no token is impossible
    return {"uniform": float(np.log2(len(val.counts)) * val.counts.sum() / val.bytes),
            "unigram": float(-(val.counts * np.log2(share)).sum() / val.bytes), "xz": xz}


# ---- a data set's folder: whole, or not there --------------------------------------------------------------------

def write_set(folder, encoding, items, num_proc, bar):
    """Both .bin files. Returns their part of meta.json."""
    splits = {name: Split(folder / f"{name}.bin", encoding.n_vocab) for name in SPLITS}
    xz, xz_in, xz_out = lzma.LZMACompressor(preset=6), 0, 0
    try:
        for encoded in encode_all(encoding, in_batches(items), num_proc):
            for name, (ids, text, documents) in encoded.items():
                splits[name].write(ids, text, documents)
                bar.update(len(text))
                if name == "val":
                    sample = text[:XZ_BYTES - xz_in]
                    xz_in += len(sample)
                    xz_out += len(xz.compress(sample))
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


def make(final, about, encoding, items, num_proc, bar):
    """Write all in a folder of this process's own, and rename it when it is on the disk. Returns meta.json's contents."""
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final.parent)
    work = final.parent / f".{final.name}.tmp-{platform.node()}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        meta = {**about, **write_set(work, encoding, items, num_proc, bar)}
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


def check_name(name):
    if not re.fullmatch(r"(?!\.)[^/\\:*?\"<>|\x00-\x1f]+", name):
        raise UserError(f"'{name}' is not a plain folder name; choose another with --name")


def load_meta(data_dir, name):
    """meta.json of a whole data set as a dict; else a UserError with the command that makes one."""
    check_name(name)
    folder = Path(data_dir, name)
    make_it = "make it with: python prepare.py " + ("stdlib" if name == "stdlib" else f"SOURCE --name={shlex.quote(name)}")
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
        return meta
    except OSError as error:
        others = sorted(other.parent.name for other in Path(data_dir).glob("[!.]*/meta.json") if other.parent != folder)
        raise UserError(f"no data set '{name}' in {data_dir}/ ({path.name}: {error.strerror}); {make_it}; "
                        f"other sets here: {', '.join(others) or 'none'}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {make_it}") from None


# ---- all of it ---------------------------------------------------------------------------------------------------

def prepare(source="stdlib", name=None, tokenizer="bytes", val_fraction=0.05, num_proc=1, field="text", data_dir="data",
            quiet=False):
    """Make a data set unless it is there already. Returns its folder."""
    path, say = Path(source), (lambda line: None) if quiet else print
    name = name or (path.stem if path.is_file() else path.resolve().name)
    check_name(name)
    final = Path(data_dir, name)
    try:
        check_settings(final, val_fraction, num_proc)
        files, skipped = find_files(str(source), data_dir)
        left_out = f" (left out: {', '.join(f'{n} {problem}' for problem, n in skipped.items())})" if skipped else ""
        encoding = get_tokenizer(tokenizer)
        scan = Scan(files, field)
        if scan.chars < 2:
            raise UserError(f"{source} holds {scan.chars} characters of text, too few for two splits{left_out}")
        wanted = {"format": FORMAT, "source_sha256": scan.sha256, "fingerprint": fingerprint(encoding),
                  "settings": {"val_fraction": val_fraction, "field": field}}
        changed = changes(data_dir, name, wanted)
        if changed == []:
            say(f"{final} is up to date: same text, tokenizer and settings")
            return final
        say(f"{source}: {scan.documents:,} documents{left_out}{f'; changed: ' + ', '.join(changed) if changed else ''}")
        about = {**wanted, "source": str(source), "tokenizer": tokenizer, "vocab_size": encoding.n_vocab,
                 "eot": encoding.eot_token, "python": platform.python_version()}
        with tqdm(total=scan.bytes, unit="B", unit_scale=True, disable=quiet or None) as bar:   # None: only on a terminal
            meta = make(final, about, encoding, labelled(files, field, scan, val_fraction), num_proc, bar)
    except OSError as error:
        raise UserError(f"{error.filename or final}: {error.strerror or error}; no data set was made") from None
    say(summary(final, meta))
    return final


def check_settings(final, val_fraction, num_proc):
    """Refuse what cannot work, and to replace a folder that holds more than a data set."""
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} leaves a split empty; choose between 0 and 1")
    if num_proc < 1:
        raise UserError(f"num_proc={num_proc} can do no work; choose 1 or more")
    if final.is_symlink() or final.is_file():
        raise UserError(f"{final} is not a folder; move it away or choose another --name")
    _, folders, files = next(os.walk(final), ("", [], []))
    others = {*folders, *files} - {"train.bin", "val.bin", "meta.json"}
    if others:
        raise UserError(f"{final} holds other files than a data set's ({min(others)}) and is not replaced; "
                        "choose another --name")


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
    lines.append("bits per byte of val, no model: " + ", ".join(f"{k} {v:.3f}" for k, v in meta["baselines"].items()))
    where = "" if str(final.parent) == "data" else f" --data_dir={shlex.quote(str(final.parent))}"
    return "\n".join(lines + [f"next: python train.py --dataset={shlex.quote(final.name)}{where}"])


def main(argv):
    settings = config.parse(argv, [PrepareConfig], __doc__, words=("[SOURCE]", 1))
    if len(settings.words) > 1:
        raise UserError(f"one SOURCE at a time, got {' and '.join(settings.words)}")
    prepare(*settings.words or ["stdlib"], **settings.values)


if __name__ == "__main__":
    config.run(main)
