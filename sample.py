"""Continue prompts with a trained run, at any depth.

    python sample.py                                              # the newest run in out/, from an empty start
    python sample.py --recursions 3 --start="def main(" --start="class " --num_samples=2
    python sample.py --trace "The author of the book 1984 was George"     # likeliest next tokens after each step of depth
    python sample.py --color=true --start="for i in range("               # each token in the colour of the steps that it took
    python sample.py --exit=kl --exit_threshold=0.01                      # a token leaves the loop once its prediction stands still

Text goes to stdout, everything else to stderr. All prompts and samples run as one batch with a K/V cache.
"""
import codecs
import itertools
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import config  # before torch: see the top of config/__init__.py
import torch

import prepare
from config import UserError, key
from model import FOLDS, GPT, GPTConfig, KVCache, cache_dtype, check_sampling, generator, stream
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
        tokenizer = prepare.get_tokenizer(state["tokenizer"])
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
    try:
        if start == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        if start.startswith("FILE:"):
            return Path(start[5:]).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--start={start}: cannot be read as UTF-8 text ({getattr(error, 'strerror', None) or error})")
    return as_typed(start)


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
        self.cache = next((x for x in args if isinstance(x, KVCache)), None)

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
    check_ranges(s, {"num_samples": (1, math.inf), "max_new_tokens": (0, math.inf), "seed": (0, 2**63)})
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
    if s.exit and s.trace is not None:
        raise UserError(f"--exit={s.exit} goes with sampling; --trace shows every depth, so leave one of the two out")
    try:
        model.cfg = at_threshold(model.cfg, s.threshold)
        depth = model.check_depth(s.recursions)
        model.check_exit(s.exit, s.exit_threshold)
        with autocast:
            if s.trace is not None:
                run_trace(model, tokenizer, as_typed(s.trace), depth)
            else:
                run_samples(model, tokenizer, s, depth)
    except ValueError as error:                                    # a cache that this model cannot use, damaged weights
        raise UserError(str(error))


if __name__ == "__main__":
    config.run(main)
