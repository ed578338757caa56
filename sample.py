"""Continue prompts with a trained run, at any depth.

    python sample.py                                              # the newest run in out/, from an empty start
    python sample.py --recursions 3 --start="def main(" --start="class " --num_samples=2
    python sample.py --trace "The author of the book 1984 was George"     # likeliest next tokens after each step of depth
    python sample.py --color=true --start="for i in range("               # each token in the colour of the steps that it took
    python sample.py --requests=requests.jsonl --slots=32                 # serve a file of prompts, each with settings of its own
    python sample.py --exit=kl --exit_threshold=0.01                      # a token leaves the loop once its prediction stands still

Text goes to stdout, everything else to stderr. All prompts and samples run as one batch with a K/V cache.
"""
import codecs
import contextlib
import itertools
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import config  # before torch: see the top of config/__init__.py
import torch

import prepare
from config import UserError, key
from model import EXITS, FOLDS, GPT, NOT_FINITE, UNIT, ExitCache, GPTConfig, KVCache, Seat, Silence, Who, Window, as_logit, at_least_fp32, cache_dtype
from model import check_sampling, check_threshold, draw, flag, flags, flash_attn_with_kvcache, generator, make_cache, slot_places, stream
from train import check_ranges, checkpoint_of, fitting, load_checkpoint, pick_device


@dataclass
class SampleConfig:
    """Sampling"""
    out_dir: str | None = key(None, "folder of the run, or one of its checkpoints; None = the newest run in out/")
    start: list[str] = key([], "prompt; may be repeated; FILE:path reads a file, - reads stdin, none or empty = end-of-text")
    num_samples: int = key(1, "samples of every prompt")
    max_new_tokens: int = key(300, "tokens to write")
    recursions: int | None = key(None, "depth: steps of the loop, 0 and beyond training included; None = the full depth")
    temperature: float = key(0.8, "0 = greedy; below 1 safer, above 1 wilder")
    top_k: int | None = key(50, "keep the k likeliest tokens; 0 or None = all")
    top_p: float | None = key(None, "keep the likeliest tokens that hold this probability together; None = all")
    stop: str | None = key(None, "end a sample where its new text contains this, for example <|endoftext|>")
    cache: str = key("full", "K/V kept of the looped core: full = exact; first, last, mean = one per block", choices=tuple(FOLDS))
    use_cache: bool = key(True, "False reads the whole context again for every token: slow, for comparison")
    threshold: float | None = key(None, "expert-choice models: a token goes on if its router gives at least this; None = the model's own")
    exit: str | None = key(None, "early exit, recursive models: kl = when a step changes the prediction by less than exit_threshold nats (KL); "
                           "cdf = when the exit gate has let go of exit_threshold of the token (models trained with loss=every)", choices=("kl", "cdf"))
    exit_threshold: float | None = key(None, "None = 5e-4 for kl, 0.5 for cdf")
    color: bool = key(False, "colour every token by the steps of the loop that it took")
    requests: str | None = key(None, "serve: a file of JSON lines, - for stdin, each {\"prompt\": ...} and if wanted id, max_new_tokens, temperature, top_k, "
                               "top_p, stop, seed of its own; the answers are JSON lines, each as soon as it is done")
    slots: int = key(16, "requests: how many are in work at a time; others wait until one is done")
    trace: str | None = key(None, "print the five likeliest next tokens of this text after each depth, instead of sampling")
    seed: int = key(1337, "of the sampling")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps ...")
    dtype: str = key("auto", "auto = bfloat16 autocast on CUDA, float32 elsewhere", choices=("auto", "float32", "bfloat16"))


def say(*text):
    print(*text, file=sys.stderr, flush=True)


def newest_run(root="out"):
    """The run folder in `root` whose checkpoint is newest."""
    runs = sorted(filter(Path.is_file, Path(root).glob("*/ckpt.pt")), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UserError(f"there is no run in {root}/; train one first: python train.py config/grt_tiny.py")
    return runs[-1].parent


def load_run(out_dir, device):
    """(model in evaluation mode, tokenizer, checkpoint without its tensors) of a run folder (None: the newest)."""
    folder = Path(out_dir) if out_dir is not None else newest_run()
    path = checkpoint_of(folder)
    state = load_checkpoint(path)
    with fitting(path):
        tokenizer = prepare.run_tokenizer(path.parent, state["tokenizer"])
        if prepare.fingerprint(tokenizer) != state["fingerprint"]:
            raise UserError(f"{folder} was trained with another tokenizer of the name {state['tokenizer']!r} than the one installed "
                            f"here (fingerprints {state['fingerprint']} and {prepare.fingerprint(tokenizer)})")
        model = GPT(GPTConfig(**state["model_config"])).to(device).eval()
        model.load_state_dict(state["model"])
        return model, tokenizer, {"folder": folder, **{name: state[name] for name in ("step", "val_loss", "settings")}}


def task_hint(settings):
    """How to ask a model that was trained on a synthetic set, whose answers are no text to go on with; None for any other."""
    try:
        source = prepare.load_meta(settings["data_dir"], settings["dataset"]).get("made", {}).get("source")
    except (UserError, KeyError):                                                # its data is gone: the name may tell
        source = settings.get("dataset")
    return prepare.TASKS[source].hint if source in prepare.TASKS else None


def depth_meaning(cfg, depth):
    """One sentence about running `depth` steps; UserError where the model has no such choice."""
    if depth is not None and cfg.n_recur == 1:
        raise UserError(f"--recursions={depth}: this model ({cfg.layout}) has no recursion; leave the flag out")
    if depth is not None and depth < 0:
        raise UserError(f"--recursions={depth} is not a number of steps; give an integer from 0 up")
    if depth is not None and depth != cfg.n_recur and not cfg.any_depth:
        raise UserError(f"--recursions={depth}: sharing={cfg.sharing_name!r} always runs n_recur={cfg.n_recur} steps; leave the flag out")
    if depth is not None and depth > cfg.n_recur and cfg.own_steps:
        raise UserError(f"--recursions={depth} is more than n_recur={cfg.n_recur}, and every step of this model has {cfg.own_steps} of its own")
    if cfg.n_recur == 1:
        return "no recursion"
    depth = cfg.n_recur if depth is None else depth
    low, high = cfg.trained_depths
    trained = f"trained at {low} to {cfg.n_recur}" if low < cfg.n_recur else f"trained at {cfg.n_recur}"
    beyond = "; beyond the trained depth: expect worse" if depth > high else "; never trained at this depth: expect worse" if depth < low else ""
    return f"depth {depth} ({trained}{beyond})"


def at_threshold(cfg, threshold):
    """The config with another threshold; UserError where nobody would ask for it."""
    if threshold is None:
        return cfg
    if cfg.router != "expert":
        raise UserError(f"--threshold={threshold}: this model (router={cfg.router!r}) has no expert-choice router; leave the flag out")
    if cfg.router_choice == "random":
        raise UserError(f"--threshold={threshold}: this model chooses by lot, which has no threshold; leave the flag out")
    return replace(cfg, threshold=threshold)


def as_typed(text):
    """An argument's text as UTF-8, also where the locale is not: Python then keeps each odd byte as half a surrogate pair."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_prompt(start):
    if start == "-" or start.startswith("FILE:"):
        return read_text(None if start == "-" else start[5:], f"--start={start}")
    return as_typed(start)


def read_text(path, asked):
    """A file, or stdin where path is None; `asked` is how the user named it."""
    try:
        return (sys.stdin.buffer.read() if path is None else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{asked}: cannot be read as UTF-8 text ({getattr(error, 'strerror', None) or error})")


PADDED = "\ufffd"            # shown for an id without text: the model's table is longer than the tokenizer's


class Text:
    """One row's new text: tokens in, characters out. A character whose bytes come in several tokens appears when whole."""

    def __init__(self, tokenizer, stop):
        self.tokenizer, self.stop, self.text, self.done = tokenizer, stop, "", False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token):
        """The characters that this token completes; '' once the row is done."""
        if self.done:
            return ""
        if token < self.tokenizer.n_vocab:
            return self._grow(self.decoder.decode(self.tokenizer.decode_single_token_bytes(token)))
        return self.end() + self._grow(PADDED)

    def end(self):
        """What an unfinished character leaves."""
        return "" if self.done else self._grow(self.decoder.decode(b"", final=True))

    def _grow(self, new):
        before, self.text = len(self.text), self.text + new
        if self.stop:
            at = self.text.find(self.stop, max(0, before - len(self.stop)))
            if at >= 0:
                self.done, self.text = True, self.text[: at + len(self.stop)]
        return self.text[before:]


def write(text):
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    sys.stdout.buffer.flush()


# Backgrounds of the 256-colour terminal, from few steps to many; the text on them is black.
SHADES = (195, 159, 153, 229, 222, 215, 209)


def shade(steps, depth):
    """Colour of a token that took `steps` of `depth` steps."""
    return SHADES[round((len(SHADES) - 1) * max(0, steps - 1) / max(1, depth - 1))]


def paint(text, colour):
    """Text on a background, line by line: a newline in colour would fill the rest of the terminal's line."""
    return "\n".join(f"\x1b[38;5;16;48;5;{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def legend(depth):
    """A number in each colour: the fewest steps that it stands for."""
    fewest = {shade(steps, depth): steps for steps in range(depth, 0, -1) or [0]}
    return "steps taken: " + " ".join(paint(f" {steps} ", colour) for colour, steps in reversed(fewest.items()))


class Row:
    """One row as it is written. In colour it is a piece of text for each token, held back until the token has been read and
    its steps are known; a character made of several tokens comes with the last of them."""

    def __init__(self, tokenizer, prompt, ids, stop, depth, taken_T):
        self.text, self.depth, self.taken_T, self.pieces, self.written = Text(tokenizer, stop), depth, taken_T, [prompt], 0
        if taken_T is not None:
            whole = Text(tokenizer, None)
            self.pieces = [whole.add(i) for i in ids] if prompt else [""]                # no prompt: end-of-text, which is not shown

    def add(self, token):
        self.pieces.append(self.text.add(token))

    def ready(self):
        """What can be written by now."""
        return self._up_to(len(self.pieces) if self.taken_T is None else len(self.taken_T))

    def end(self):
        """The rest. The last token was drawn but never read, so it has no colour."""
        self.pieces.append(self.text.end())
        return self._up_to(len(self.pieces))

    def _up_to(self, n):
        new, first, self.written = self.pieces[self.written : n], self.written, n
        if self.taken_T is None:
            return "".join(new)
        steps = itertools.chain(self.taken_T[first:n], itertools.repeat(None))
        return "".join(piece if took is None else paint(piece, shade(took, self.depth)) for piece, took in zip(new, steps))


def run_samples(model, tokenizer, s, depth):
    """Stream all samples: the first one as it comes, the others whole after it."""
    prompts = [read_prompt(start) for start in s.start or [""]]
    prompts = [prompt for prompt in prompts for _ in range(s.num_samples)]
    ids = [tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token] for prompt in prompts]
    uneven = model.cfg.router != "none" or s.exit is not None                    # tokens differ in how many steps they take
    taken = [[] for _ in ids] if s.color or uneven else None
    rows = [Row(tokenizer, prompt, row, s.stop and as_typed(s.stop), depth, taken_T if s.color else None)
            for prompt, row, taken_T in zip(prompts, ids, taken or prompts)]
    device = model.embed.weight.device
    if s.color:
        say(legend(depth))
    started, first, n_steps = time.perf_counter(), None, 0
    tokens = stream(model, ids, s.max_new_tokens, s.temperature, s.top_k, s.top_p, depth, s.cache, s.use_cache,
                    generator(s.seed, device), taken=taken, exit=s.exit, exit_threshold=s.exit_threshold)
    store = CacheWatch(model)
    write(rows[0].ready())
    for next_B in tokens:
        n_steps += 1
        first = first or time.perf_counter() - started
        for row, token in zip(rows, next_B):
            row.add(token)
        write(rows[0].ready())
        if all(row.text.done for row in rows):
            break
    seconds = time.perf_counter() - started
    write(rows[0].end() + "\n")
    for i, row in enumerate(rows[1:], 2):
        say(f"--- {i} of {len(rows)}")
        write(row.end() + "\n")
    report(model, s, ids, depth, n_steps, first or 0.0, seconds, store.close())
    steps = [n for taken_T in taken or [] for n in taken_T if n is not None]              # None: fell out of the context unread
    if uneven and steps:
        say(f"mean depth {sum(steps) / len(steps):.2f} of {depth} over {len(steps):,} tokens read")


class CacheWatch:
    """Which cache a model's loop is working with, until close() tells."""

    def __init__(self, model):
        self.cache, self.hook = None, model.recursion.register_forward_hook(self.see)

    def see(self, module, args, out):
        self.cache = next((x for x in args if isinstance(x, (KVCache, ExitCache))), None)

    def close(self):
        self.hook.remove()
        return self.cache


def report(model, s, rows, depth, n_steps, first, seconds, cache):
    rate = len(rows) * (n_steps - 1) / (seconds - first) if n_steps > 1 else 0.0
    say(f"{len(rows)} rows x {n_steps} tokens in {seconds:.2f} s: first after {first * 1e3:.0f} ms "
        f"({sum(map(len, rows)):,} prompt tokens), then {rate:,.0f} tokens/s")
    if s.use_cache:
        stored = min(model.cfg.block_size, max(map(len, rows)) + max(0, n_steps - 1))
        size = model.cfg.kv_bytes(stored, len(rows), cache_dtype(model), s.cache, depth, s.exit)
        now = cache.nbytes() if cache and s.cache == "full" else size            # that of a routed model grows
        grew = f" (declared: {size / 2**20:,.2f}; more tokens went on than its capacities let in)" if now > size else ""
        say(f"cache {s.cache}: {max(now, size) / 2**20:,.2f} MiB for {len(rows)} rows of {stored} tokens{grew}")


# --------------------------------------------------------------------------------------------------------------- serving


def whole_units(n):
    return -(-n // UNIT) * UNIT


@dataclass(eq=False)
class Request:
    """A prompt, what was written after it, and where it stands."""
    number: int
    ids: list                        # of prompt and text; the last one is the token at hand
    n_prompt: int
    max_new_tokens: int
    stop: int | None
    greedy: bool
    draw: Callable                   # logits (1, V) -> the next token, (1,)
    at: str = "waiting"              # start, core, finish: the pass of the model that the token at hand waits for; done
    step: int = 0                    # steps that the token at hand has taken
    slot: int | None = None          # its row of what the engine keeps
    windows: dict = field(default_factory=dict)
    sizes: dict | None = None        # of the windows that it needs to go on (None: what is declared), and how it then gets back what it had
    restore: Callable | None = None
    error: str | None = None

    position = property(lambda self: len(self.ids) - 1)
    text = property(lambda self: self.ids[self.n_prompt :])
    n_places = property(lambda self: self.n_prompt + self.max_new_tokens - 1)    # the last token is never read


@dataclass
class Span:
    """A request's places in a space: `size` of them from `first` on, of which `used` hold something (counted where tokens come as they arrive)."""
    first: int
    size: int
    used: int = 0


class Space:
    """K and V of blocks that are cut alike: a flat store for each, (2, places, G, K), and which places are free. beyond: more places,
    which nobody owns."""

    def __init__(self, cfg, n_blocks, n_places, beyond, dtype, device):
        self.stores = [torch.zeros(2, n_places + beyond, cfg.kv_heads, cfg.head_width, dtype=dtype, device=device) for _ in range(n_blocks)]
        self.n_places, self.free = n_places, [(0, n_places)] * (n_places > 0)    # (first, end) of runs, in order

    def take(self, size):
        """The first free run of `size` places, or None."""
        for i, (first, end) in enumerate(self.free):
            if end - first >= size:
                self.free[i : i + 1] = [(first + size, end)] * (end - first > size)
                return Span(first, size)
        return None

    def give(self, span):
        runs = sorted([*self.free, (span.first, span.first + span.size)])
        self.free = runs[:1]
        for first, end in runs[1:]:
            if first == self.free[-1][1]:
                self.free[-1] = (self.free[-1][0], end)
            else:
                self.free.append((first, end))

    def grow(self, span):
        """One unit more for a span, where it lies or elsewhere; False: there is no room."""
        end = span.first + span.size
        for i, (first, stop) in enumerate(self.free):
            if first == end and stop - first >= UNIT:
                self.free[i : i + 1] = [(first + UNIT, stop)] * (stop - first > UNIT)
                span.size += UNIT
                return True
        new = self.take(span.size + UNIT)
        if new is None:
            return False
        for store in self.stores:
            store[:, new.first : new.first + span.used] = store[:, span.first : span.first + span.used]
        self.give(span)
        span.first, span.size = new.first, new.size
        return True

    def read(self, span, n):
        return [store[:, span.first : span.first + n].clone() for store in self.stores]

    def write(self, span, entries):
        for store, entry in zip(self.stores, entries):
            store[:, span.first : span.first + entry.size(1)] = entry


class HalfRows(NamedTuple):
    """Around a seat, for kv=share_k and share_v, as model.py's HalfKept: what a row makes at step 0 is kept by its slot."""
    seat: Seat
    kept: torch.Tensor
    half: int
    slot_A: torch.Tensor
    first_A111: torch.Tensor         # rows at step 0

    window = property(lambda self: self.seat.window)

    def exchange(self, make):
        make, n = list(make), self.window.n_made
        made = make[self.half](n).to(self.kept.dtype)         # rows at step 0 come first
        self.kept[self.slot_A[:n]] = torch.where(self.first_A111[:n], made, self.kept[self.slot_A[:n]])
        make[self.half] = lambda n=None: self.kept[self.slot_A]
        return self.seat._replace(window=self.window._replace(n_made=None)).exchange(make)


class Shelves:
    """The K and V of all requests in flight, cut to what each needs, and where the next pass of the model writes and reads. To the
    model it is a cache as those of model.py (room 3), for one new token per row.

    Three spaces: outer, for prelude and coda; core; with early exit coda. In a space a request has a window per *lane*: a step of
    the core or of such a coda, one for all steps where they share or compress. A window has the places that its step's capacity
    declares, in units of UNIT, and where more tokens come than declared it grows by a unit. fixed: passes have rows that are only
    there to fill up, whose slot and places are one more than there are."""

    def __init__(self, model, n_slots, n_places, n_whole, depth, exit, how, by_arrival=True, fixed=False):
        cfg, device, dtype = model.cfg, model.embed.weight.device, cache_dtype(model)
        self.cfg, self.depth, self.exits, self.device, self.fixed, self.most = cfg, depth, exit is not None, device, fixed, n_places
        self.by_arrival = by_arrival and cfg.router != "none" and cfg.kv != "share"
        self.lanes = depth if how == "full" and cfg.kv != "share" else min(1, depth)         # of the core
        blocks = {"outer": cfg.n_prelude + cfg.n_coda * (not self.exits), "core": cfg.n_core, "coda": cfg.n_coda * self.exits}
        places = {name: n_whole * sum(sizes) for name, sizes in self.sizes(n_places).items()}
        if self.by_arrival:                                   # one request alone may take every step with every token
            places["core"] = max(places["core"], self.lanes * whole_units(n_places))
        beyond = fixed * (UNIT + n_places * (flash_attn_with_kvcache is not None))           # its last window ends there
        self.spaces = {name: Space(cfg, n, places[name], beyond, dtype, device) for name, n in blocks.items()}
        rows = lambda *front: torch.zeros(*front, cfg.kv_heads, cfg.head_width, dtype=dtype, device=device)
        self.share, self.scratch = FOLDS[how], [rows(2, n_slots + fixed) for _ in range(cfg.n_core * (how in ("first", "mean")))]
        self.half = {"share_k": 0, "share_v": 1}.get(cfg.kv)
        self.halves = [rows(n_slots + fixed, 1) for _ in range(cfg.n_core * (self.half is not None))]

    def sizes(self, n):
        """Places that a request of n tokens is given, lane by lane."""
        core = [slot_places(self.cfg, lane * self.cfg.n_core, n) if self.by_arrival else n for lane in range(self.lanes)]
        return {"outer": [whole_units(n)], "core": list(map(whole_units, core)), "coda": [whole_units(n)] * (max(1, self.depth) * self.exits)}

    def nbytes(self):
        """Bytes allocated."""
        return sum(x.nbytes for x in (*(store for space in self.spaces.values() for store in space.stores), *self.scratch, *self.halves))

    # ---- windows of a request

    def take(self, request):
        """Give it its windows. False: there is no room for all of them now."""
        request.windows = {name: [] for name in self.spaces}
        for name, sizes in (request.sizes or self.sizes(request.n_places)).items():
            for size in sizes:
                span = self.spaces[name].take(size) if self.spaces[name].stores else Span(0, size)
                if span is None:
                    self.give(request)
                    return False
                request.windows[name].append(span)
        return True

    def give(self, request):
        for name, spans in request.windows.items():
            for span in spans if self.spaces[name].stores else ():
                self.spaces[name].give(span)
        request.windows = {}

    def adopt(self, request, cache):
        """Take over what a cache of one row holds of its prompt. False: more of it came than its windows can grow to take."""
        n, inner = request.n_prompt, getattr(cache, "inner", cache)
        of = {"outer": [inner.outer], "core": [[inner.core[inner.core_slot(lane, j)] for j in range(self.cfg.n_core)] for lane in range(self.lanes)],
              "coda": cache.coda if self.exits else []}
        for name, spans in request.windows.items():
            for lane, span in enumerate(spans):
                used = inner.arrived[lane][0] if name == "core" and self.by_arrival else n
                while span.size < used:
                    if not self.spaces[name].grow(span):
                        return False
                span.used = used
                self.spaces[name].write(span, [kv[:, :used] for kv in of[name][lane]])
        return True

    def read(self, request):
        """What its windows hold, to be put back by write()."""
        return {name: [(span.used, self.spaces[name].read(span, min(span.size, len(request.ids)))) for span in spans] for name, spans in request.windows.items()}

    def write(self, request, held):
        for name, spans in request.windows.items():
            for span, (used, entries) in zip(spans, held[name]):
                span.used = used
                self.spaces[name].write(span, entries)

    # ---- before a pass: where its rows write and read

    def lane(self, request, step):
        return request.windows["core"][step if self.lanes > 1 else 0]

    def full(self, request):
        """Whether its next step has no place left."""
        span = self.lane(request, request.step)
        return self.by_arrival and span.used == span.size

    def core_row(self, request):
        """For its next step: where it writes, and the first and the number of places that it reads; twice, for the core and a coda."""
        span, at = self.lane(request, request.step), request.position
        if self.by_arrival:
            at, span.used = span.used, span.used + 1
        reads = self.cfg.kv == "share" and request.step > 0   # what was made at step 0
        return [self.nowhere("core")[0] if reads else span.first + at, span.first, at + 1,
                *(self.row("coda", request, request.step, request.position) if self.exits else ())]

    def row(self, name, request, lane, position):
        """For a token that writes at its position and reads all up to it."""
        first = request.windows[name][lane].first
        return [first + position, first, position + 1]

    def nowhere(self, name):
        return [self.spaces[name].n_places, self.spaces[name].n_places, 1]

    def window(self, table, at, rows, n_made=None):
        """The Window of a pass. table: its rows, on the device, where from column `at` on core_row() or row() stand; rows: the same as lists."""
        place_C, first_A, n_A = table[:, at : at + 3].unbind(1)
        reach, span_A = ((first_A, n_A, self.most), None) if self.fixed else (None, [(row[at + 1], row[at + 1] + row[at + 2]) for row in rows])
        place_C = place_C if n_made is None else place_C[:n_made] if n_made else None
        return Window(place_C, span_A=span_A, n_made=n_made, reach=reach)

    def begin_core(self, table, rows):
        """table: slot, step, core_row()"""
        self.slot_A, self.first_A111 = table[:, 0], table[:, 1, None, None, None] == 0
        n_first = None if self.fixed or self.cfg.kv == "own" else sum(row[1] == 0 for row in rows)              # K and V of the others are there
        n_first = None if n_first == len(rows) else n_first
        self.core_window = self.window(table, 2, rows, n_first)
        if self.half is not None:                             # only one of the two is
            self.core_window = self.core_window._replace(place_C=table[:, 2])
        if self.exits:
            self.exit_window = self.window(table, 5, rows)

    def begin_finish(self, table, rows):
        """table: slot, row()"""
        self.finish_window = self.window(table, 1, rows)

    def begin_start(self, table, rows):
        """table: slot, token, position, row()"""
        self.outer_window, self.position_P1 = self.window(table, 3, rows), table[:, 2:3]

    def leave(self, requests):
        """Early exit: these go no deeper, and later steps see them with the K and V of their last one."""
        for name, lanes in (("core", self.lanes), ("coda", self.depth)):
            pairs = [(spans[request.step - 1].first + request.position, spans[lane].first + request.position)
                     for request in requests for spans in [request.windows[name]] for lane in range(request.step, lanes)]
            if pairs and not (name == "core" and (self.by_arrival or self.lanes == 1)):
                source, target = sent(pairs, self.device).T
                for store in self.spaces[name].stores:
                    store[:, target] = store[:, source]

    # ---- what the model asks of a cache

    def open(self, B, T, n_new_B, device):
        return self.position_P1

    def arrive(self, step, who):
        pass

    def seat(self, i):
        return Seat(self.spaces["outer"].stores[i], self.outer_window)

    def coda_seat(self, i):
        return Seat(self.spaces["coda"].stores[i] if self.exits else self.spaces["outer"].stores[self.cfg.n_prelude + i], self.finish_window)

    def core_seat(self, step, j):
        seat = Seat(self.spaces["core"].stores[j], self.core_window)
        return seat if self.half is None else HalfRows(seat, self.halves[j], self.half, self.slot_A, self.first_A111)

    def exit_seat(self, step, i):
        return Seat(self.spaces["coda"].stores[i], self.exit_window)

    def settle(self, step):
        """Compressed: what was attended to becomes what is kept."""
        if not self.scratch:
            return
        place_C, share = self.core_window.place_C, self.share(step)
        share = share if isinstance(step, int) else share[..., None].to(self.scratch[0].dtype)
        for store, kept in zip(self.spaces["core"].stores, self.scratch):
            new = store[:, place_C]
            old = torch.where(self.first_A111[..., 0], new, kept[:, self.slot_A])            # none before step 0: a share of 0 of a NaN would be one
            store[:, place_C] = kept[:, self.slot_A] = torch.lerp(old, new, share)


class Engine:
    """Serves requests: each comes with its own prompt and length, gets a slot as soon as one is free, and writes the same text as alone.

        engine = Engine(model, slots=32)
        engine.submit(ids, max_new_tokens=100)
        for request, token in engine.run():          # streamed: request.number, request.text; token None = request.error
            ...

    Continuous *sequence* batching: a request takes the place of one that is done; all rows take each step together. Continuous
    *depth-wise* batching [MoR, 2.2.2] (depthwise; the default where tokens stop at different depths): rows at different steps share one
    call of `Recursion.step`; rows that stop are collected, go through finish, sampling and start together, and others take their places.

    slots: requests in flight. core_rows: depth-wise, of them in one step (None: all). n_places: tokens of the longest request, prompt and text (None:
    block_size). n_whole: K/V memory, in requests of that length at declared capacities (None: slots). finish_rows: depth-wise, finish waits for so
    many while the core is full. For measuring: steps, (request number, position) -> steps to take, in place of the router's answer, which is
    asked all the same; by_arrival=False: a routed step reads as many places as there are tokens, which changes the texts. fixed: passes of fixed shapes, filled up, and
    on CUDA replayed as graphs (None: on CUDA). depth, cache, threshold, exit, exit_threshold: as generate's. Puts the model in evaluation mode. ValueError on
    what the model cannot do."""

    def __init__(self, model, slots=32, core_rows=None, n_places=None, n_whole=None, finish_rows=1, depthwise=None, depth=None, cache="full",
                 threshold=None, exit=None, exit_threshold=None, steps=None, by_arrival=True, fixed=None, autocast=None):
        cfg = model.eval().cfg
        cfg.check_cache(cache)
        check_threshold(threshold)
        if threshold is not None and cfg.router != "expert":
            raise ValueError(f"threshold={threshold} given, but this model (router={cfg.router!r}) has no expert-choice router; leave it out")
        self.model, self.depth, self.exit_threshold = model, model.check_depth(depth), model.check_exit(exit, exit_threshold)
        self.depthwise = (cfg.router != "none" or exit is not None) and cfg.any_depth if depthwise is None else depthwise
        if self.depthwise and not cfg.any_depth:
            raise ValueError(f"depthwise=True does not go with sharing={cfg.sharing_name!r}, whose steps run different blocks; use a cycle, or depthwise=False")
        for name, value in (("slots", slots), ("core_rows", core_rows), ("n_places", n_places), ("n_whole", n_whole), ("finish_rows", finish_rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small; an engine needs at least 1")
        if n_places is not None and n_places > cfg.block_size:
            raise ValueError(f"n_places={n_places} is more than block_size={cfg.block_size}, the positions that the model knows")
        self.core_rows = min(core_rows or slots, slots) if self.depthwise else slots
        self.finish_rows, self.exit, self.cache, self.steps = finish_rows, exit, cache, steps
        self.n_places = n_places or cfg.block_size
        self.asked, self.threshold = threshold, as_logit(cfg.threshold if threshold is None else threshold)
        self.autocast, self.fixed = autocast or contextlib.nullcontext(), model.embed.weight.is_cuda if fixed is None else fixed
        with self.autocast, torch.inference_mode():
            self.shelves = Shelves(model, slots, self.n_places, n_whole or slots, self.depth, exit, cache, by_arrival, self.fixed)
            self.watch = EXITS[exit](model, None, self.shelves, self.exit_threshold)
            if exit is not None:
                self.watch.make_room(slots + self.fixed)
        self.free, self.slots, self.state = list(range(slots))[::-1], slots, {}
        outer, nowhere = "coda" if exit else "outer", self.shelves.nowhere
        self.fill = {"core": [slots, 0, *nowhere("core"), *nowhere("coda") * (exit is not None)], "finish": [slots, *nowhere(outer)],
                     "start": [slots, 0, 0, *nowhere("outer")]}      # rows that only fill up, per pass
        self.passes = {"core": self.core_pass, "finish": self.finish_pass, "start": self.start_pass}
        if self.fixed and model.embed.weight.is_cuda:
            self.passes = {name: Replay(call, self.fill[name]) for name, call in self.passes.items()}
        self.waiting, self.flying, self.events, self.untold, self.number, self.counts = deque(), [], [], deque(), 0, Counter()

    busy = property(lambda self: bool(self.waiting or self.flying))

    def submit(self, prompt, max_new_tokens, stop=None, temperature=0.0, top_k=None, top_p=None, seed=0):
        """A new request, at the end of the queue. prompt: token ids; stop: an id that ends the text; seed: its own, so that its draws are
        those of generate alone. ValueError where it can never fit."""
        check_sampling(temperature, top_k, top_p)
        ids = [int(i) for i in prompt]
        if not ids:
            raise ValueError("an empty prompt has nothing to continue; begin with one token, for example end-of-text")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: a request writes at least one token, and a whole number of them")
        if not 0 <= min(ids) <= max(ids) < self.model.cfg.vocab_size:
            raise ValueError(f"the prompt holds tokens {min(ids)} to {max(ids)}, and this model knows 0 to {self.model.cfg.vocab_size - 1}; encode it with its own tokenizer")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed} does not fit into 64 bits; give a smaller one")
        rng = generator(seed, self.model.embed.weight.device) if temperature else None
        request = Request(self.number, ids, len(ids), max_new_tokens, stop, not temperature, lambda logits_BV: draw(logits_BV, temperature, top_k, top_p, rng))
        if request.n_places > self.n_places:
            raise ValueError(f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens} can never fit: that is {request.n_places} places of K and V, "
                             f"and a request has n_places={self.n_places} at most; ask for less, or make an engine (or a model) for more")
        self.number += 1
        self.waiting.append(request)
        return request

    def run(self):
        """Yields (request, token) as tokens come, until all requests are done. Left in the midst, the next run() goes on there."""
        while self.busy or self.untold:
            self.untold.extend([] if self.untold else self.tick())
            while self.untold:
                yield self.untold.popleft()

    @torch.inference_mode()
    def tick(self):
        """One step for the rows in the core; finish, sampling and start for those who wait for it; whose last token that is, their slots are
        free for the next before start. Then hear once what became of all. A list of (request, token)."""
        if self.model.training:                               # somebody has trained it since
            self.model.eval()
        with self.autocast:
            core = self.next_core()
            due = self.outer_is_due(core)
            finish = self.waits_for("finish") if due else []
            going, last = ([request for request in finish if (len(request.text) + 1 < request.max_new_tokens) == more] for more in (True, False))
            finish = going + last                             # so that the tokens of those who go on stand first
            on_A1 = self.pass_core(core) if core else None
            token_P, fine_P = self.pass_finish(finish) if finish else (None, None)
            for request in last:
                self.leave(request)
            self.admit()
            start = self.waits_for("start") if due else []
            on_L1 = self.pass_start(token_P, going, start) if going or start else None
        heard = hear(on_A1, token_P, fine_P, on_L1)
        self.after_core(core, heard[0] or [1] * len(core))
        began = dict(zip(going + start, heard[3] or [1] * (len(going) + len(start))))
        for request, token, fine in zip(finish, heard[1], heard[2]):
            self.written(request, token if fine else None, began.get(request))
        for request in start:
            self.begin(request, began[request])
        events, self.events = self.events, []
        return events

    # ---- who goes where

    def admit(self):
        """Waiting requests, in order, into free slots."""
        while self.waiting and self.free:
            if not self.shelves.take(self.waiting[0]):        # nobody overtakes; and one alone always fits
                return
            request = self.waiting.popleft()
            request.slot, request.at = self.free.pop(), "start"
            self.flying.append(request)
            if request.restore is not None:
                restore, request.restore, request.sizes = request.restore, None, None
                restore()
            elif request.n_prompt > 1:
                self.read_prompt(request)

    def read_prompt(self, request):
        """All of it at once, by itself, with a cache of its own, whose entries the request then takes over."""
        cache = make_cache(self.model, 1, request.n_prompt, self.depth, self.exit)
        ids_1T = torch.tensor([request.ids], device=self.model.embed.weight.device)
        logits_1V = at_least_fp32(self.model.feed(ids_1T, cache, self.depth, None, False, self.asked, self.exit, self.exit_threshold)[:, 0])
        self.counts["prompt_tokens"] += request.n_prompt
        self.written(request, int(request.draw(logits_1V)) if torch.isfinite(logits_1V).all() else None)
        if request.at != "done" and not self.shelves.adopt(request, cache := cache.compress(self.cache)):
            sizes = self.shelves.sizes(request.n_places)
            sizes["core"] = [max(size, whole_units(arrived[0])) for size, arrived in zip(sizes["core"], getattr(cache, "inner", cache).arrived)]
            self.wait(request, sizes, lambda: self.shelves.adopt(request, cache))

    def next_core(self):
        """The rows of the next step. Depth-wise those in the midst of the loop go first, so that they are soon through; else those at the
        first step that any waits for, as who was put aside may be further than the others."""
        rows = self.waits_for("core")
        if self.depthwise:
            rows = sorted(rows, key=lambda request: request.step == 0)[: self.core_rows]
        else:
            first = min((request.step for request in rows), default=0)
            rows = [request for request in rows if request.step == first]
        for request in rows:
            self.find_place(request)
        return sorted([request for request in rows if request.at == "core"], key=lambda request: request.step)

    def waits_for(self, what):
        return [request for request in self.flying if request.at == what]

    def outer_is_due(self, core):
        """Whether finish and start run beside this step."""
        if not self.depthwise:
            return not core
        return len(core) < self.core_rows or len(self.waits_for("finish")) + len(self.waits_for("start")) >= self.finish_rows

    def find_place(self, request):
        """For what its next step adds. Where memory is full the youngest make room, and wait again."""
        space = self.shelves.spaces["core"]
        while request.at == "core" and self.shelves.full(request) and not space.grow(self.shelves.lane(request, request.step)):
            youngest = max(self.flying, key=lambda other: other.number)
            self.put_aside(youngest, self.shelves.lane(request, request.step) if youngest is request else None)

    def put_aside(self, request, short=None):
        """Its slot and windows are free for others; it comes back as it was, with a unit more for the window that was short."""
        at, held, state = request.at, self.shelves.read(request), {name: x[request.slot].clone() for name, x in self.kept().items()}

        def restore():
            request.at = at
            self.shelves.write(request, held)
            for name, x in self.kept().items():
                x[request.slot] = state[name]

        self.wait(request, {name: [span.size + UNIT * (span is short) for span in spans] for name, spans in request.windows.items()}, restore)
        self.counts["put_aside"] += 1

    def wait(self, request, sizes, restore):
        self.leave(request)
        request.at, request.sizes, request.restore = "waiting", sizes, restore
        self.waiting.appendleft(request)

    def kept(self):
        """What there is for each slot."""
        return self.state | ({"x": self.watch.x_BTD, "past": self.watch.past} if self.exit else {}) | dict(enumerate(self.shelves.halves))

    def cancel(self, request):
        """Nobody wants more of it."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.leave(request)
        request.at, request.sizes, request.restore = "done", None, None

    def leave(self, request):
        if request in self.flying:
            self.flying.remove(request)
            self.shelves.give(request)
            self.free.append(request.slot)
            request.slot = None

    def fail(self, request, error):
        self.cancel(request)
        request.error = error
        self.events.append((request, None))

    # ---- the passes of the model: rows of numbers are made on the host, and go over at once as a table

    def table(self, name, rows):
        """The rows of a pass on the device, and as lists. fixed: filled up, the core's to all that it takes, others to eights."""
        n = 0 if not self.fixed else self.core_rows if name == "core" else -(-len(rows) // 8) * 8
        rows = rows + [self.fill[name]] * (n - len(rows))
        return sent(rows, self.model.embed.weight.device), rows

    def of(self, names, slot_n):
        return {name: self.state[name][slot_n] if name in self.state else None for name in names}

    def pass_core(self, requests):
        """A step of each one's own; None or who goes on."""
        rows = [[request.slot, request.step, *self.shelves.core_row(request)] for request in requests]
        self.counts.update(core_calls=1, core_rows=len(rows), core_keys=sum(row[4] for row in rows))
        on_A1 = self.passes["core"](*self.table("core", rows), None if self.depthwise else requests[0].step)
        return on_A1 if on_A1 is None else on_A1[: len(rows)]

    def core_pass(self, table, rows, step):
        """table: slot, step, ...; step: of all rows, or None."""
        slot_A, state = table[:, 0], self.state
        self.shelves.begin_core(table, rows)
        who = Who(**self.of(("position_AC", "cos", "sin", "score_AC1"), slot_A), index_AC=slot_A[:, None], choose=flags, tell=flag, threshold=self.threshold,
                  **{name: state.get(name) for name in ("wanted_BT1", "score_BT1", "e_BTD")})
        anchor = [x for name, x in state.items() if name.startswith("anchor")]
        before = self.kept()
        state["h"], who = self.model.recursion.step(state["h"], anchor, who, table[:, 1:2] if step is None else step, Silence(), self.shelves, self.watch)
        if self.fixed:                                        # everything stays where it is
            after = self.kept()
            for name in ("h", "x", "past"):
                if name in before:
                    before[name].copy_(after[name])
            state["h"] = before["h"]
            if self.exit:
                self.watch.x_BTD, self.watch.past = before["x"], before["past"]
        if who.score_AC1 is not None:
            state["score_AC1"][slot_A] = who.score_AC1
        return who.real_AC

    def pass_finish(self, requests):
        """The next token of each, and whether its logits were finite."""
        name = "coda" if self.exit else "outer"
        rows = [[request.slot, *self.shelves.row(name, request, 0, request.position)] for request in requests]
        self.counts.update(finish_calls=1, finish_rows=len(rows), finish_keys=sum(row[3] for row in rows))
        logits_PV, fine_P = (x[: len(rows)] for x in self.passes["finish"](*self.table("finish", rows)))
        if all(request.greedy for request in requests):
            return logits_PV.argmax(-1), fine_P
        return torch.cat([request.draw(z_1V) for request, z_1V in zip(requests, logits_PV.split(1))]), fine_P

    def finish_pass(self, table, rows):
        slot_P = table[:, 0]
        if self.exit and self.depth:                          # read after every step, the last one included
            x_P1D = self.watch.x_BTD[slot_P]
        else:
            self.shelves.begin_finish(table, rows)
            x_P1D = self.model.finish(self.state["h"][slot_P], Who(**self.of(("position_AC", "cos", "sin"), slot_P)), self.shelves.coda_seat)
        logits_PV = at_least_fp32(self.model.head(x_P1D)[:, 0])
        fine_P = torch.isfinite(logits_PV).all(-1)
        return logits_PV.masked_fill(~fine_P[:, None], 0.0), fine_P

    def pass_start(self, token_P, going, start):
        """The tokens that were just drawn, and first ones; None or who takes step 0."""
        rows = [[request.slot, 0, request.position + 1, *self.shelves.row("outer", request, 0, request.position + 1)] for request in going]
        rows += [[request.slot, request.ids[-1], request.position, *self.shelves.row("outer", request, 0, request.position)] for request in start]
        self.counts.update(start_calls=1, start_rows=len(rows), start_keys=sum(row[5] for row in rows))
        table, filled = self.table("start", rows)
        if going:
            table[: len(going), 1] = token_P[: len(going)]
        on_L1 = self.passes["start"](table, filled)
        return on_L1 if on_L1 is None else on_L1[: len(rows)]

    def start_pass(self, table, rows):
        """table: slot, token, position, ..."""
        slot_P = table[:, 0]
        self.shelves.begin_start(table, rows)
        e_P1D, who = self.model.start(table[:, 1:2], self.shelves, routing="flags", threshold=self.asked)
        h_P1D, anchor, who = self.model.recursion.enter(e_P1D, who, self.depth, Silence())
        new = {"h": h_P1D, **{f"anchor{i}": x for i, x in enumerate(anchor)},
               **{name: getattr(who, name) for name in ("position_AC", "cos", "sin", "score_AC1", "wanted_BT1", "score_BT1", "e_BTD")}}
        for name, x in new.items():
            if x is not None:
                self.state.setdefault(name, x.new_zeros(self.slots + self.fixed, *x.shape[1:]))[slot_P] = x
        if self.exit:
            self.watch.forget(slot_P)
        return who.real_AC

    # ---- what became of them

    def takes(self, request, step, on):
        """Whether the token at hand takes this step."""
        return step < self.depth and bool(on if self.steps is None else step < self.steps(request.number, request.position))

    def begin(self, request, on):
        request.step, request.at = 0, "core" if self.takes(request, 0, on) else "finish"

    def after_core(self, rows, on_A):
        for request, on in zip(rows, on_A):
            request.step += 1
            request.at = "core" if self.takes(request, request.step, on) else "finish"
        if self.exit:
            self.shelves.leave([request for request in rows if request.at == "finish"])

    def written(self, request, token, began=None):
        """Its next token; None: there is none. began: whether that takes step 0, where it has been started."""
        if token is None:
            return self.fail(request, NOT_FINITE)
        request.ids.append(token)
        self.events.append((request, token))
        if token == request.stop or len(request.text) == request.max_new_tokens:
            self.cancel(request)
        elif began is not None:
            self.begin(request, began)


class Replay:
    """A pass as CUDA graphs, one for each number of rows (and step of all rows). A graph is captured on rows that fill up, which change
    nothing that counts, and replayed on the table at hand."""

    def __init__(self, call, fill):
        self.call, self.fill, self.graphs = call, fill, {}

    def __call__(self, table, rows, *step):
        case = (len(table), *step)
        if case not in self.graphs:
            self.graphs[case] = self.capture(torch.tensor([self.fill] * len(table), device=table.device), rows, *step)
        held, graph, out = self.graphs[case]
        held.copy_(table)
        graph.replay()
        return out

    def capture(self, held, *others):
        graph, side, here = torch.cuda.CUDAGraph(), torch.cuda.Stream(held.device), torch.cuda.current_stream(held.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):                         # what is made at first use has to be there
            for _ in range(3):
                self.call(held, *others)
        here.wait_stream(side)
        with torch.cuda.graph(graph, stream=side):
            out = self.call(held, *others)
        return held, graph, out


def sent(rows, device):
    """Rows of numbers as a tensor on the device. A GPU takes them from pinned memory, or the host would wait for the passes before."""
    cuda = device.type == "cuda"
    return torch.tensor(rows, pin_memory=cuda).to(device, non_blocking=cuda)


def hear(*tensors):
    """All of them as lists, in one transfer; None: no list."""
    flat = [x.flatten().long() for x in tensors if x is not None]
    numbers = iter(torch.cat(flat).tolist() if flat else [])
    return [[] if x is None else [next(numbers) for _ in range(x.numel())] for x in tensors]


# ------------------------------------------------------------------------------------------------------------ command line


REQUEST_KEYS = {"prompt": str, "id": str | int, "max_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "stop": str, "seed": int}


def read_requests(path):
    """The dicts of a file of JSON lines, a request each; UserError names the line that is none."""
    lines = read_text(None if path == "-" else path, f"--requests={path}").split("\n")             # not splitlines: text may hold other ends of lines
    asked = [read_request(f"--requests={path}: line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise UserError(f"--requests={path} holds no request; write {{\"prompt\": \"some text\"}} to a line")
    return asked


def read_request(where, line):
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON ({error})")
    for name in request if isinstance(request, dict) else ():
        if name not in REQUEST_KEYS:
            raise UserError(f"{where}: a request has no {name!r}{config.near(name, REQUEST_KEYS) or '; it has ' + ', '.join(REQUEST_KEYS)}")
    if not isinstance(request, dict) or not isinstance(request.get("prompt"), str):
        raise UserError(f'{where} is no request; write {{"prompt": "some text"}}')
    for name, value in request.items():
        try:
            request[name] = value if value is None else config.cast(value, REQUEST_KEYS[name])
        except (ValueError, OverflowError):
            raise UserError(f"{where}: {config.clip(repr({name: value}), 80)} is not understood; a request has {', '.join(REQUEST_KEYS)}")
    return request


def run_requests(model, tokenizer, s, depth):
    """Serve a file of requests: an answer is written as soon as it is done."""
    asked, device = read_requests(s.requests), model.embed.weight.device
    engine = Engine(model, min(s.slots, len(asked)), depth=depth, cache=s.cache, exit=s.exit, exit_threshold=s.exit_threshold)
    started, rows, n_failed = time.perf_counter(), {}, 0

    def answer(about, error, row=None, request=None):
        said = {"error": error} if error else {"text": row.text, "tokens": len(request.text), "ended": "stop" if row.done else "length"}
        write(json.dumps({"id": about["id"], **said}, ensure_ascii=False) + "\n")
        return bool(error)

    for i, about in enumerate(asked):
        about = {"id": i, "max_new_tokens": s.max_new_tokens, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "stop": s.stop and as_typed(s.stop), "seed": s.seed + i,
                 **{name: value for name, value in about.items() if value is not None}}
        ids = tokenizer.encode_ordinary(about["prompt"]) or [tokenizer.eot_token]
        try:
            request = engine.submit(ids, about["max_new_tokens"], None, about["temperature"], about["top_k"], about["top_p"], about["seed"])
            rows[request] = about, Text(tokenizer, about["stop"])
        except ValueError as error:
            n_failed += answer(about, str(error))
    for request, token in engine.run():
        about, row = rows[request]
        if token is not None:
            row.add(token)
            if row.done:
                engine.cancel(request)
        if request.at == "done":
            row.end()
            n_failed += answer(about, request.error, row, request)
    seconds, n = time.perf_counter() - started, sum(len(request.text) for request in rows)
    say(f"{len(rows)} requests, {n:,} tokens in {seconds:.2f} s ({n / seconds:,.0f} tokens/s), {engine.slots} at a time, K/V {engine.shelves.nbytes() / 2**20:,.2f} MiB on {device}")
    if n_failed:
        raise UserError(f"{n_failed} of {len(asked)} requests failed; their answers say why")


def show(tokenizer, token):
    """A token in quotes, so that a space is seen; part of a character as its bytes: '\\xf0'."""
    if token >= tokenizer.n_vocab:
        return PADDED
    piece = tokenizer.decode_single_token_bytes(token)
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)[1:]


@torch.no_grad()
def run_trace(model, tokenizer, text, depth, n_best=5):
    """The likeliest next tokens after each depth from 0 (coda on the prelude's output) to `depth`."""
    ids = tokenizer.encode_ordinary(text)[-model.cfg.block_size :] or [tokenizer.eot_token]
    ids_BT = torch.tensor([ids], device=model.embed.weight.device)
    write(f"next token after {text!r}\n")
    for d in range(depth + 1) if model.cfg.any_depth else [depth]:
        p_V = model(ids_BT, depth=d).logits[0, -1].float().softmax(-1)
        best = p_V.topk(min(n_best, p_V.numel()))
        cells = [f"{show(tokenizer, i):>10} {p:.3f}" for p, i in zip(best.values.tolist(), best.indices.tolist())]
        write(f"depth {d:2d} |" + " |".join(cells) + "\n")


def main(argv):
    s = config.parse(argv, [SampleConfig], __doc__, words=("", len(argv)))      # words, only to say what to write instead
    if s.words:
        raise UserError(f"command line: sample.py takes flags alone, not {s.words[0]!r}: a prompt is --start=..., and the run in "
                        f"--out_dir knows its own config")
    check_ranges(s, {"num_samples": (1, math.inf), "slots": (1, math.inf), "max_new_tokens": (0, math.inf), "seed": (0, 2**63)})
    try:
        check_sampling(s.temperature, s.top_k, s.top_p)
    except ValueError as error:
        raise UserError(f"command line: {error}")
    device, dtype, autocast = pick_device(s)
    model, tokenizer, about = load_run(s.out_dir, device)
    say(f"{about['folder']}: {model.cfg.layout} update={model.cfg.update}, step {about['step']}, validation {about['val_loss']:.3f} nats/token; "
        f"{depth_meaning(model.cfg, s.recursions)}; {device} {dtype}")
    if s.trace is None and not any(s.start) and (hint := task_hint(about["settings"])):
        say(f"note: {hint}")
    if s.color and model.cfg.n_recur == 1:
        raise UserError(f"--color=True: this model ({model.cfg.layout}) has no recursion, so all tokens take the same step; leave the flag out")
    for name, unset in (("start", []), ("trace", None), ("color", False), ("num_samples", 1), ("use_cache", True)):
        if s.requests is not None and s.values[name] != unset:
            raise UserError(f"--{name} does not go with --requests, whose prompts are in the file, each written once and with a cache; leave one of the two out")
    if s.exit and s.trace is not None:
        raise UserError(f"--exit={s.exit} goes with sampling; --trace shows every depth, so leave one of the two out")
    try:
        model.cfg = at_threshold(model.cfg, s.threshold)
        depth = model.check_depth(s.recursions)
        model.check_exit(s.exit, s.exit_threshold)
        with autocast:
            if s.requests is not None:
                run_requests(model, tokenizer, s, depth)
            elif s.trace is not None:
                run_trace(model, tokenizer, as_typed(s.trace), depth)
            else:
                run_samples(model, tokenizer, s, depth)
    except ValueError as error:                                    # a cache that this model cannot use, damaged weights
        raise UserError(str(error))


if __name__ == "__main__":
    config.run(main)
