"""Train a model on a prepared data set; every setting is a key of a config file or a flag.

    python train.py config/grt_tiny.py                            # a laptop, some minutes, no download
    python train.py config/grt_small.py --batch_size=4 --max_iters=2e4 --learning_rate 1e-3
    python train.py config/grt_tiny.py --init_from=resume --max_iters=4000

The run's folder (out/<config name>) holds ckpt.pt, log.jsonl and config.py with each value's origin. Data order, depth,
noise and dropout are functions of (seed, step, micro-step), so a resumed run equals an unbroken one.
"""
import contextlib
import functools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import config  # before torch: see the top of config/__init__.py
import numpy as np
import torch

import prepare
from config import UserError, key
from model import GPT, GPTConfig, fold_in, generator, param_groups, stream

HERE = Path(__file__).resolve().parent
FORMAT = 1                    # of ckpt.pt


@dataclass
class TrainConfig:
    """Training: data, optimizer, schedule, evaluation"""
    out_dir: str | None = key(None, "the run's own folder; None = out/<name of the last config file>")
    init_from: str = key("scratch", "scratch, or resume: continue the run in out_dir", choices=("scratch", "resume"))
    dataset: str = key("stdlib", "name of a data set that prepare.py made; stdlib is made on first use")
    data_dir: str = key("data", "folder of the data sets")
    vocab_size: int | None = key(None, "rows of the token table; None = the data's, rounded up to a multiple of 64")
    seed: int = key(1337, "everything random follows from it")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps ...")
    dtype: str = key("auto", "auto = bfloat16 autocast on CUDA, float32 elsewhere", choices=("auto", "float32", "bfloat16"))
    compile: bool | str = key("auto", "torch.compile blocks and updates: auto = on CUDA only", choices=("auto", True, False))
    batch_size: int = key(12, "rows of a micro-batch")
    gradient_accumulation_steps: int = key(1, "micro-batches per optimizer step")
    max_iters: int = key(20000, "optimizer steps of the whole run")
    learning_rate: float = key(6e-4, "peak learning rate")
    schedule: str = key("cosine", "after the warm-up: cosine, or wsd (trapezoid): constant, then a linear cool-down", choices=("cosine", "wsd"))
    min_lr: float | None = key(None, "learning rate at the end; None = learning_rate / 10 (wsd: 0)")
    warmup_iters: int = key(2000, "steps of linear warm-up")
    lr_decay_iters: int | None = key(None, "step at which min_lr is reached; None = max_iters")
    cooldown_iters: int | None = key(None, "wsd: steps of the cool-down; None = a fifth of the run")
    cooldown_from: str | None = key(None, "wsd: a checkpoint of the stable phase: this run is its cool-down, to a budget of its own")
    keep_interval: int = key(0, "steps between checkpoints that are kept beside ckpt.pt; 0 = none (wsd: the cool-down's start is always kept)")
    weight_decay: float = key(0.1, "AdamW decay of matrices and tables; norms and biases have none")
    beta1: float = key(0.9, "AdamW")
    beta2: float = key(0.95, "AdamW")
    grad_clip: float = key(1.0, "largest gradient norm; 0 = no clipping")
    eval_interval: int = key(1000, "steps between evaluations, each with a checkpoint; 0 = only at the end")
    eval_tokens: int = key(65536, "validation tokens per evaluation: fixed windows, evenly spaced")
    log_interval: int = key(10, "steps between log lines")
    sample_tokens: int = key(300, "tokens that the trained model writes at the end; 0 = none")


# From (included) .. to (not): an infinite value is never meant.
RANGES = {"seed": (0, 2**63), "learning_rate": (0, math.inf), "min_lr": (0, math.inf), "weight_decay": (0, math.inf),
          "beta1": (0, 1), "beta2": (0, 1), "grad_clip": (0, math.inf), "batch_size": (1, math.inf),
          "gradient_accumulation_steps": (1, math.inf), "max_iters": (0, math.inf), "warmup_iters": (0, math.inf),
          "lr_decay_iters": (0, math.inf), "eval_tokens": (1, math.inf), "log_interval": (1, math.inf), "sample_tokens": (0, math.inf)}


def check_ranges(settings, ranges):
    """Refuse a number outside its range, NaN too. None stands for a default and is left alone."""
    for name, (low, high) in ranges.items():
        value = settings.values[name]
        if value is not None and not low <= value < high:
            below = "" if value < low else f" and below {high:g}"
            raise UserError(f"{settings.origins[name]}: {name}={value} is out of range; it must be at least {low}{below}")


# ------------------------------------------------------------------------------------------------------------------ data


class Split:
    """Tokens of one .bin file, read window by window. Not a memory map: its pages would stay resident for a whole run."""

    def __init__(self, data_dir, name, split, meta, block_size):
        self.path = Path(data_dir) / name / f"{split}.bin"
        self.dtype, self.width = np.dtype(meta["dtype"]).newbyteorder("<"), block_size + 1
        self.file = open(self.path, "rb", buffering=0)
        self.n_tokens = self.path.stat().st_size // self.dtype.itemsize
        self.n_windows = self.n_tokens - block_size             # the last one ends exactly at the end of the data
        if self.n_windows < 1:
            raise UserError(f"{self.path} holds {self.n_tokens} tokens, and one window of block_size={block_size} needs "
                            f"{self.width}; use a smaller --block_size or more text")

    def read(self, start, count):
        self.file.seek(start * self.dtype.itemsize)
        return np.fromfile(self.file, self.dtype, count).astype(np.int64)

    def batch(self, starts, device="cpu"):
        """(ids, targets), each (B, T): targets are ids one place on."""
        rows = torch.from_numpy(np.stack([self.read(int(s), self.width) for s in starts]))
        if torch.device(device).type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1].to(device), rows[:, 1:].to(device)

    def check_ids(self, vocab_size, most=2**28):
        """An id outside the table is an unreadable error on a GPU: look before training (at up to `most` tokens)."""
        chunk = 2**22
        starts = np.unique(np.linspace(0, max(0, self.n_tokens - chunk), max(1, min(most, self.n_tokens) // chunk + 1)).astype(int))
        top = max(int(self.read(int(s), chunk).max()) for s in starts)
        if top >= vocab_size:
            raise UserError(f"{self.path} holds token id {top}, but vocab_size={vocab_size}; the set does not fit the model")


def get_batch(split, batch_size, seed, device="cpu"):
    """A random batch, a function of the seed alone."""
    return split.batch(torch.randint(split.n_windows, (batch_size,), generator=generator(seed)), device)


def fixed_windows(split, eval_tokens):
    """Starts of the evaluation windows: evenly spaced, without overlap where the split is long enough."""
    block_size = split.width - 1
    n = max(1, min(eval_tokens, split.n_tokens) // block_size)
    return torch.linspace(0, split.n_windows - 1, n, dtype=torch.float64).long().unique()


def padded_vocab(vocab_size, meta):
    """The model's vocab_size: a given one if it covers the data's; None = the data's, up to a multiple of 64."""
    need = meta["vocab_size"]
    if vocab_size is not None and vocab_size < need:
        raise UserError(f"vocab_size={vocab_size} is smaller than the data set's {need}; leave it out, or give at least {need}")
    return vocab_size or 64 * math.ceil(need / 64)


def resolve_vocab(settings, fallback=50304):
    """vocab_size for counting, where no data need be there."""
    try:
        return padded_vocab(settings.vocab_size, prepare.load_meta(settings.data_dir, settings.dataset))
    except UserError:
        if settings.vocab_size is not None:
            return settings.vocab_size
        print(f"note: vocab_size is not set and data set {settings.dataset!r} is not here: counting with {fallback}", file=sys.stderr)
        return fallback


# ------------------------------------------------------------------------------------------------- device, schedule, loss


def pick_device(settings):
    """(device, dtype name, autocast context) as they will really be used."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device={name!r} cannot be used here ({str(error).splitlines()[0][:80]}); try --device=cpu")
    device, dtype = torch.device(name), settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    autocast = torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    return device, dtype, autocast


def learning_rate(step, s):
    """Linear warm-up, then cosine to min_lr. The first step (0) already moves; any warm-up and length is legal."""
    low = s.learning_rate / 10 if s.min_lr is None else s.min_lr
    end = s.max_iters if s.lr_decay_iters is None else s.lr_decay_iters
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / (s.warmup_iters + 1)
    progress = min(1.0, (step - s.warmup_iters) / max(1, end - s.warmup_iters))
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (s.learning_rate - low)


def compile_parts(model, **options):
    """Compile blocks and the update's read and write, never the loop: depth stays a Python integer outside every graph,
    so another depth needs no new one. In place, so the names of the weights do not change."""
    for block in model.blocks():
        block.compile(**options)
    update = model.recursion.update
    update.read, update.write = torch.compile(update.read, **options), torch.compile(update.write, **options)


def want_compile(choice, device):
    """Whether to compile; where it was asked for and cannot work, one line says so and the run goes on eagerly."""
    if not choice or (choice == "auto" and device.type != "cuda"):
        return False
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return True
    except Exception as error:
        print(f"note: torch.compile does not work here ({type(error).__name__}); running eagerly", file=sys.stderr)
        return False


def step_gradients(model, batches, seeds, autocast):
    """Accumulate the gradient of one optimizer step; returns (mean loss, depth). Each micro-batch weighs as much as the
    targets that count in it, so the update does not depend on how a batch is cut."""
    counts = [(targets_BT != -100).sum() for _, targets_BT in batches]          # tensors: no waiting for the device here
    loss, depth = 0.0, 0.0
    for (ids_BT, targets_BT), count, seed in zip(batches, counts, seeds):
        torch.manual_seed(seed[1])                            # dropout
        with autocast:
            out = model(ids_BT, targets_BT, seed=seed)
        share = count / sum(counts).clamp(min=1)
        (out.loss * share).backward()
        loss, depth = loss + out.loss.detach() * share, depth + out.depth_BT[0, 0] / len(batches)
    return loss, depth


def clip_gradients(model, grad_clip):
    """The gradient norm before clipping."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)


@torch.no_grad()
def evaluate(model, split, starts, depths, batch_size, device, autocast=contextlib.nullcontext()):
    """{depth: mean cross-entropy in nats per token} over fixed windows; plain, deterministic, noise off."""
    was_training, sums = model.training, {depth: 0.0 for depth in depths}
    model.eval()
    for i in range(0, len(starts), batch_size):
        ids_BT, targets_BT = split.batch(starts[i : i + batch_size], device)
        for depth in depths:
            with autocast:
                sums[depth] += model(ids_BT, targets_BT, depth=depth).losses["ce"].item() * len(ids_BT)
    model.train(was_training)
    return {depth: total / len(starts) for depth, total in sums.items()}


def eval_depths(cfg):
    """1, R/2 and R where the depth may change, else R."""
    return sorted({1, max(1, cfg.n_recur // 2), cfg.n_recur}) if cfg.any_depth else [cfg.n_recur]


@torch.no_grad()
def mean_gate(model, ids_BT):
    """Mean of the gate over tokens, features and the steps of a full-depth pass (None: there is no gate)."""
    unit, seen, was_training = getattr(model.recursion.update, "gate", None), [], model.training
    if unit is None:
        return None
    hook = unit.register_forward_hook(lambda module, args, g_BTD: seen.append(g_BTD.mean().item()))
    with torch.compiler.set_stance("force_eager"):
        model.eval()(ids_BT)
    model.train(was_training)
    hook.remove()
    return sum(seen) / len(seen)


# ------------------------------------------------------------------------------------------------- the run and its folder


@functools.cache                                              # what runs is the code as it was at the start
def commit():
    """Commit of this code, + where files differ from it; `unknown` without git or a .git folder."""
    try:
        run = lambda *args: subprocess.run(["git", "-C", str(HERE), *args], capture_output=True, text=True, timeout=10)
        head = run("rev-parse", "--short", "HEAD")
        if head.returncode or not (HERE / ".git").exists():
            return "unknown"
        return head.stdout.strip() + ("+" if run("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def hold(folder):
    """Take the folder for this process. The lock ends with the process, however it ends. Returns what keeps it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"out_dir={str(folder)!r} cannot be written ({error.strerror}); choose another with --out_dir=")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:                                       # no flock on this system: the newer run wins
        pass
    except OSError:
        raise UserError(f"another process is training in {folder}; wait for it, or choose another folder with --out_dir=")
    return lock


def claim_folder(settings):
    """(folder, lock). A new run never enters a folder that holds one: it takes <out_dir>-2, -3, ..."""
    name = Path(settings.files[-1]).stem if settings.files else "run"
    folder = Path(settings.out_dir or Path("out") / name)
    if settings.init_from == "resume":
        if not (folder / "ckpt.pt").is_file():
            raise UserError(f"init_from=resume, but {folder / 'ckpt.pt'} does not exist; name the run with --out_dir=")
        return folder, hold(folder)
    if folder.name in ("", ".."):
        raise UserError(f"out_dir={str(folder)!r} is no folder of the run's own; give it a name, for example --out_dir=out/mine")
    lock, n, wanted = hold(folder), 1, folder
    while any((folder / left).exists() for left in ("ckpt.pt", "log.jsonl")):
        n += 1
        folder = wanted.with_name(f"{wanted.name}-{n}")
        lock = hold(folder)
    if n > 1:
        print(f"{wanted} holds a run already: this one goes to {folder} (--init_from=resume would continue that one)")
    return folder, lock


def write_whole(path, write):
    """Write aside, sync, rename: at any moment the file is the old one or the new one, whole."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:                  # torch's own writer turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            aside.unlink()
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: is the disk full?"
        raise UserError(f"could not save {path} ({reason}); what was there before is intact")


def save_checkpoint(path, state):
    write_whole(path, lambda file: torch.save(state, file))


def load_checkpoint(path):
    """The dict that save_checkpoint wrote, on CPU: tensors and plain types only."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()                       # torch itself does not look at the checksums
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no checkpoint at {path}; train first: python train.py config/grt_tiny.py")
    except (IsADirectoryError, PermissionError, UnicodeEncodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read ({getattr(error, 'strerror', error.args[-1])}); move or rename it")
    except Exception as error:
        damaged = type(error).__name__
    if damaged:
        raise UserError(f"{path} is damaged or not a checkpoint ({damaged}); use another run or train again")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT}); train again")
    return state


@contextlib.contextmanager
def fitting(path):
    """Around all that takes a checkpoint apart: parts that are not there or do not fit are one line."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a whole checkpoint of this program ({reason[:150]}); use another run or train again")


def check_resume(state, cfg, meta, settings):
    """Model keys and tokenizer must be those of the checkpoint; says which other keys change."""
    for name, value in asdict(cfg).items():
        if state["model_config"].get(name, value) != value:
            raise UserError(f"resume: {name}={value!r}, but the checkpoint has {name}={state['model_config'][name]!r}; a model key "
                            f"cannot change (start a new run without --init_from=resume)")
    if state["fingerprint"] != meta["fingerprint"]:
        raise UserError(f"resume: the checkpoint was trained with tokenizer {state['tokenizer']!r} ({state['fingerprint']}), but data "
                        f"set {settings.dataset!r} has {meta['tokenizer']!r} ({meta['fingerprint']}); use its own data set")
    for name, value in settings.values.items():
        if name in state["settings"] and name not in ("out_dir", "init_from") and state["settings"][name] != value:
            print(f"resume: {name} was {state['settings'][name]!r}, now {value!r}")


class Log:
    """The same record as one aligned line on stdout and one JSON line in log.jsonl."""

    def __init__(self, path):
        self.path = path
        with contextlib.suppress(FileNotFoundError):          # a kill or a full disk may have cut the last line short
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def write(self, line, **record):
        print(line, flush=True)
        record = json.loads(json.dumps(record), parse_constant=str)             # JSON has no NaN: it becomes a word
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"could not write {self.path} ({error.strerror}); the last checkpoint there is intact")


def human(seconds):
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:{',.0f' if seconds >= 100 * size else '.2g'}} {unit}"
    return f"{seconds:.0f} seconds"


# ------------------------------------------------------------------------------------------------------------- start page


def estimate_seconds(model, settings, device, autocast, first_step):
    """Time for the rest of the run, from a timed forward and backward of a few rows, scaled by counted FLOPs."""
    cfg, T = model.cfg, model.cfg.block_size
    flops = lambda depth: cfg.flops_per_token(T, depth=depth)
    mean_depth = (cfg.min_depth + cfg.n_recur) / 2 if cfg.depth_sampling == "uniform" else cfg.n_recur
    tokens = int(min(settings.batch_size * T, max(64, 1e11 / flops(cfg.n_recur))))
    ids_BT = torch.zeros(max(1, tokens // T), min(T, tokens), dtype=torch.long, device=device)
    for _ in range(2):                                        # the first run warms up
        start = time.perf_counter()
        with autocast:
            loss = model(ids_BT, ids_BT, depth=cfg.n_recur, seed=(0, 0)).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        loss.item()                                           # waits for the device
        seconds = time.perf_counter() - start
    per_token = seconds / ids_BT.numel() / flops(cfg.n_recur)
    steps = max(0, settings.max_iters - first_step)
    trained = steps * settings.batch_size * settings.gradient_accumulation_steps * T * flops(mean_depth)
    n_evals = 1 + (steps // settings.eval_interval if settings.eval_interval > 0 else 0)
    evaluated = n_evals * settings.eval_tokens * sum(map(flops, eval_depths(cfg))) / 3
    return per_token * (trained + evaluated)


def start_page(settings, cfg, meta, folder, device, dtype, compiled):
    """What will run, printed before step 1."""
    T, B, A = cfg.block_size, settings.batch_size, settings.gradient_accumulation_steps
    changed = {k: v for k, v in settings.values.items() if settings.origins[k] != "default"}
    width = max(map(len, changed), default=0)
    lines = [f"  {name:<{width}} = {value!r:<12} {settings.origins[name]}" for name, value in changed.items()]
    lines += [f"  ({len(settings.values) - len(changed)} more keys at their defaults: {folder / 'config.py'})"]
    baselines = "   ".join(f"{name} {bits:.3f}" for name, bits in meta["baselines"].items())
    gate = f" update={cfg.update}" + (f" (gate bias {cfg.gate_bias:+g})" if cfg.update == "gate" else "")
    lines += [f"data       {settings.dataset}: " + ", ".join(f"{meta[split]['tokens']:,} {split} tokens" for split in prepare.SPLITS)
              + f", tokenizer {meta['tokenizer']} {meta['fingerprint']}, vocabulary {meta['vocab_size']} (model {cfg.vocab_size})",
              f"baselines  {baselines}   bits per byte on validation text",
              f"model      {cfg.layout} {cfg.block}{gate}: {cfg.n_params():,} unique parameters, {cfg.executed_blocks()} blocks "
              f"executed from {cfg.n_prelude + cfg.n_core + cfg.n_coda}",
              f"depth      training {cfg.depth_sampling}" + (f" {cfg.min_depth}..{cfg.n_recur}" if cfg.depth_sampling == "uniform" else f" {cfg.n_recur}")
              + f", evaluation {', '.join(map(str, eval_depths(cfg)))}",
              f"step       {B} rows x {T} tokens x {A} accumulation = {B * T * A:,} tokens; {settings.max_iters:,} steps = "
              f"{B * T * A * settings.max_iters / 1e6:,.2f}M tokens",
              f"machine    {device} {dtype}{' compiled' if compiled else ''}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
              f"Python {platform.python_version()}, commit {commit()}",
              f"folder     {folder}"]
    return "\n".join(lines + [f"note: {sentence}" for sentence in cfg.unused()])


# ------------------------------------------------------------------------------------------------------------------- main


def load_data(settings):
    """(meta, train split, validation split, model config): everything about the data is checked here."""
    if settings.dataset == "stdlib" and not (Path(settings.data_dir) / "stdlib" / "meta.json").exists():
        prepare.prepare("stdlib", data_dir=settings.data_dir)
    meta = prepare.load_meta(settings.data_dir, settings.dataset)
    cfg = settings.build(GPTConfig, vocab_size=padded_vocab(settings.vocab_size, meta))
    splits = [Split(settings.data_dir, settings.dataset, name, meta, cfg.block_size) for name in ("train", "val")]
    for split in splits:
        split.check_ids(cfg.vocab_size)
    return meta, *splits, cfg


def parse(argv):
    """Settings; without a config file those of grt_tiny, or of the run that is resumed."""
    settings = config.parse(argv, [GPTConfig, TrainConfig], __doc__)
    if not settings.files:
        own = Path(settings.out_dir or "") / "config.py"
        use_own = settings.init_from == "resume" and settings.out_dir and own.is_file()
        base = own if use_own else HERE / "config" / "grt_tiny.py"
        settings = config.parse([os.path.relpath(base), *argv], [GPTConfig, TrainConfig], __doc__)
        if use_own:                                           # its comments still know where each value came from
            for name, origin in re.findall(r"^(\w+) = .*  # (.*)$", own.read_text(encoding="utf-8"), re.M):
                if settings.origins.get(name) != "command line":
                    settings.origins[name] = origin
    check_ranges(settings, RANGES)
    settings.build(GPTConfig, vocab_size=settings.vocab_size or 64)          # refuse a bad shape before touching data
    return settings


def prepare_run(settings, cfg, meta, folder, device, dtype):
    """(model, optimizer, first step, best validation loss) of a new or a continued run; says what will run."""
    path, resumed = folder / "ckpt.pt", None
    if settings.init_from == "resume":
        resumed = load_checkpoint(path)
        with fitting(path):
            check_resume(resumed, cfg, meta, settings)
    compiled = want_compile(settings.compile, device)
    print(start_page(settings, cfg, meta, folder, device, dtype, compiled), flush=True)
    write_whole(folder / "config.py", lambda file: file.write(settings.dump().encode("utf-8")))

    torch.manual_seed(settings.seed)
    model = GPT(cfg).to(device)
    optimizer = torch.optim.AdamW(param_groups(model, settings.weight_decay), lr=settings.learning_rate,
                                  betas=(settings.beta1, settings.beta2), fused=device.type in ("cpu", "cuda"))
    first_step, best = 0, math.inf
    if resumed:
        with fitting(path):
            model.load_state_dict(resumed["model"])
            optimizer.load_state_dict(resumed["optimizer"])
            first_step, best = resumed["step"], resumed["best_val_loss"]
        for group, decay in zip(optimizer.param_groups, (settings.weight_decay, 0.0)):
            group.update(weight_decay=decay, betas=(settings.beta1, settings.beta2))
    if compiled:
        compile_parts(model)
    return model, optimizer, first_step, best


def main(argv):
    settings = parse(argv)
    device, dtype, autocast = pick_device(settings)
    meta, train_split, val_split, cfg = load_data(settings)
    folder, lock = claim_folder(settings)
    with lock:
        model, *rest = prepare_run(settings, cfg, meta, folder, device, dtype)
        run(model, *rest, settings, meta, train_split, val_split, folder, device, autocast)
    if settings.sample_tokens:
        text, encoding = write(model, meta, settings.sample_tokens), sys.stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)                # a terminal may know ASCII alone
        print(f"\nwhat it writes (more: python sample.py --out_dir={shlex.quote(str(folder))})\n{text}")


def run(model, optimizer, first_step, best, s, meta, train_split, val_split, folder, device, autocast):
    """From first_step to max_iters; the last step is always evaluated and saved."""
    log, starts, cfg = Log(folder / "log.jsonl"), fixed_windows(val_split, s.eval_tokens), model.cfg
    tokens = s.batch_size * s.gradient_accumulation_steps * cfg.block_size
    bits = meta["val"]["tokens"] / meta["val"]["bytes"] / math.log(2)       # nats per token -> bits per byte
    seconds = estimate_seconds(model, s, device, autocast, first_step)
    advice = ", try config/grt_tiny.py" if seconds > 86400 and device.type == "cpu" else ""
    log.write(f"time       about {human(seconds)}{advice}\n", event="start", step=first_step, estimated_seconds=seconds, commit=commit(),
              torch=str(torch.__version__), python=platform.python_version(), settings=s.values, data=meta["source"])

    def evaluate_and_save(step, best):
        losses = evaluate(model, val_split, starts, eval_depths(cfg), s.batch_size, device, autocast)
        loss = losses[cfg.n_recur]
        line = f"step {step:6d} | validation {loss:.4f} nats/token = {loss * bits:.4f} bits/byte"
        if len(losses) > 1:
            line += " | by depth " + "  ".join(f"{d}: {value * bits:.3f}" for d, value in losses.items())
        log.write(line, event="eval", step=step, val_loss=loss, bits_per_byte=loss * bits, by_depth=losses)
        if not math.isfinite(loss):
            raise UserError(f"the validation loss at step {step} is {loss}; nothing was saved over the last good checkpoint")
        best = min(best, loss)
        save_checkpoint(folder / "ckpt.pt", {
            "format": FORMAT, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "val_loss": loss,
            "best_val_loss": best, "model_config": asdict(cfg), "settings": dict(s.values), "tokenizer": meta["tokenizer"],
            "fingerprint": meta["fingerprint"], "commit": commit(), "torch": str(torch.__version__)})
        return best

    model.train()
    if first_step == 0:
        best = evaluate_and_save(0, best)                     # sanity: near ln(vocabulary) before anything is learned
    clock, clock_step = time.perf_counter(), first_step
    for step in range(first_step, s.max_iters):
        lr = learning_rate(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro = range(s.gradient_accumulation_steps)
        batches = [get_batch(train_split, s.batch_size, fold_in(s.seed, "data", step, i), device) for i in micro]
        seeds = [(fold_in(s.seed, "shared", step, i), fold_in(s.seed, "own", step, i, 0)) for i in micro]
        loss, depth = step_gradients(model, batches, seeds, autocast)
        norm = clip_gradients(model, s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % s.log_interval == 0 or done == s.max_iters:
            loss, depth, now = float(loss), float(depth), time.perf_counter()
            if not math.isfinite(loss):
                raise UserError(f"the training loss at step {done} is {loss}; the last good checkpoint is in {folder}")
            rate = (done - clock_step) * tokens / (now - clock)
            gate, left = mean_gate(model, batches[0][0][:1]), (s.max_iters - done) * tokens / rate
            log.write(f"step {done:6d} | loss {loss:.4f} | lr {lr:.2e} | norm {float(norm):6.2f} | depth {depth:4.3g} | gate "
                      f"{'   - ' if gate is None else f'{gate:.3f}'} | {rate:7,.0f} tok/s | {human(left)} left", event="step", step=done,
                      loss=loss, lr=lr, grad_norm=float(norm), depth=depth, gate=gate, tokens_per_second=rate)
            clock, clock_step = time.perf_counter(), done
        if done == s.max_iters or (s.eval_interval > 0 and done % s.eval_interval == 0):
            before = time.perf_counter()
            best = evaluate_and_save(done, best)
            clock += time.perf_counter() - before             # evaluation is not training time
    if first_step > 0 and first_step >= s.max_iters:
        print(f"the run is at step {first_step} and max_iters={s.max_iters}: nothing is left to train, only to evaluate")
        evaluate_and_save(first_step, best)


def write(model, meta, n_tokens, seed=0):
    """A short text from the trained model, from an empty start."""
    tokenizer, device = prepare.get_tokenizer(meta["tokenizer"]), model.embed.weight.device
    rng = generator(seed, device)
    ids = [row[0] for row in stream(model, [[tokenizer.eot_token]], n_tokens, temperature=0.8, top_k=50, generator=rng)]
    return tokenizer.decode([i for i in ids if i < tokenizer.n_vocab], errors="replace")


if __name__ == "__main__":
    config.run(main)
