"""Train a model on a prepared data set; every setting is a key of a config file or a flag.

    python train.py config/grt_tiny.py                            # a laptop, some minutes, no download
    python train.py config/grt_small.py --batch_size=4 --max_iters=2e4 --learning_rate 1e-3
    python train.py config/grt_tiny.py --init_from=resume --max_iters=4000
    torchrun --nproc_per_node=8 train.py config/grt_small.py --parallel=fsdp

The run's folder (out/<config name>) holds ckpt.pt, log.jsonl and config.py with each value's origin. Data order, depth,
noise and dropout are functions of (seed, step, micro-step, process), so a resumed run equals an unbroken one. On several
processes the batch is the same too; only what is drawn per micro-step differs. Ctrl-C finishes the step and saves; a run
that torchrun restarts goes on from its last checkpoint. Without a config file: config/grt_tiny.py.
"""
import contextlib
import functools
import glob
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import config  # before torch: see the top of config/__init__.py
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import prepare
from config import UserError, key
from model import GPT, GPTConfig, RouterUnit, as_logit, fold_in, generator, n_chosen, param_groups, stream

HERE = Path(__file__).resolve().parent
FORMAT = 1                    # of ckpt.pt


@dataclass
class TrainConfig:
    """Training: data, optimizer, schedule, evaluation"""
    out_dir: str | None = key(None, "the run's own folder; None = out/<name of the last config file>")
    init_from: str = key("scratch", "scratch; resume: continue the run in out_dir; or a checkpoint whose weights a new run starts from")
    dataset: str = key("stdlib", "name of a data set that prepare.py made; stdlib, phop and addition are made on first use")
    data_dir: str = key("data", "folder of the data sets")
    vocab_size: int | None = key(None, "rows of the token table; None = the data's, rounded up to a multiple of 64")
    seed: int = key(1337, "everything random follows from it")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps ...")
    dtype: str = key("auto", "auto = bfloat16 autocast on CUDA, float32 elsewhere", choices=("auto", "float32", "bfloat16"))
    compile: bool | str = key("auto", "torch.compile blocks and updates: auto = on CUDA only", choices=("auto", True, False))
    parallel: str = key("ddp", "several processes: ddp = each holds the model; fsdp = each holds its share of it", choices=("ddp", "fsdp"))
    checkpoint_activations: bool = key(False, "keep each step's input alone and compute the step again in backward: less memory, more time")
    fused_loss: bool = key(True, "head and loss in chunks of tokens: all logits are never there at once")
    batch_size: int = key(12, "rows of a micro-batch")
    gradient_accumulation_steps: int = key(1, "micro-batches per optimizer step, over all processes")
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
    aux_router_lr_scale: float = key(1.0, "aux_router: factor on the learning rate of the routers that decide outside training (MoR: 10)")
    router_bias_rate: float = key(0.001, "router_balance=bias: by how much a depth's bias moves after each step, up where too few tokens chose it")
    capacity_warmup_iters: int = key(0, "expert: steps in which the capacities of training fall from 1 to their own, along a cosine")
    eval_interval: int = key(1000, "steps between evaluations, each with a checkpoint; 0 = only at the end")
    eval_tokens: int = key(65536, "validation tokens per evaluation: fixed windows, evenly spaced")
    log_interval: int = key(10, "steps between log lines")
    sample_tokens: int = key(300, "tokens that the trained model writes at the end; 0 = none")
    tensorboard: bool = key(False, "also write the log for TensorBoard, into the run's folder")


# From (included) .. to (not): an infinite value is never meant.
RANGES = {**dict.fromkeys(("learning_rate", "min_lr", "weight_decay", "grad_clip", "max_iters", "warmup_iters", "lr_decay_iters",
                           "cooldown_iters", "keep_interval", "sample_tokens", "aux_router_lr_scale", "router_bias_rate",
                           "capacity_warmup_iters"), (0, math.inf)),
          **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "eval_tokens", "log_interval"), (1, math.inf)),
          "seed": (0, 2**63), "beta1": (0, 1), "beta2": (0, 1)}


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

    def consecutive(self):
        """Starts of windows side by side: every token but the very first is predicted once; the last window may be cut."""
        return range(0, self.n_tokens - 1, self.width - 1)

    def check_ids(self, vocab_size, most=2**28):
        """An id outside the table is an unreadable error on a GPU: look before training (at up to `most` tokens)."""
        chunk = 2**22
        starts = np.unique(np.linspace(0, max(0, self.n_tokens - chunk), max(1, min(most, self.n_tokens) // chunk + 1)).astype(int))
        top = max(int(self.read(int(s), chunk).max()) for s in starts)
        if top >= vocab_size:
            raise UserError(f"{self.path} holds token id {top}, but vocab_size={vocab_size}; the set does not fit the model")


class Rows(Split):
    """A synthetic set: a window is a row, and the answers that it asks for are all that counts (prepare.py says how they are
    stored). groups: {name: rows}, in order, of a validation split."""

    def __init__(self, data_dir, name, split, meta, block_size):
        super().__init__(data_dir, name, split, meta, meta["row"])
        if block_size < meta["row"]:
            raise UserError(f"block_size={block_size} is shorter than a row of {name}; use --block_size={meta['row']}")
        self.n_windows, self.groups = self.n_tokens // meta["row"], meta["groups"]

    def read(self, start, count):
        return super().read(start, count) & 255

    def batch(self, starts, device="cpu"):
        """(ids, targets), each (B, row), of the rows of these numbers: targets are the answers, -100 where none is asked."""
        row = self.width - 1
        pairs_BT = torch.from_numpy(np.stack([Split.read(self, int(s) * row, row) for s in starts])).to(device)
        answer_BT = pairs_BT >> 8
        return pairs_BT & 255, answer_BT.masked_fill(answer_BT == 0, -100)

    def consecutive(self):
        return range(self.n_windows)

    def group_of(self, starts):
        """The number of the group that each of these rows belongs to."""
        return torch.bucketize(torch.as_tensor(starts), torch.tensor([*self.groups.values()]).cumsum(0), right=True)


def open_split(data_dir, name, split, meta, block_size):
    return (Rows if "row" in meta else Split)(data_dir, name, split, meta, block_size)


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
        vocab_size = padded_vocab(settings.vocab_size, prepare.load_meta(settings.data_dir, settings.dataset))
        if settings.vocab_size is None:
            print(f"note: counting with the vocabulary of data set {settings.dataset!r}; --vocab_size={fallback} gives the papers'", file=sys.stderr)
        return vocab_size
    except UserError:
        if settings.vocab_size is not None:
            return settings.vocab_size
        print(f"note: vocab_size is not set and data set {settings.dataset!r} is not here: counting with {fallback}", file=sys.stderr)
        return fallback


# ------------------------------------------------------------------------------------------------------------- processes


class World:
    """The processes that train one model: this one alone, or all that torchrun started. Rank 0 writes and speaks."""

    def __init__(self, environ=os.environ):
        self.rank, self.local_rank, self.size = (int(environ.get(name, default)) for name, default in
                                                 (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        self.exchange = lambda now: None                      # whether the next backward exchanges gradients

    @contextlib.contextmanager
    def together(self, device):
        """While this is open the processes can talk: gloo on the CPU, NCCL on CUDA. Other ranks print nothing."""
        own = self.size > 1 and not dist.is_initialized()
        if own:
            try:
                store, rank, size = next(dist.rendezvous("env://"))
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)    # no addresses of dead ranks
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
            except (ValueError, RuntimeError) as error:
                raise UserError(f"WORLD_SIZE={self.size}, but the processes do not find each other ({str(error).splitlines()[0][:120]}); start "
                                f"them with torchrun, or unset RANK and WORLD_SIZE")
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            with contextlib.redirect_stdout(nowhere if self.rank else sys.stdout):
                yield
        if own:                                               # not after an error: the others may never come
            dist.destroy_process_group()

    def sum(self, tensor):
        """`tensor` added up over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag):
        return bool(flag) if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def first(self, work):
        """What work() gives on rank 0, on every rank once it is done. A mistake that it finds ends all, and is said once."""
        if self.size == 1:
            return work()
        answer = [None, None]
        if self.rank == 0:
            try:
                answer[0] = work()
            except UserError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer)
        if answer[1]:
            raise UserError(answer[1]) if self.rank == 0 else SystemExit(2)
        return answer[0]

    def spread(self, model, parallel):
        """The module to call in training: `model`, ready for several processes. fsdp shards it in place, the loop as one
        unit: the core is gathered once in forward and once in backward, however many steps it runs."""
        if self.size > 1 and parallel == "ddp":
            # The one buffer, a router's bias, is moved alike on every rank: nothing is to be sent at each forward.
            net = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
            self.exchange = lambda now: setattr(net, "require_backward_grad_sync", now)          # as DDP.no_sync() does
            return net
        if self.size > 1:
            from torch.distributed.fsdp import fully_shard    # here: it takes a second to import
            mesh = dist.init_device_mesh(model.embed.weight.device.type, (self.size,))
            for module in (*model.prelude, model.recursion, *model.coda, model):
                fully_shard(module, mesh=mesh)
            self.exchange = model.set_requires_gradient_sync
        return model


ALONE = World({})


def gathered(state, keep=True):
    """A state dict with its shards put together, which all ranks have to ask for at once. keep=False: only takes part."""
    if isinstance(state, dict):
        return {name: gathered(value, keep) for name, value in state.items()}
    whole = state.full_tensor() if hasattr(state, "full_tensor") else state
    return whole if whole is state else whole.cpu() if keep else None


def scattered(state, params):
    """An optimizer's state dict with each tensor sharded as its parameter is."""
    if not hasattr(params[0], "full_tensor"):
        return state
    from torch.distributed.tensor import distribute_tensor
    place = lambda value, p: distribute_tensor(value.to(p.device), p.device_mesh, p.placements) if value.shape == p.shape else value
    return {**state, "state": {i: {name: place(value, params[i]) for name, value in own.items()} for i, own in state["state"].items()}}


# ------------------------------------------------------------------------------------------------- device, schedule, loss


def pick_device(settings, world=ALONE):
    """(device, dtype name, autocast context) as they will really be used."""
    name = settings.device
    if world.size > 1 and name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name!r} cannot be shared by {world.size} processes; use cuda (one GPU each) or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and world.size > 1:
        name = f"cuda:{world.local_rank}"
    try:
        torch.zeros(1, device=name).item()
        if torch.device(name).index is not None:
            torch.cuda.set_device(name)                       # pinned memory and NCCL look at the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device={name!r} cannot be used here ({str(error).splitlines()[0][:80]}); try --device=cpu")
    device, dtype = torch.device(name), settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    autocast = torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    return device, dtype, autocast


def last_step(s):
    return s.max_iters if s.lr_decay_iters is None else s.lr_decay_iters


def cooldown_start(s):
    """First step of the trapezoid's cool-down."""
    return max(0, last_step(s) - (math.ceil(last_step(s) / 5) if s.cooldown_iters is None else s.cooldown_iters))


class Schedule(NamedTuple):
    """What follows the warm-up: the rate falls from its peak at `begin` to min_lr at the last step, along `shape`."""
    begin: Callable                # settings -> step
    shape: Callable                # progress in [0, 1] -> share of the way that is still to fall
    low: float                     # min_lr as a share of the peak


SCHEDULES = {
    "cosine": Schedule(lambda s: s.warmup_iters, lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), 0.1),
    "wsd": Schedule(cooldown_start, lambda progress: 1 - progress, 0.0),                     # warm-up, stable, decay  [MoR]
}


def learning_rate(step, s):
    """Linear warm-up, then as the schedule says. The first step (0) already moves; any warm-up and length is legal."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / (s.warmup_iters + 1)
    schedule = SCHEDULES[s.schedule]
    low = s.learning_rate * schedule.low if s.min_lr is None else s.min_lr
    progress = (step - schedule.begin(s)) / max(1, last_step(s) - schedule.begin(s))
    return low + schedule.shape(min(1.0, max(0.0, progress))) * (s.learning_rate - low)


def extra_capacity(step, s):
    """Share of the way from an expert's capacities up to 1 that a step still takes: 1 at first, 0 from the warm-up's end on."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / s.capacity_warmup_iters))) if s.capacity_warmup_iters else 0.0      # [MoR, capacity warm-up]


def compile_parts(model, ragged=False, **options):
    """Compile blocks and the update's read and write, never the loop: depth stays a Python integer outside every graph,
    so another depth needs no new one. In place, so the names of the weights do not change.

    An expert's step takes as many tokens each time: a graph per step. ragged: how many take a step differs from call to
    call, so the loop's parts get graphs that fit any number."""
    if model.cfg.router != "none":                            # one code for all steps: beyond the limit it would run uncompiled
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + 2 * model.cfg.n_recur)
    inside = {**options, "dynamic": True} if ragged else options
    for block in (*model.prelude, *model.coda):
        block.compile(**options)
    for block in model.recursion.core:
        block.compile(**inside)
    update = model.recursion.update
    update.read, update.write = torch.compile(update.read, **inside), torch.compile(update.write, **inside)


def is_ragged(cfg, s):
    """Whether the number of tokens in a step of training differs from call to call."""
    return cfg.router == "token" or (cfg.router == "expert" and s.capacity_warmup_iters > 0)


def checkpoint_activations(model):
    """Keep the input of every step alone, and of every block outside the loop (in a plain transformer: of every block);
    backward computes the rest again. Noise is a function of (seed, step) and dropout's generator is set back, so what is
    computed again is the same. In place, as compile_parts."""
    again = lambda call: functools.partial(checkpoint, call, use_reentrant=False, preserve_rng_state=model.cfg.dropout > 0)
    for block in model.blocks() if model.cfg.n_recur == 1 else (*model.prelude, *model.coda):
        block.forward = again(block.forward)
    if model.cfg.n_recur > 1:
        model.recursion.step = again(model.recursion.step)


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


def count_depths(depth_BT, most):
    """How many tokens took 0, 1 ... `most` steps (more count as that), without waiting for the device."""
    depth_N = depth_BT.flatten().clamp(max=most)
    return torch.zeros(most + 1, dtype=torch.long, device=depth_N.device).index_add_(0, depth_N, torch.ones_like(depth_N))


def step_gradients(net, batches, seeds, autocast, world=ALONE, most=None):
    """Accumulate the gradient of one optimizer step; returns (mean loss, how many tokens of all processes took 0 .. `most`
    steps; None: not counted). Each micro-batch weighs as much as the targets that count in it, so the update does not
    depend on how a batch is cut, into micro-batches or over processes."""
    counts = [(targets_BT != -100).sum() for _, targets_BT in batches]          # tensors: no waiting for the device here
    total = world.sum(sum(counts)).clamp(min=1)
    loss, load = 0.0, 0
    for i, ((ids_BT, targets_BT), count, seed) in enumerate(zip(batches, counts, seeds), 1):
        torch.manual_seed(seed[1])                            # dropout
        world.exchange(i == len(batches))                     # DDP has to know it before the forward pass
        with autocast:
            out = net(ids_BT, targets_BT, seed=seed)
        (out.loss * (count / total * world.size)).backward()  # the exchange takes the mean over processes
        loss = loss + out.loss.detach() * (count / total)
        load = load if most is None else load + count_depths(out.depth_BT, most)
    return world.sum(loss), None if most is None else world.sum(load)


def clip_gradients(model, grad_clip):
    """The gradient norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm          # a shard of it where the weights are sharded


class RouterWatch:
    """Inside `with`: what an expert-choice model's routers are asked in a forward pass at full depth, and what came of it.

    asked(out.depth_BT, n_rows) -> for each step (logit_N, went_on_N, position_N) over the real tokens that were asked whether
    they go through it, row by row (of the first n_rows alone); None where a step has no choice (capacity 1, or no
    expert-choice router). The logits are those of the routers that decide outside training."""

    def __init__(self, model):
        cfg = model.cfg
        self.model, self.units = model, list(model.recursion.router.deciding) if cfg.router == "expert" else []
        self.choice = [cfg.router == "expert" and share < 1 for share in cfg.capacities]

    def __enter__(self):
        self.logits, begin = {}, lambda *_: self.logits.clear()
        self.hooks = [self.model.register_forward_pre_hook(begin)]
        self.hooks += [unit.register_forward_hook(functools.partial(self.hear, step)) for step, unit in enumerate(self.units)]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def hear(self, step, unit, args, logit_AC1):
        self.logits[step] = logit_AC1.detach()[..., 0]

    def asked(self, depth_BT, n_rows=None):
        return [self.at(step, depth_BT, n_rows or len(depth_BT)) if choice else None for step, choice in enumerate(self.choice)]

    def at(self, step, depth_BT, n_rows):
        """Those who took the step before are asked, in order; a row with none is left out, and behind the last of a row is padding."""
        in_BT = depth_BT >= step
        logit_AC = self.logits.get(step, torch.zeros(0, 0, device=depth_BT.device))                # none: nobody was left to ask
        real_AC = torch.arange(logit_AC.size(1), device=depth_BT.device) < in_BT[in_BT.any(1)].sum(1, keepdim=True)
        row_N, position_N = in_BT.nonzero(as_tuple=True)
        counts_N = row_N < n_rows
        return logit_AC[real_AC][counts_N], (depth_BT > step)[in_BT][counts_N], position_N[counts_N]


@torch.no_grad()
def evaluate(model, split, starts, depths, batch_size, device, autocast=contextlib.nullcontext(), world=ALONE, routing=None, look=None, mark=None):
    """{depth: mean cross-entropy in nats per token} over fixed windows; plain, deterministic, noise off.

    routing: as the model takes it. look: called with depth_BT of each full-depth pass and how many of its rows count.
    mark: called with each pass's depth, windows, logits and targets."""
    was_training, sums, R = model.training, torch.zeros(len(depths) + 1, dtype=torch.float64), model.cfg.n_recur
    # Who goes on is data here, and each number of tokens would be a graph of its own.
    stance = contextlib.nullcontext() if model.cfg.router == "none" else torch.compiler.set_stance("force_eager")
    model.eval()
    for i in range(0, math.ceil(len(starts) / world.size), batch_size):         # as many calls on every rank
        mine = starts[world.rank :: world.size][i : i + batch_size]
        ids_BT, targets_BT = split.batch([*mine, *starts[:1].expand(min(batch_size, len(starts)) - len(mine))], device)
        targets_BT = targets_BT.clone()
        targets_BT[len(mine) :] = -100                        # filled up, so that every call has the same shape: one graph
        n_targets = int((targets_BT != -100).sum())
        sums[-1] += n_targets
        for k, depth in enumerate(depths):
            with autocast, stance:
                out = model(ids_BT, targets_BT, depth=depth, routing=routing)
            sums[k] += out.losses["ce"].item() * n_targets
            if look and depth == R:
                look(out.depth_BT, len(mine))
            if mark:
                mark(depth, mine, out.logits[: len(mine)], targets_BT[: len(mine)])
    model.train(was_training)
    *sums, n_targets = world.sum(sums).tolist()
    return {depth: nats / n_targets for depth, nats in zip(depths, sums)}


class Marks:
    """Right answers of a synthetic set by depth and by group, counted over batches, then over processes."""

    def __init__(self, split, depths):
        self.split, self.depths = split, depths
        self.right, self.asked = torch.zeros(2, len(depths), len(split.groups), dtype=torch.float64)

    def __call__(self, depth, starts, logits_BTV, targets_BT):
        k, group_B = self.depths.index(depth), self.split.group_of(starts)
        self.right[k].index_add_(0, group_B, (logits_BTV.argmax(-1) == targets_BT).sum(1).double().cpu())
        self.asked[k].index_add_(0, group_B, (targets_BT != -100).sum(1).double().cpu())

    def shares(self, world=ALONE):
        """For each depth the share of right answers, and {group: its share} of the groups that were looked at."""
        right, asked = world.sum(self.right), world.sum(self.asked)
        by_group = [{name: r / n for name, r, n in zip(self.split.groups, *row) if n} for row in zip(right.tolist(), asked.tolist())]
        return list(zip((right.sum(1) / asked.sum(1)).tolist(), by_group))


def answer_numbers(marks, world):
    """What the log keeps: the shares at the last depth, and by depth."""
    shares = marks.shares(world)
    return {"accuracy": shares[-1][0], "accuracy_by_group": shares[-1][1],
            "accuracy_by_depth": {depth: share for depth, (share, _) in zip(marks.depths, shares)}}


def answers_line(numbers):
    """The same numbers in words."""
    shares = lambda by: "  ".join(f"{name}: {share:.3f}" for name, share in by.items())
    depths = f" | by depth {shares(numbers['accuracy_by_depth'])}" if len(numbers["accuracy_by_depth"]) > 1 else ""
    return f"right answers {numbers['accuracy']:.3f} | {shares(numbers['accuracy_by_group'])}{depths}"


def eval_depths(cfg):
    """1, R/2 and R where the depth may change, else R (token-choice: a token's last step differs from the others)."""
    return sorted({1, max(1, cfg.n_recur // 2), cfg.n_recur}) if cfg.any_depth and cfg.router != "token" else [cfg.n_recur]


def depth_shares(load, first=1):
    """{depth: share of the tokens} from depth `first` on."""
    return {depth: n / max(1, sum(load)) for depth, n in enumerate(load) if depth >= first or n}


def mean_depth(load):
    return sum(depth * n for depth, n in enumerate(load)) / max(1, sum(load))


def agreement(counts):
    """How a router's yes or no agrees with who went on; counts[went on, said yes]. None where there is nobody to judge by."""
    (true_no, false_yes), (false_no, true_yes) = counts.tolist()
    rate = lambda right, wrong: right / (right + wrong) if right + wrong else None
    positive, negative = rate(true_yes, false_no), rate(true_no, false_yes)
    return {"asked": int(counts.sum()), "chosen": true_yes + false_no, "accuracy": rate(true_yes + true_no, false_yes + false_no),
            "balanced": None if None in (positive, negative) else (positive + negative) / 2, "true_positive": positive, "true_negative": negative}


def max_vio(load):
    """How far the fullest of the depths 1..R is above their mean, as a share of it: 0 = balanced  [MoR, MaxVio]."""
    return max(load[1:]) / max(1e-9, sum(load[1:]) / len(load[1:])) - 1


class RouterTally:
    """What the evaluation windows show of the routers, counted over batches, then over processes, then made into numbers."""

    def __init__(self, model, device):
        cfg, zeros = model.cfg, functools.partial(torch.zeros, dtype=torch.long, device=device)
        self.cfg, self.watch = cfg, RouterWatch(model)
        self.load = zeros(cfg.n_recur + 1)                    # by depth, as tokens decide outside training
        self.said = zeros(cfg.n_recur, 2, 2)                  # of those asked at a step in a top-k pass: by chosen, by reaching the threshold
        self.reached = zeros(cfg.block_size)                  # windows in which top-k gave a position the last step

    def look(self, depth_BT, n_rows):
        self.load += count_depths(depth_BT[:n_rows], self.cfg.n_recur)

    def look_topk(self, depth_BT, n_rows):
        self.reached += (depth_BT[:n_rows] == self.cfg.n_recur).sum(0)
        for said, asked in zip(self.said, self.watch.asked(depth_BT, n_rows)):
            if asked:
                logit_N, chosen_N, _ = asked
                said += torch.bincount(2 * chosen_N + (logit_N >= as_logit(self.cfg.threshold)), minlength=4).view(2, 2)

    def numbers(self, world):
        load = world.sum(self.load).tolist()
        numbers = {"mean_depth": mean_depth(load), "depth_shares": depth_shares(load)}
        if self.cfg.router == "token":
            return {**numbers, "max_vio": max_vio(load)}
        asks = [step for step, choice in enumerate(self.watch.choice) if choice]
        said, reached = world.sum(self.said), world.sum(self.reached)
        right = {step: agreement(said[step])["balanced"] for step in asks if self.cfg.router_choice == "score"}         # a lot is no router's word
        right = {step: rate for step, rate in right.items() if rate is not None}                                        # top-k took all, or none was left
        return {**numbers, "go_on": {step: sum(load[step + 1 :]) / sum(load[step:]) for step in asks if sum(load[step:])},
                "router_accuracy": sum(right.values()) / len(right) if right else None, "router_accuracy_at": right,
                "dead_tokens": float((reached == 0).float().mean())}


def routing_line(numbers):
    """The same numbers in words; top-k is never without its label."""
    percent = lambda shares: "  ".join(f"{name}: {100 * share:.0f}%" for name, share in shares.items())
    parts = [f"depth {numbers['mean_depth']:.2f} = {percent(numbers['depth_shares'])}"]
    if "max_vio" in numbers:
        return " | ".join([*parts, f"max violation {numbers['max_vio']:.2f}"])
    accuracy = "-" if numbers["router_accuracy"] is None else f"{100 * numbers['router_accuracy']:.1f}%"
    parts += [f"go on {percent(numbers['go_on'])}"] if numbers["go_on"] else []             # no step has a choice
    return " | ".join([*parts, f"top-k (not causal) {numbers['topk_val_loss']:.4f} nats/token, causal "
                       f"{numbers['topk_gap']:+.4f}", f"router accuracy {accuracy}", f"dead {100 * numbers['dead_tokens']:.1f}%"])


FEW, HARDLY, PATIENCE = 0.01, 0.001, 3                        # shares at an edge: of a step, of a depth; evaluations in a row before a word


def at_edge(cfg, numbers):
    """A sentence where routing has stopped choosing; None where it has not."""
    chosen = [cfg.block_size, *(n_chosen(share, cfg.block_size) for share in cfg.capacities)]             # by top-k, of a whole context
    for step, share in numbers.get("go_on", {}).items() if cfg.router_choice == "score" else ():
        due = chosen[step + 1] / chosen[step]                 # of the tokens asked
        low, high = min(FEW, due / 10), max(1 - FEW, 1 - (1 - due) / 10)         # a step that is to take few, or nearly all, may
        if not low <= share <= high:
            return (f"{100 * share:.1f}% of the tokens asked take step {step} (a router that chooses: {100 * low:.3g} to {100 * high:.3g}%; its capacity: "
                    f"{100 * due:.3g}%); try a larger router_loss, {'' if cfg.aux_router else 'aux_router=True, '}or another threshold")
    if cfg.router == "token":
        for depth, share in numbers["depth_shares"].items():
            if share > 1 - FEW or share < HARDLY:
                more = "a larger router_bias_rate" if cfg.router_balance == "bias" else "a larger router_loss, router_balance='bias'"
                return (f"depth {depth} has {100 * share:.2f}% of the tokens (a router that chooses: {HARDLY:.1%} to {1 - FEW:.0%}); try {more}, "
                        f"or a smaller n_recur")


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
        changed = run("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)config/ladder/results.jsonl")       # a record, no code
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def hold(folder):
    """Take the folder for this process. The lock ends with the process, however it ends. Returns what keeps it, None where
    another process has the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"out_dir={str(folder)!r} cannot be written ({error.strerror}); choose another with --out_dir=")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock.close()
    except (ImportError, OSError):                            # no flock on this system or this disk: the newer run wins
        pass
    return lock


def launch():
    """A name for the launch that this process belongs to, the same after torchrun has started its ranks again."""
    return f"{platform.node()} {os.getppid()} {os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}"


def wanted_folder(settings):
    return Path(settings.out_dir or Path("out") / (Path(settings.files[-1]).stem if settings.files else "run"))


def interrupted(settings):
    """The run that this launch has begun before a rank died and torchrun started all again; None without one."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        wanted = wanted_folder(settings)
        for folder in (wanted, *wanted.parent.glob(f"{glob.escape(wanted.name)}-*")):
            lock = folder / ".lock"
            if lock.is_file() and lock.read_text("utf-8") == launch() and (folder / "ckpt.pt").is_file():
                return str(folder)


def claim_folder(settings):
    """(folder, lock). A new run never enters a folder that holds one: it takes <out_dir>-2, -3, ..."""
    folder = wanted = wanted_folder(settings)
    resume, n = settings.init_from == "resume", 1
    if folder.name in ("", ".."):
        raise UserError(f"out_dir={str(folder)!r} is no folder of the run's own; give it a name, for example --out_dir=out/mine")
    lock = hold(folder)
    if not lock:
        raise UserError(f"another process is training in {folder}; wait for it, or choose another folder with --out_dir=")
    while not lock or (not resume and any((folder / left).exists() for left in ("ckpt.pt", "log.jsonl"))):
        n += 1
        folder = wanted.with_name(f"{wanted.name}-{n}")
        lock = hold(folder)
    if n > 1:
        print(f"{wanted} holds a run already: this one goes to {folder} (--init_from=resume would continue that one)")
    try:
        lock.truncate(0)
        lock.write(launch())
        lock.flush()
    except OSError as error:
        raise UserError(f"out_dir={str(folder)!r} cannot be written ({error.strerror}); choose another with --out_dir=")
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
        if os.name == "posix":                                # a rename is on the disk when its folder is
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except (OSError, RuntimeError) as error:                  # torch's own writer turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            aside.unlink()
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: is the disk full?"
        raise UserError(f"could not save {path} ({reason}); what was there before is intact")


def save_checkpoint(path, state):
    write_whole(path, lambda file: torch.save(state, file))


def checkpoint_of(run):
    """The checkpoint that is meant: a file itself, or the newest of a run's folder."""
    return Path(run) if Path(run).is_file() else Path(run) / "ckpt.pt"


def load_checkpoint(path):
    """The dict that save_checkpoint wrote, on CPU: tensors and plain types only."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()                       # torch itself does not look at the checksums
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=os.name == "posix")
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
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a whole checkpoint of this program ({reason[:150]}); use another run or train again")


def check_resume(state, cfg, meta, settings):
    """Model keys and tokenizer must be those of the checkpoint; says which other keys change."""
    there = GPTConfig(**state["model_config"])                # an older checkpoint lacks newer keys, which had no other value
    for name, value in asdict(cfg).items():
        if name != "fused_loss" and getattr(there, name) != value:
            raise UserError(f"{name}={value!r}, but the checkpoint has {name}={getattr(there, name)!r}: a run that goes on keeps its "
                            f"model keys; leave {name} out, or start a new run")
    check_tokenizer(state, meta, settings)
    if "optimizer" not in state:
        raise UserError("the checkpoint holds weights and no optimizer; a new run can start from them: --init_from=PATH")
    for name, value in settings.values.items():
        if name in state["settings"] and name not in ("out_dir", "init_from", "cooldown_from") and state["settings"][name] != value:
            print(f"resume: {name} was {state['settings'][name]!r}, now {value!r}")


SHAPE_KEYS = ("block", "vocab_size", "n_embd", "n_head", "n_kv_head", "n_ffn", "bias", "gelu", "n_prelude", "n_core", "n_coda", "update", "router", "lora_rank",
              "sandwich_norm", "loop_norm", "loss")
LORA_KEYS = ("n_recur",)                                                                          # where steps have additions of their own
ROUTER_KEYS = ("n_recur", "router_kind", "router_width", "aux_router", "router_balance")         # where there is a router
AUX_KEYS = ("capacity",)                                                                          # aux routers are where it is below 1
# None has a meaning, and the tensors are that of what is meant.
MEANINGS = {"n_kv_head": lambda cfg: cfg.kv_heads, "n_ffn": lambda cfg: cfg.ffn_width, "router_width": lambda cfg: RouterUnit.shapes(cfg, 1),
            "capacity": lambda cfg: [share < 1 for share in cfg.capacities]}


def check_start(state, cfg, meta, settings):
    """A new run from another's weights: its tensors have to fit; depth, noise and a shorter context may differ."""
    there = GPTConfig(**state["model_config"])                # an older checkpoint lacks newer keys, which had no other value
    unrolled = there.n_recur == 1 < cfg.n_recur               # a dense run for a recursive model
    advice = f", or convert it first: python prepare.py weights {shlex.quote(settings.init_from)} CONFIG" if unrolled else ""
    for name in SHAPE_KEYS + LORA_KEYS * (cfg.lora_rank > 0) + ROUTER_KEYS * (cfg.router != "none") + AUX_KEYS * cfg.aux_router:
        meant = MEANINGS.get(name, lambda cfg, name=name: getattr(cfg, name))
        if meant(there) != meant(cfg):
            raise UserError(f"init_from={settings.init_from!r}: {name} is {getattr(there, name)!r} there and {getattr(cfg, name)!r} here; "
                            f"give the model keys of that run{advice}")
    if cfg.block == "gpt2" and cfg.block_size > state["model_config"]["block_size"]:
        raise UserError(f"init_from={settings.init_from!r}: block_size={cfg.block_size} needs positions that it never learned; it has "
                        f"{state['model_config']['block_size']}")
    check_tokenizer(state, meta, settings)


def check_tokenizer(state, meta, settings):
    if state["fingerprint"] != meta["fingerprint"]:
        raise UserError(f"the checkpoint was trained with tokenizer {state['tokenizer']!r} ({state['fingerprint']}), but data "
                        f"set {settings.dataset!r} has {meta['tokenizer']!r} ({meta['fingerprint']}); use its own data set")


def starting_point(settings, folder):
    """(checkpoint, its state) that the run begins with; (None, None) from scratch."""
    if settings.init_from == "scratch" and not settings.cooldown_from:
        return None, None
    path = folder / "ckpt.pt" if settings.init_from == "resume" else checkpoint_of(settings.cooldown_from or settings.init_from)
    return path, load_checkpoint(path)


def cool_down(settings):
    """Turn the settings into those of a cool-down: it begins at the checkpoint's step, and the budget follows from it."""
    path = settings.cooldown_from
    if settings.schedule != "wsd":
        raise UserError(f"cooldown_from={path!r} with schedule={settings.schedule!r}; add --schedule=wsd, or give the run's own config")
    state = load_checkpoint(Path(path))
    with fitting(path):
        step, then = state["step"], SimpleNamespace(**state["settings"])
        first, last = (then.warmup_iters, cooldown_start(then)) if then.schedule == "wsd" else (0, -1)
    if not first <= step <= last:
        phase = f"steps {first} to {last}" if first <= last else f"and that run, schedule={then.schedule!r}, has none"
        raise UserError(f"cooldown_from={path!r}: step {step} is not in the stable phase of a trapezoid ({phase}); train with --schedule=wsd "
                        f"--keep_interval=N and take one of its ckpt-*.pt")
    length = max(1, round(step / 4)) if settings.cooldown_iters is None else settings.cooldown_iters
    for name, value in (("cooldown_iters", length), ("max_iters", step + length), ("lr_decay_iters", None)):
        settings.values[name], settings.origins[name] = value, f"cooldown_from step {step}"


class Log:
    """The same record as one aligned line on stdout and one JSON line in log.jsonl, by rank 0."""

    def __init__(self, path, world=ALONE, tensorboard=False):
        self.path, self.world, self.board = path, world, None
        world.first(lambda: self.open(tensorboard))

    def open(self, tensorboard):
        with contextlib.suppress(FileNotFoundError):          # a kill or a full disk may have cut the last line short
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("tensorboard=True, but TensorBoard is not installed; pip install tensorboard, or leave the key out")
            self.board = SummaryWriter(self.path.parent / "tensorboard")

    def write(self, line, **record):
        print(line, flush=True)
        self.world.first(lambda: self.record(json.loads(json.dumps(record), parse_constant=str)))         # JSON has no NaN: it becomes a word

    def record(self, record):
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"could not write {self.path} ({error.strerror}); the last checkpoint there is intact")
        if self.board:
            for name, value in record.items():
                if type(value) in (int, float) and name != "step":
                    self.board.add_scalar(f"{record['event']}/{name}", value, record["step"])
            self.board.flush()


class CtrlC:
    """The first Ctrl-C asks the run to stop after the step at hand; a second one ends it at once."""

    def __enter__(self):
        self.asked, self.before = False, signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("\nfinishing this step, then saving (Ctrl-C again quits at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


def human(seconds):
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:{',.0f' if seconds >= 100 * size else '.2g'}} {unit}"
    return f"{seconds:.0f} seconds"


# ------------------------------------------------------------------------------------------------------------- start page


def estimate_seconds(model, settings, device, autocast, first_step, n_processes=1, compiled=False):
    """Time for the rest of the run, from a timed forward and backward of a few rows, scaled by counted FLOPs."""
    cfg, T = model.cfg, model.cfg.block_size
    flops, train_flops = lambda depth: cfg.flops_per_token(T, depth=depth), lambda depth: cfg.train_flops_per_token(T, depth)
    whole = settings.batch_size * T                           # compiled code is made once, for the shape of training
    tokens = whole if compiled else int(min(whole, max(64, 1e11 / flops(cfg.n_recur))))
    B, T_timed = max(1, tokens // T), min(T, tokens)
    ids_BT = torch.arange(B * T_timed, device=device).view(B, T_timed) % cfg.vocab_size          # equal tokens would all choose one depth
    for _ in range(2):                                        # the first run warms up
        start = time.perf_counter()
        with autocast:
            loss = model(ids_BT, ids_BT, depth=cfg.n_recur, seed=(0, 0)).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        loss.item()                                           # waits for the device
        seconds = time.perf_counter() - start
    per_token = seconds / ids_BT.numel() / train_flops(cfg.n_recur)
    steps = max(0, settings.max_iters - first_step)
    trained = steps * settings.batch_size * settings.gradient_accumulation_steps * T * train_flops(None) / n_processes
    n_evals = 1 + (steps // settings.eval_interval if settings.eval_interval > 0 else 0)
    passes = eval_depths(cfg) + [cfg.n_recur] * (cfg.router == "expert")         # once more with top-k
    evaluated = n_evals * settings.eval_tokens * sum(map(flops, passes)) / 3 / n_processes
    return per_token * (trained + evaluated)


def start_page(settings, cfg, meta, folder, device, dtype, compiled, world):
    """What will run, printed before step 1."""
    T, B, A = cfg.block_size, settings.batch_size, settings.gradient_accumulation_steps
    changed = {k: v for k, v in settings.values.items() if settings.origins[k] != "default"}
    width = max(map(len, changed), default=0)
    lines = [f"  {name:<{width}} = {value!r:<12} {settings.origins[name]}" for name, value in changed.items()]
    lines += [f"  ({len(settings.values) - len(changed)} more keys at their defaults: {folder / 'config.py'})"]
    baselines = ["   ".join(f"{name} {value:.3f}" for name, value in meta["baselines"].items()) + "   bits per byte on validation text"]
    if "row" in meta:
        baselines = ["share of the validation answers right without a model", *prepare.guess_lines(meta)]
    gate = f" update={cfg.update}" + (f" (gate bias {cfg.gate_bias:+g})" if cfg.update == "gate" else "")
    several = f"; {world.size} processes ({settings.parallel}), {A // world.size} micro-batches each" if world.size > 1 else ""
    lines += [f"data       {settings.dataset}: " + ", ".join(f"{meta[split]['tokens']:,} {split} tokens" for split in prepare.SPLITS)
              + f", tokenizer {meta['tokenizer']} {meta['fingerprint']}, vocabulary {meta['vocab_size']} (model {cfg.vocab_size})",
              "baselines  " + f"\n{'':11}".join(baselines),
              f"model      {cfg.layout} {cfg.block}{gate}: {cfg.n_params():,} unique parameters, {cfg.executed_blocks()} blocks "
              f"executed from {cfg.n_prelude + cfg.n_core + cfg.n_coda}",
              *router_lines(cfg, settings),
              f"depth      training {cfg.trained}, evaluation {', '.join(map(str, eval_depths(cfg)))}",
              f"step       {B} rows x {T} tokens x {A} accumulation = {B * T * A:,} tokens; {settings.max_iters:,} steps = "
              f"{B * T * A * settings.max_iters / 1e6:,.2f}M tokens" + several,
              f"machine    {device} {dtype}{' compiled' if compiled else ''}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
              f"Python {platform.python_version()}, commit {commit()}",
              f"folder     {folder}"]
    return "\n".join(lines + [f"note: {sentence}" for sentence in cfg.unused() + unused(settings, meta, world)])


def router_lines(cfg, s):
    """Of the start page: who decides, how many go on, whose K/V they see, and what the router's own losses weigh."""
    if cfg.router == "none":
        return []
    score = f"{cfg.router_kind} router, score {cfg.score_name}"
    if cfg.router == "expert":
        warm = f", falling from 1 over {s.capacity_warmup_iters} steps" if s.capacity_warmup_iters else ""
        decides = ("a lot by position and step decides, in training and outside" if cfg.router_choice == "random" else
                   f"outside training {'the aux router' if cfg.aux_router else 'it'} decides, threshold {cfg.threshold:g}")
        how = f"expert-choice: {score}, capacities {' '.join(f'{share:.3g}' for share in cfg.capacities)}{warm}; {decides}"
    else:
        balance = f"a bias, rate {s.router_bias_rate:g}" if cfg.router_balance == "bias" else "a loss"
        how = f"token-choice: {score}, depths 1..{cfg.n_recur}, balanced by {balance}"
    return [f"router     {how}; kv={cfg.kv}; losses: router {cfg.router_weight:g}, z {cfg.z_weight:g}"]


def unused(s, meta, world):
    """Sentences about training keys that cannot matter, or hardly as they were meant, beside the others."""
    passes = s.max_iters * s.batch_size * s.gradient_accumulation_steps * s.block_size / meta["train"]["tokens"]
    of_routers = [("capacity_warmup_iters", 0, s.router == "expert", "router is not expert"),
                  ("aux_router_lr_scale", 1.0, s.aux_router, "there is no aux_router"),
                  ("router_bias_rate", 0.001, s.router_balance == "bias", "router_balance is not bias")]
    rules = [*((s.values[name] != default and not used, f"{name}={s.values[name]} has no effect: {why}") for name, default, used, why in of_routers),
             (s.parallel == "fsdp" and world.size == 1, "parallel='fsdp' has no effect on one process"),
             (s.schedule != "wsd" and s.cooldown_iters is not None, f"cooldown_iters={s.cooldown_iters} has no effect with schedule={s.schedule!r}"),
             (s.schedule == "wsd" and cooldown_start(s) < s.warmup_iters, f"no stable phase: warm-up to step {s.warmup_iters}, cool-down from "
                                                                         f"{cooldown_start(s)}"),
             (last_step(s) < s.max_iters, f"lr_decay_iters={s.lr_decay_iters}: from there to step {s.max_iters} the rate stays at its lowest"),
             (passes > 1.05, f"{passes:,.1f} passes over the training tokens")]
    return [sentence for holds, sentence in rules if holds]


# ------------------------------------------------------------------------------------------------------------------- main


def load_data(settings):
    """(meta, train split, validation split, model config): everything about the data is checked here."""
    meta = prepare.load_meta(settings.data_dir, settings.dataset)
    if "row" in meta:
        fit_rows(settings, meta)
    cfg = settings.build(GPTConfig, vocab_size=padded_vocab(settings.vocab_size, meta))
    splits = [open_split(settings.data_dir, settings.dataset, name, meta, cfg.block_size) for name in ("train", "val")]
    for split in splits:
        split.check_ids(cfg.vocab_size)
    return meta, *splits, cfg


def fit_rows(settings, meta):
    """A synthetic set needs no context beyond its row, and all logits of so few are there at once, to tell right from wrong."""
    for name, value in (("block_size", min(settings.block_size, meta["row"])), ("fused_loss", False)):
        if settings.values[name] != value:
            settings.values[name], settings.origins[name] = value, f"fits {settings.dataset}"


def make_default_data(settings):
    if settings.dataset in ("stdlib", *prepare.TASKS) and not (Path(settings.data_dir) / settings.dataset / "meta.json").exists():
        prepare.prepare(settings.dataset, data_dir=settings.data_dir)


def parse(argv):
    """Settings; without a config file those of grt_tiny, or of the run that is resumed."""
    settings = config.parse(argv, [GPTConfig, TrainConfig], __doc__)
    if not settings.files:
        other = settings.cooldown_from or settings.init_from                     # whose run this one goes on from
        own = checkpoint_of(settings.out_dir or "" if other == "resume" else other).parent / "config.py"
        use_own = other != "scratch" and own.is_file()
        base = own if use_own else HERE / "config" / "grt_tiny.py"
        if use_own and other != "resume":                     # in a folder of its own, and not from where that one began
            argv = [f"--out_dir={settings.out_dir or Path('out') / own.parent.name}", f"--init_from={settings.init_from}", *argv]
        settings = config.parse([os.path.relpath(base), *argv], [GPTConfig, TrainConfig], __doc__)
        if use_own:                                           # its comments still know where each value came from
            for name, origin in re.findall(r"^(\w+) = .*  # (.*)$", own.read_text(encoding="utf-8"), re.M):
                if settings.origins.get(name) != "command line":
                    settings.origins[name] = origin
    check_ranges(settings, RANGES)
    if settings.cooldown_from and settings.init_from not in ("scratch", "resume"):
        raise UserError("init_from and cooldown_from each name a checkpoint to begin with; give one of them")
    if settings.init_from not in ("scratch", "resume") and not Path(settings.init_from).exists():
        raise UserError(f"{settings.origins['init_from']}: init_from={settings.init_from!r} is neither scratch, resume nor a checkpoint that exists")
    settings.build(GPTConfig, vocab_size=settings.vocab_size or 64)          # refuse a bad shape before touching data
    return settings


def check_world(settings, world):
    """What can be refused before any data is made."""
    path = wanted_folder(settings) / "ckpt.pt"
    if settings.init_from == "resume" and not path.is_file():
        raise UserError(f"init_from=resume, but {path} does not exist; name the run with --out_dir=")
    A, n = settings.gradient_accumulation_steps, world.size
    if A % n:
        fits = [value for value in (A // n * n, A // n * n + n) if value]
        raise UserError(f"gradient_accumulation_steps={A} micro-batches (of batch_size={settings.batch_size} rows) cannot be shared by {n} "
                        f"processes; use {' or '.join(map(str, fits))}")


class Run:
    """A run at work: what it is made of and where it stands. Made new or from a checkpoint; train() does the rest."""

    def __init__(self, s, data, folder, device, dtype, autocast, world):
        self.s, self.folder, self.device, self.autocast, self.world = s, folder, device, autocast, world
        self.meta, self.train_split, self.val_split, cfg = data
        self.step, self.losses = 0, {"val_loss": math.inf, "val_step": 0, "best_val_loss": math.inf, "at_edge": 0}
        path, state = starting_point(s, folder)
        goes_on = s.init_from == "resume" or s.cooldown_from is not None         # else a checkpoint gives its weights alone
        if state:
            with fitting(path):
                (check_resume if goes_on else check_start)(state, cfg, self.meta, s)
            if s.init_from == "resume":                       # config.py says how the run began
                s.values["init_from"] = state["settings"]["init_from"]
        compiled = want_compile(s.compile, device)
        print(start_page(s, cfg, self.meta, folder, device, dtype, compiled, world), flush=True)
        world.first(lambda: write_whole(folder / "config.py", lambda file: file.write(s.dump().encode("utf-8"))))

        torch.manual_seed(s.seed)
        self.model = GPT(cfg).to(device)
        if state:
            with fitting(path):
                if not goes_on and cfg.block == "gpt2":       # a shorter context needs its own positions alone
                    state["model"]["positions.table.weight"] = state["model"]["positions.table.weight"][: cfg.block_size]
                self.model.load_state_dict(state["model"])
        if s.checkpoint_activations:
            checkpoint_activations(self.model)
        if compiled:
            compile_parts(self.model, ragged=is_ragged(cfg, s), dynamic=False)   # training knows its shapes
        first_step = state["step"] if goes_on else 0
        self.seconds = estimate_seconds(self.model, s, device, autocast, first_step, world.size, compiled)
        self.net = world.spread(self.model, s.parallel)       # the module to call in training
        self.optimizer = torch.optim.AdamW(param_groups(self.model, s.weight_decay, s.aux_router_lr_scale), lr=s.learning_rate,
                                           betas=(s.beta1, s.beta2), fused=device.type in ("cpu", "cuda"))
        if goes_on:
            self.go_on(path, state)

    def go_on(self, path, state):
        """Step, losses and optimizer of a checkpoint; the settings at hand win over those in it."""
        groups = self.optimizer.param_groups
        own = [{name: group[name] for name in ("weight_decay", "betas", "lr_scale")} for group in groups]
        with fitting(path):
            self.step = state["step"]
            self.losses.update({"val_step": state["step"], **{name: state[name] for name in self.losses if name in state}})
            self.optimizer.load_state_dict(scattered(state["optimizer"], [p for group in groups for p in group["params"]]))
        for group, mine in zip(self.optimizer.param_groups, own):
            group.update(mine)

    def train(self):
        """To max_iters; the last step is always evaluated and saved."""
        s, first_step = self.s, self.step
        self.log = Log(self.folder / "log.jsonl", self.world, s.tensorboard)
        self.bad_step = torch.zeros((), dtype=torch.long, device=self.device)    # the first whose loss or gradient is not finite
        advice = ", try config/grt_tiny.py" if self.seconds > 86400 and self.device.type == "cpu" else ""
        self.log.write(f"time       about {human(self.seconds)}{advice}\n", event="start", step=first_step, estimated_seconds=self.seconds,
                       commit=commit(), torch=str(torch.__version__), python=platform.python_version(), processes=self.world.size,
                       settings=s.values, data=self.meta["source"])
        self.model.train()
        if first_step == 0:
            self.evaluate()                                   # sanity: near ln(vocabulary) before anything is learned
        elif first_step >= s.max_iters:
            print(f"the run is at step {first_step} and max_iters={s.max_iters}: nothing is left to train, only to evaluate")
            self.evaluate()
        elif self.keeps() and not s.cooldown_from:            # a new budget may have made this step one to keep
            self.save(self.kept())
        self.clock, self.clock_step = time.perf_counter(), first_step
        with CtrlC() as ctrl_c:
            while self.step < s.max_iters:
                last = self.update()
                if self.step % s.log_interval == 0 or self.step == s.max_iters:
                    self.report(*last)
                self.rest(self.world.any(ctrl_c.asked))

    def update(self):
        """One optimizer step. Returns its loss, tokens by depth, gradient norm, learning rate and one row of ids."""
        s, step, world, router = self.s, self.step, self.world, self.model.recursion.router
        lr = learning_rate(step, s)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        router.warm(extra_capacity(step, s))
        micro = range(s.gradient_accumulation_steps // world.size)
        data_seeds = [fold_in(s.seed, "data", step, i * world.size + world.rank) for i in micro]
        batches = [get_batch(self.train_split, s.batch_size, seed, self.device) for seed in data_seeds]
        seeds = [(fold_in(s.seed, "shared", step, i), fold_in(s.seed, "own", step, i, world.rank)) for i in micro]
        most = math.ceil(self.model.cfg.mean_depth * (16 if self.model.cfg.depth_sampling == "poisson" else 1))
        loss, load = step_gradients(self.net, batches, seeds, self.autocast, world, max(most, self.model.cfg.n_recur))
        norm = clip_gradients(self.model, s.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        router.rebalance(load[1:], s.router_bias_rate)
        self.step += 1
        self.bad_step = torch.where((self.bad_step == 0) & ~torch.isfinite(loss + norm), self.step, self.bad_step)
        return loss, load, norm, lr, batches[0][0][:1]

    def report(self, loss, load, norm, lr, ids_1T):
        """A line of the log; here the host waits for the device."""
        self.check_finite()
        loss, load, norm, now = float(loss), load.tolist(), float(norm), time.perf_counter()
        depth, cfg = mean_depth(load), self.model.cfg
        routed = {"depth_shares": depth_shares(load)} if cfg.router != "none" else {}
        routed |= {"max_vio": max_vio(load)} if cfg.router == "token" else {}
        tokens = self.s.batch_size * self.s.gradient_accumulation_steps * self.model.cfg.block_size
        seconds = (now - self.clock) / (self.step - self.clock_step)             # of an update
        gate, left = mean_gate(self.model, ids_1T), (self.s.max_iters - self.step) * seconds
        self.log.write(f"step {self.step:6d} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:6.2f} | depth {depth:4.3g} | gate "
                       f"{'   - ' if gate is None else f'{gate:.3f}'} | {seconds * 1e3:7,.0f} ms | {tokens / seconds:7,.0f} tok/s | {human(left)} left",
                       event="step", step=self.step, loss=loss, lr=lr, grad_norm=norm, depth=depth, gate=gate, ms_per_update=seconds * 1e3,
                       tokens_per_update=tokens, tokens_per_second=tokens / seconds, **routed)
        self.clock, self.clock_step = time.perf_counter(), self.step

    def rest(self, stop):
        """Between two steps: keep, evaluate, save, stop. None of it is training time."""
        s = self.s
        evaluates = self.step == s.max_iters or (s.eval_interval > 0 and self.step % s.eval_interval == 0)
        if not (stop or evaluates or self.keeps()):
            return
        self.check_finite()
        before = time.perf_counter()
        if self.keeps():
            self.save(self.kept())
        if evaluates:
            self.evaluate()
        if stop:
            if not evaluates:
                self.save()
            print(f"stopped after step {self.step}; go on with: python train.py --init_from=resume --out_dir={shlex.quote(str(self.folder))}")
            raise KeyboardInterrupt
        self.clock += time.perf_counter() - before

    def keeps(self):
        s = self.s
        return (s.keep_interval and self.step % s.keep_interval == 0) or (s.schedule == "wsd" and self.step == cooldown_start(s))

    def kept(self):
        return f"ckpt-{self.step:08d}.pt"

    def check_finite(self):
        if self.bad_step:
            raise UserError(f"the loss or its gradient is not finite at step {int(self.bad_step)}: training stops, and the last good checkpoint "
                            f"is in {self.folder}; a lower learning_rate may help")

    def evaluate(self):
        """The validation loss, what the routers do, and a checkpoint with it."""
        cfg, part, tally = self.model.cfg, self.meta["val"], RouterTally(self.model, self.device)
        starts, bits = fixed_windows(self.val_split, self.s.eval_tokens), part["tokens"] / part["bytes"] / math.log(2)   # nats per token -> bits per byte
        marks = Marks(self.val_split, eval_depths(cfg)) if "row" in self.meta else None
        run = functools.partial(evaluate, self.model, self.val_split, starts, batch_size=self.s.batch_size, device=self.device, autocast=self.autocast,
                                world=self.world)
        by_depth = run(eval_depths(cfg), look=tally.look, mark=marks)
        loss, routed, answered = by_depth[cfg.n_recur], {}, answer_numbers(marks, self.world) if marks else {}
        unit = {"bits_per_byte": loss * bits} if not marks else {}               # no text, no bytes
        line = f"step {self.step:6d} | validation {loss:.4f} nats/token" + (f" = {loss * bits:.4f} bits/byte" if not marks else "")
        if len(by_depth) > 1:
            line += " | by depth " + "  ".join(f"{d}: {value * bits if not marks else value:.3f}" for d, value in by_depth.items())
        if marks:
            line += f"\nstep {self.step:6d} | {answers_line(answered)}"
        if cfg.router == "expert":
            with tally.watch:
                topk = run([cfg.n_recur], routing="topk", look=tally.look_topk)[cfg.n_recur]
            routed = {"topk_val_loss": topk, "topk_gap": loss - topk}
        if cfg.router != "none":
            routed |= tally.numbers(self.world)
            line += f"\nstep {self.step:6d} | routing    {routing_line(routed)}"
        self.log.write(line, event="eval", step=self.step, val_loss=loss, **unit, by_depth=by_depth, **answered, **routed)
        if not math.isfinite(loss):
            raise UserError(f"the validation loss at step {self.step} is {loss}; nothing was saved over the last good checkpoint")
        self.warn_at_edge(at_edge(cfg, routed))
        self.losses |= {"val_loss": loss, "val_step": self.step, "best_val_loss": min(self.losses["best_val_loss"], loss)}
        self.save()

    def warn_at_edge(self, sentence):
        """A note once routing has stood at an edge for some evaluations in a row, each at a step of its own."""
        before, again = self.losses["at_edge"], self.step == self.losses["val_step"]
        self.losses["at_edge"] = 0 if sentence is None else max(1, before + (not again))
        if self.losses["at_edge"] >= PATIENCE:
            self.log.write(f"note: routing, for {self.losses['at_edge']} evaluations now: {sentence}", event="note", step=self.step,
                           evaluations=self.losses["at_edge"], sentence=sentence)

    def save(self, name="ckpt.pt"):
        """A checkpoint: all that the run is. Gathering shards takes every rank, writing them the first."""
        model, optimizer = (gathered(part.state_dict(), keep=self.world.rank == 0) for part in (self.model, self.optimizer))
        state = {"format": FORMAT, "model": model, "optimizer": optimizer, "step": self.step, **self.losses, "model_config": asdict(self.model.cfg),
                 "settings": dict(self.s.values), "tokenizer": self.meta["tokenizer"], "fingerprint": self.meta["fingerprint"], "commit": commit(),
                 "torch": str(torch.__version__)}
        self.world.first(lambda: save_checkpoint(self.folder / name, state))


def main(argv):
    settings, world = parse(argv), World()
    device, dtype, autocast = pick_device(settings, world)
    with world.together(device), contextlib.ExitStack() as held:
        begun = world.first(lambda: interrupted(settings))
        if begun:
            print(f"starting again after an interruption: {begun} goes on from its last checkpoint")
            settings = parse([f"{begun}/config.py", "--init_from=resume", f"--out_dir={begun}"])
        elif settings.cooldown_from and settings.init_from != "resume":
            cool_down(settings)
        world.first(lambda: check_world(settings, world))
        world.first(lambda: make_default_data(settings))
        data = load_data(settings)

        def claim():
            folder, lock = claim_folder(settings)
            held.enter_context(lock)
            return str(folder)
        folder = Path(world.first(claim))
        Run(settings, data, folder, device, dtype, autocast, world).train()
    if settings.sample_tokens and world.rank == 0 and "row" in data[0]:
        print(f"\nwhat it answers, a row of each kind, ^ where it is wrong\n{show_answers(folder, data[2], device)}")
    elif settings.sample_tokens and world.rank == 0:
        text, encoding = write(folder, settings.sample_tokens, device), sys.stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)                # a terminal may know ASCII alone
        print(f"\nwhat it writes (more: python sample.py --out_dir={shlex.quote(str(folder))})\n{text}")


def write(folder, n_tokens, device="cpu", seed=0):
    """A short text from the run's checkpoint, from an empty start."""
    state = load_checkpoint(folder / "ckpt.pt")
    tokenizer, model = prepare.run_tokenizer(folder, state["tokenizer"]), GPT(GPTConfig(**state["model_config"])).to(device)
    model.load_state_dict(state["model"])
    rng = generator(seed, device)
    ids = [row[0] for row in stream(model, [[tokenizer.eot_token]], n_tokens, temperature=0.8, top_k=50, generator=rng)]
    return tokenizer.decode([i for i in ids if i < tokenizer.n_vocab], errors="replace")


@torch.no_grad()
def show_answers(folder, split, device="cpu"):
    """The first validation row of each group, the model's answers below what they were asked after, and its mistakes."""
    state = load_checkpoint(folder / "ckpt.pt")
    model = GPT(GPTConfig(**state["model_config"])).to(device).eval()
    model.load_state_dict(state["model"])
    sizes = [*split.groups.values()]
    ids_BT, targets_BT = split.batch([sum(sizes[:i]) for i in range(len(sizes))], device)
    said_BT, asked_BT, width, lines = model(ids_BT).logits.argmax(-1), targets_BT != -100, max(map(len, split.groups)), []
    said_BT[(said_BT < 33) | (said_BT > 126)] = ord("?")                         # an answer that no terminal should see raw
    for name, ids_T, said_T, targets_T, asked_T in zip(split.groups, ids_BT, said_BT, targets_BT, asked_BT):
        answers = said_T.where(asked_T, 32)
        wrong = torch.full_like(ids_T, 32).masked_fill(asked_T & (said_T != targets_T), 94)
        lines += [f"{head:{width}}  {bytes(row.tolist()).decode('latin-1')}".rstrip() for head, row in ((name, ids_T), ("", answers), ("", wrong))]
    return "\n".join(lines)


if __name__ == "__main__":
    config.run(main)
