"""Compare configurations side by side: what they cost on paper, and what they cost here.

    python bench.py counts config/gpt2_small.py config/grt_small.py          # parameters, FLOPs, K/V bytes: nothing is run
    python bench.py train config/grt_tiny.py config/gpt_tiny.py              # training step: time ratio beside FLOPs ratio
    python bench.py train config/bench/gpt_256.py --against=transformers     # the same step with Hugging Face's model
    python bench.py train config/bench/vanilla_14.py config/bench/mor3_14.py # a routed step beside the dense one of its unrolled depth
    python bench.py generate config/grt_tiny.py --batch_size=4               # cached generation over uncached
    python bench.py steps config/bench/mor3_14.py --batch_size=1             # time per token against the steps that a router allows
    python bench.py decode config/bench/gpt_12.py config/bench/grt_12.py     # latency and memory of decoding: the default configs, a prompt of 128
    python bench.py serve config/bench/vanilla_14.py config/bench/mor3_14.py # a queue of requests, batched depth-wise, over the dense baseline
    python bench.py ladder config/ladder/rivals/*.py --seeds=1,2,3           # train every config of a folder, one table of losses

table reads no config file: it writes PUBLISHED.md, every row of the papers' tables as a command, with what is counted here and
what was published. Nothing is run.

Random weights, random tokens. A table and one JSON line, the last, go to stdout; progress goes to stderr. Measurements
take turns in one process, so a machine that drifts drifts for all of them. Times are CPU time (CUDA: wall time). `ms` is
the median repeat; ratios are medians of ratios to the first row within the same repeat. Building a model (`setup`) and
its first call (`first`: warm-up, compilation) stand apart. MiB is the fullest moment of a training step: weights,
optimizer state, gradients and activations; on a CPU as tensors (not what one operation needs inside), on CUDA as its
allocator counts. MFU: `exact` FLOPs, three forwards a step, over the peak of a known GPU in bfloat16, else n/a.

steps: a router of random weights decides nothing sensible, so its decisions are imposed: it is asked as ever, and then
told its answer. Time per token is fitted to the steps taken, a + b x steps, and b stands beside one pass of the core: what
one step more costs the same model without a router, with as many rows in as long a text. With several rows, whose tokens
stop at different steps, a step counts as much as a pass with as many rows: a row that has stopped is to cost nothing.
Caches begin at the declared capacities; steps imposed beyond them make them grow, and that is in the time.

decode: every config eagerly and (--compile=true, CUDA) compiled. Ratios are of the time of the tokens after the first, to the
first config run likewise; a router of random weights lets through what it will, so no FLOPs stand there. Below it K and V as serving
allocates them, beside the formula. --contexts: time per token against the length of the text, in place of both.

serve: a queue of requests with lengths from a normal distribution. Each begins with a token of its own and is greedy; of a trained --run they
begin with end-of-text and are drawn, so that its exits are those of its own texts. A config without a router is the baseline of those named
after it: sequence by sequence, at --slots in flight and at as many as each of theirs. A routed one serves depth-wise: (a) as many in flight,
(b) with as many rows in the core, those outside it more in flight, (c) as many in flight as the baseline's K/V memory holds, (d) as (b) with
finish and start waiting for as many rows, so more in flight, and (a) with windows as long as the text. tokens/s are of the steady state: from
--warmup tokens for each request in flight until the queue is empty. `steps` are those of the core per token; `ceiling` is the ratio of FLOPs
counted in that time, per token; `share` how much of it the ratio reaches.
Cache writes are in the time; --unwritten=true: runs that leave them out, as the paper does, take turns with the others. Exits are
imposed (balanced: of N tokens in a row each takes another number of steps) or the router's own (learned).
--batches: tokens/s against requests in flight, in place of the table.

ladder: train.py for every config (in every mode a folder, as config/ladder/rivals, stands for those in it) at every seed,
--jobs at a time, with the flags of train.py that are given. A run that is recorded in config/ladder/results.jsonl with the
same settings on the same data is not trained again; one that was killed goes on; one that another process trains is waited
for, so that ladders may share runs; Ctrl-C lets all save. The table, its record and a picture are in out/ladder. --jobs=0
trains nothing and prints what is recorded.
"""
import contextlib
import copy
import datetime
import functools
import hashlib
import inspect
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import config  # before torch: see the top of config/__init__.py
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import prepare
from config import UserError, key, near_path, shipped
from model import DEPTHS, FLOPS, FOLDS, GPT, ROUTERS, UPDATES, GPTConfig, Output, Seat, core_flops, exact_flops, fold_in, generator, make_cache
from model import param_groups, stream
from sample import Engine, Shelves, load_run
from train import RANGES as TRAINING_RANGES
from train import CtrlC, TrainConfig, check_ranges, checkpoint_activations, clip_gradients, commit, compile_parts, hold, human, make_default_data
from train import padded_vocab, pick_device, step_gradients, want_compile, write_whole
from train import parse as parse_training

HERE = Path(__file__).resolve().parent
RANGES = TRAINING_RANGES | {"vocab_size": (1, math.inf), "repeats": (1, math.inf), "seq_len": (1, math.inf), "depth": (0, math.inf),
                            **dict.fromkeys(("prompt_tokens", "new_tokens", "threads", "slots", "requests", "length_mean", "finish_rows"), (1, math.inf)),
                            **dict.fromkeys(("jobs", "length_std", "warmup"), (0, math.inf))}
# Dense bfloat16 FLOPs per second by the name that the driver gives; a name that is not here has no utilisation.
PEAKS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA GH200 480GB": 989.4e12, "NVIDIA H100 PCIe": 756e12,
         "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
         "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}


@dataclass
class BenchConfig:
    """Measuring"""
    vocab_size: int | None = key(None, "rows of the token table; None = 320, the byte tokenizer's (counts: 50304, GPT-2's)")
    batch_size: int = key(8, "rows of a micro-batch")
    repeats: int = key(9, "interleaved repeats; the median counts")
    seq_len: int | None = key(None, "train, counts: tokens per row; None = block_size")
    depth: int | None = key(None, "steps to run; None = n_recur, also in training")
    against: str | None = key(None, "transformers = beside ours Hugging Face's model: train: the dense one of as many executed blocks; serve: the baseline's "
                              "own weights, in static batches", choices=("transformers",))
    prompt_tokens: int = key(1, "generate, decode, steps: tokens of the prompt (decode: 128)")
    new_tokens: int = key(256, "generate, decode, steps: tokens to write (decode: 64)")
    cache: str = key("full", "generate, decode: K/V kept of the looped core", choices=tuple(FOLDS))
    paper: bool = key(False, "decode, serve: the shapes of the papers' tables, and their configs where none is named")
    contexts: list[int] = key([], "decode: time per token in texts of these lengths instead, for example 128,256,512,1024,2048")
    slots: int = key(32, "serve: requests in flight, and rows of the core that are kept full")
    requests: int = key(160, "serve: length of the queue")
    length_mean: float = key(16.0, "serve: mean of the requests' lengths")
    length_std: float = key(4.0, "serve: their standard deviation; clipped to 1 .. block_size - 1")
    warmup: int | None = key(None, "serve: tokens for each request in flight before time is taken; None = the queue's mean length")
    finish_rows: int = key(1, "serve: with a full core, finish waits for so many rows (row d: for --slots)")
    rows: list[str] = key(["a", "long", "b", "c", "d"], "serve: which rows of a routed config, for example --rows=b --rows=d")
    exits: str = key("balanced", "serve: steps of a routed token: balanced = imposed, each number equally often; learned = the router's own", choices=("balanced", "learned"))
    run: str | None = key(None, "serve: folder of a trained run to serve too, after a dense baseline of its shape")
    unwritten: bool = key(False, "serve: the same runs without cache writes too, as the paper takes time: twice the time (--paper=true: True)")
    batches: list[int] = key([], "serve: tokens/s at so many requests in flight instead, for example 1,2,4,8,16,32,64")
    fixed: bool | None = key(None, "decode: one more row, by the serving engine in passes of fixed shapes (on CUDA as graphs); None = on CUDA")
    threads: int = key(1, "CPU threads (ladder: of each run)")
    to: str | None = key(None, "table: the file to write; None = PUBLISHED.md")
    seeds: list[int] = key([1, 2, 3], "ladder: the seeds of every config")
    jobs: int = key(2, "ladder: runs at a time; 0 = train nothing, the table of what is recorded, on whatever data")
    results: str | None = key(None, "ladder: file of finished runs, one JSON line each; None = config/ladder/results.jsonl")


class Run(NamedTuple):
    """Something to time. step() does it once and returns None, the seconds to its first token, or its pieces: see one_round."""
    step: Callable
    flops: float                          # of one step
    tokens: int                           # of one step, all micro-batches together
    facts: dict                           # for the row as they are
    held: Callable = lambda: []           # tensors that are there between steps


# ---------------------------------------------------------------------------------------------------------------- clocks


def clock(device):
    """CPU time of this process; on a GPU, wall time once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


PIECE = 1.0                   # seconds that a queue is served at a time, while others take turns


def machine(device):
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def interleave(runs, repeats, device):
    """({name: [(seconds, what the step returned) per repeat]}, {name: seconds of the first round, which is set apart})."""
    rounds = [one_round(runs, device) for _ in tqdm(range(-1, repeats), disable=None, leave=False)]
    return {name: [found[name] for found in rounds[1:]] for name in runs}, {name: took for name, (took, _) in rounds[0].items()}


def one_round(runs, device):
    """{name: (seconds, what the step returned)}. Steps that come in pieces (generators that yield how much is done, from 0 to 1) take
    turns piece by piece, so that all of them meet the machine in the same mood: the one that has done least goes next."""
    seconds, returned, pieces, done = dict.fromkeys(runs, 0.0), {}, {}, {}

    def timed(name, do):
        start = clock(device)
        try:
            return do()
        finally:
            seconds[name] += clock(device) - start

    for name, run in runs.items():
        returned[name] = timed(name, run.step)
        if inspect.isgenerator(returned[name]):
            pieces[name], done[name] = returned[name], 0.0
    while pieces:
        name = min(pieces, key=done.get)
        try:
            done[name] = timed(name, functools.partial(next, pieces[name]))
        except StopIteration as end:
            returned[name] = end.value
            del pieces[name]
    return {name: (seconds[name], returned[name]) for name in runs}


def measure(runs, repeats, device):
    """(times of interleave, a row per run). The median repeat is a real one (of an even number, the lower), so that its
    parts add up."""
    times, first = interleave(runs, repeats, device)
    rows, reference = [], next(iter(runs))
    for name, run in runs.items():
        took, returned = sorted(times[name], key=lambda pair: pair[0])[(repeats - 1) // 2]
        time_over, flops_over = time_ratio(times, name, reference), run.flops / runs[reference].flops
        rows.append({"name": name, "ms": took * 1e3, "spread_ms": (max(times[name])[0] - min(times[name])[0]) * 1e3,
                     "tokens_per_second": run.tokens / took, "time_ratio": time_over, "flops_ratio": flops_over,
                     "time_over_flops": time_over / flops_over, "first_seconds": first[name],
                     "first_token_ms": returned and returned * 1e3, **run.facts})
    return times, rows


def time_ratio(times, name, reference):
    return statistics.median(a / b for (a, _), (b, _) in zip(times[name], times[reference]))


def utilisation(flops_per_second, device, dtype):
    """Fraction of the device's peak; None where that is not known."""
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype == "bfloat16" else None
    return peak and flops_per_second / peak


# ---------------------------------------------------------------------------------------------------------------- memory


class Live(TorchDispatchMode):
    """Bytes of the tensors that are alive, counted by storage after every operation: views and writes in place add
    nothing, and what autograd keeps for the backward pass counts for as long as it is kept."""

    def __init__(self, held):
        super().__init__()
        self.storages, self.peak = {}, 0
        self.count(held)

    def count(self, tensors):
        for storage in (x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)):
            ref = StorageWeakRef(storage)
            self.storages.setdefault(ref.cdata, (ref, storage.nbytes()))        # a weak reference keeps cdata from being used again
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count(tree_leaves(out))
        return out


def peak_bytes(run, device, compiled):
    """Bytes at the fullest moment of one more, untimed step. None: compiled code on a CPU allocates behind our back."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()                                  # also what belongs to the other rows
        run.step()
        torch.cuda.synchronize()
        return Live(run.held()).peak + torch.cuda.max_memory_allocated() - before
    if device.type != "cpu" or compiled:
        return None
    with Live(run.held()) as live:
        run.step()
    return live.peak


# ----------------------------------------------------------------------------------------------------------------- train


def ours(cfg, depth, s, device, compiled):
    """This repository's model, and how one calls it for a loss."""
    model = GPT(cfg).to(device).train()
    depth = model.check_depth(depth)
    if s.checkpoint_activations:
        checkpoint_activations(model)
    if compiled:
        compile_parts(model, ragged=cfg.router == "token")
    return model, lambda ids_BT, targets_BT, seed: model(ids_BT, targets_BT, depth=depth, seed=seed)


def dense_twin(cfg, depth):
    """A plain transformer of the same shape with as many blocks as `cfg` executes at `depth`."""
    shape = ("block", "vocab_size", "block_size", "n_embd", "n_head", "n_kv_head", "n_ffn", "bias", "dropout", "rope_theta", "norm_eps")
    return GPTConfig(**{name: getattr(cfg, name) for name in shape}, n_core=cfg.executed_blocks(depth))


def theirs(cfg, depth, s, device, compiled):
    """Hugging Face's model of a dense `cfg`, and how one calls it for a loss: it shifts labels itself, so ids are its
    labels. GPT-2 keeps its biases; the form of its GELU is that of ours."""
    for name, other in (("dropout", cfg.dropout > 0), ("checkpoint_activations", s.checkpoint_activations),
                        ("n_kv_head", cfg.block == "gpt2" and cfg.kv_heads != cfg.n_head)):
        if other:
            raise UserError(f"--against=transformers has no counterpart to {name}={getattr(s, name)}; leave it out")
    model = hugging_face(cfg, use_cache=False).to(device).train()
    if compiled:
        model.compile()
    nothing = torch.zeros(1, 1)
    return model, lambda ids_BT, targets_BT, seed: Output(None, model(input_ids=ids_BT, labels=ids_BT).loss, {}, nothing)


def hugging_face(cfg, use_cache):
    """The same dense model, with random weights."""
    try:
        import transformers
    except ImportError:
        raise UserError("--against=transformers needs transformers, which is not installed: pip install transformers")
    transformers.logging.set_verbosity_error()
    about = prepare.their_config(cfg, end=0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**about, use_cache=use_cache), attn_implementation="sdpa")


def train_step(make, cfg, depth, s, device, autocast, compiled):
    """One optimizer step as train.py makes it, all its micro-batches included. Backward counts as two forwards."""
    T, A = tokens_of(cfg, s), s.gradient_accumulation_steps
    start = clock(device)
    model, call = make(cfg, depth, s, device, compiled)
    optimizer = torch.optim.AdamW(param_groups(model, s.weight_decay), lr=1e-4, fused=device.type in ("cpu", "cuda"))
    setup = clock(device) - start
    ids = [torch.randint(cfg.vocab_size, (s.batch_size, T + 1), device=device) for _ in range(A)]
    batches, seeds, tokens = [(ids_BT[:, :-1], ids_BT[:, 1:]) for ids_BT in ids], [(i, i) for i in range(A)], A * s.batch_size * T

    def step():
        step_gradients(call, batches, seeds, autocast)
        clip_gradients(model, s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    held = lambda: [*model.parameters(), *model.buffers(), *ids, *tree_leaves(list(optimizer.state.values()))]
    return Run(step, 3 * tokens * cfg.train_flops_per_token(T, depth), tokens, {"setup_seconds": setup, "tokens_per_update": tokens}, held)


def train(all_settings, cfgs, device, dtype, autocast):
    s = next(iter(all_settings.values()))
    compiled = want_compile(s.compile, device)
    runs, pairs = {}, {}
    for name, cfg in cfgs.items():
        one, depth = all_settings[name], depth_of(cfg, all_settings[name])
        runs[name] = train_step(ours, cfg, depth, one, device, autocast, compiled)
        if one.against:
            dense = dense_twin(cfg, depth)
            pairs[name] = f"{name} transformers" if dense.layout == cfg.layout else f"{name} transformers, dense {dense.layout}"
            runs[pairs[name]] = train_step(theirs, dense, 1, one, device, autocast, compiled)
    print(heading("train", all_settings, cfgs, lambda one, cfg: f"{one.batch_size} rows x {tokens_of(cfg, one)} tokens x "
                  f"{one.gradient_accumulation_steps} accumulation", f"{machine(device)}, {dtype}{' compiled' if compiled else ''}"))
    times, rows = measure(runs, s.repeats, device)
    for row, run in zip(rows, runs.values()):
        row.update(peak_bytes=peak_bytes(run, device, compiled), utilisation=utilisation(run.flops / row["ms"] * 1e3, device, dtype))
    table(rows, [("ms", "ms", ".1f", 1), ("spread", "spread_ms", ".1f", 1), ("tokens", "tokens_per_update", ",", 1),
                 ("tokens/s", "tokens_per_second", ",.0f", 1), ("MiB", "peak_bytes", ",.1f", 2**-20), ("MFU", "utilisation", ".3f", 1),
                 ("setup s", "setup_seconds", ".2f", 1), ("first s", "first_seconds", ".2f", 1), *RATIOS])
    against = {name: time_ratio(times, other, name) for name, other in pairs.items()}
    for name, ratio in against.items():
        biases = ", with biases" if cfgs[name].block == "gpt2" and not cfgs[name].bias else ""
        print(f"time of transformers / {name}: {ratio:.3f} ({pairs[name]}{biases}; loss, clipping and optimizer included)")
    return {"rows": rows, "compiled": compiled, "theirs_over_ours": against}


# -------------------------------------------------------------------------------------------------------------- generate


def check_length(cfg, s):
    if s.prompt_tokens + s.new_tokens - 1 > cfg.block_size:
        raise ValueError(f"prompt_tokens={s.prompt_tokens} and new_tokens={s.new_tokens} do not fit block_size={cfg.block_size}; "
                         f"together they may be {cfg.block_size + 1}")


def build(cfg, device, dtype, compiled=False):
    """(model for decoding, its weights of that dtype, seconds)."""
    start = clock(device)
    model = GPT(cfg).to(device, getattr(torch, dtype)).eval()
    if compiled:
        compile_parts(model, dynamic=True)                    # a text grows by a token each time, and is no new graph
    return model, clock(device) - start


def writing(cfg, s, device, dtype, compiled):
    """(model, a prompt for every row, what a line of the table says of them)."""
    check_length(cfg, s)
    model, setup = build(cfg, device, dtype, compiled)
    prompts = torch.randint(cfg.vocab_size, (s.batch_size, s.prompt_tokens)).tolist()
    return model, prompts, {"setup_seconds": setup, "batch_size": s.batch_size, "prompt_tokens": s.prompt_tokens, "new_tokens": s.new_tokens}


def generate_step(cfg, s, device, autocast, use_cache, dtype="float32", compiled=False):
    """new_tokens for every row. FLOPs: with a cache one pass over all tokens (causal attention adds up the same token by
    token), without one a pass over the whole context per token; logits only where a token is drawn."""
    model, prompts, facts = writing(cfg, s, device, dtype, compiled)
    model.check_depth(s.depth)
    cfg.check_cache(s.cache)

    def step():
        with autocast:
            start, tokens = clock(device), stream(model, prompts, s.new_tokens, temperature=0, depth=s.depth, cache=s.cache, use_cache=use_cache)
            next(tokens)                                                        # the prompt is read, the first token is drawn
            to_first = clock(device) - start
            for _ in tokens:
                pass
        return to_first

    last = s.prompt_tokens + s.new_tokens - 1
    head, whole = 2 * cfg.vocab_size * cfg.n_embd, lambda n: n * cfg.flops_per_token(n, depth=s.depth)
    passes = [last] if use_cache else range(s.prompt_tokens, last + 1)
    flops = s.batch_size * (sum(map(whole, passes)) - (sum(passes) - s.new_tokens) * head)
    return Run(step, flops, s.batch_size * s.new_tokens, facts, lambda: [*model.parameters(), *model.buffers()])


def engine_step(cfg, s, device, dtype, compiled):
    """The same as generate_step, by the serving engine in passes of fixed shapes: on CUDA replayed as graphs, without a launch per operation."""
    model, prompts, facts = writing(cfg, s, device, dtype, compiled)
    engine = Engine(model, s.batch_size, n_places=s.prompt_tokens + s.new_tokens - 1, depth=s.depth, cache=s.cache, depthwise=False, fixed=True)

    def step():
        start, requests = clock(device), [engine.submit(prompt, s.new_tokens) for prompt in prompts]
        while not all(request.text for request in requests):
            engine.tick()
        to_first = clock(device) - start
        while engine.busy:
            engine.tick()
        return to_first

    return Run(step, 0, s.batch_size * s.new_tokens, facts,
               lambda: [*model.parameters(), *model.buffers(), *(store for space in engine.shelves.spaces.values() for store in space.stores)])


def generate(all_settings, cfgs, device, dtype, autocast):
    s = next(iter(all_settings.values()))
    if s.compile is True:
        print("note: bench.py generate runs eagerly", file=sys.stderr)
    runs = {f"{name} {how}": generate_step(cfg, all_settings[name], device, autocast, how == "cached")
            for name, cfg in cfgs.items() for how in ("cached", "uncached")}
    print(heading("generate", all_settings, cfgs, lambda one, cfg: f"depth {depth_of(cfg, one)}, cache {one.cache}", f"{machine(device)}, {dtype}"))
    _, rows = measure(runs, s.repeats, device)
    for row in rows:
        B, to_first, decode, more = row["batch_size"], row["first_token_ms"], row["ms"] - row["first_token_ms"], row["new_tokens"] - 1
        row.update(decode_ms=decode, prefill_tokens_per_second=B * row["prompt_tokens"] / to_first * 1e3,
                   decode_tokens_per_second=B * more / decode * 1e3 if more else None)
    table(rows, [("rows", "batch_size", "", 1), ("prompt", "prompt_tokens", "", 1), ("new", "new_tokens", "", 1), ("ms", "ms", ".1f", 1),
                 ("spread", "spread_ms", ".1f", 1), ("first ms", "first_token_ms", ".2f", 1),
                 ("prefill tok/s", "prefill_tokens_per_second", ",.0f", 1), ("decode tok/s", "decode_tokens_per_second", ",.0f", 1), *RATIOS])
    return {"rows": rows}


# ----------------------------------------------------------------------------------------------------------------- steps


SURE = 40.0                                   # a logit whose sigmoid is 1 in float32


class Script:
    """Who takes how many steps: rule(row, i) for the i-th token that a row reads. Answers are made once: to find them again
    costs next to nothing, so what is timed is the router."""

    def __init__(self):
        self.answers = {}

    def begin(self, rule, n_rows):
        self.rule, self.n_rows, self.read = rule, n_rows, 0

    def advance(self, T):
        self.now = [tuple(self.rule(row, self.read + t) for t in range(T)) for row in range(self.n_rows)]
        self.read += T

    def go_on(self, step, n_columns):
        """Of the tokens that took `step` steps who takes one more, row by row; a row where nobody did is left out."""
        rows = [tuple(wanted > step for wanted in row if wanted >= step) for row in self.now]
        return tuple(row + (False,) * (n_columns - len(row)) for row in rows if row)

    def answer(self, rows, make, device):
        if rows not in self.answers:
            self.answers[rows] = make(torch.tensor(rows, device=device))
        return self.answers[rows]


class ToldStep(nn.Module):
    """A router's unit for one step (expert-choice), asked and not heard: the script answers."""

    def __init__(self, unit, script, step):
        super().__init__()
        self.unit, self.script, self.step = unit, script, step

    def forward(self, x_ACD):
        self.unit(x_ACD)
        if self.step == 1:                                                      # every new token comes by here
            self.script.advance(x_ACD.size(1))
        sure = lambda said_AC: SURE * (2.0 * said_AC[..., None] - 1)
        return self.script.answer(self.script.go_on(self.step, x_ACD.size(1)), sure, x_ACD.device)


class ToldDepth(nn.Module):
    """The unit of a token-choice router, likewise."""

    def __init__(self, unit, script, n_recur):
        super().__init__()
        self.unit, self.script, self.n_recur = unit, script, n_recur

    def forward(self, x_BTD):
        self.unit(x_BTD)
        self.script.advance(x_BTD.size(1))
        sure = lambda wanted_BT: SURE * nn.functional.one_hot(wanted_BT - 1, self.n_recur).float()
        return self.script.answer(tuple(self.script.now), sure, x_BTD.device)


def impose(model):
    """A Script that this model's router obeys from now on."""
    router, script = model.recursion.router, Script()
    if model.cfg.router == "token":
        router.unit = ToldDepth(router.unit, script, model.cfg.n_recur)
    else:
        for step in range(1, model.cfg.n_recur):
            router.deciding[step] = ToldStep(router.deciding[step], script, step)
    return script


def on_average(mean, n_rows):
    """A rule of whole numbers of steps next to `mean`, which they have on average; rows differ from each other."""
    return lambda row, i: math.floor(mean * (i + 1) + row / n_rows) - math.floor(mean * i + row / n_rows)


def told_step(model, n_rows, depth, begin, s, device, autocast):
    """One generation. step() returns (seconds after the first token, steps taken by the tokens read then)."""
    prompts = torch.randint(model.cfg.vocab_size, (n_rows, s.prompt_tokens)).tolist()

    def step():
        taken = [[] for _ in prompts]
        begin()
        with autocast:
            tokens = stream(model, prompts, s.new_tokens, temperature=0, depth=depth, threshold=0.5, taken=taken)
            next(tokens)
            start = clock(device)
            for _ in tokens:
                pass
            seconds = clock(device) - start
        return seconds, [row[s.prompt_tokens :] for row in taken]

    return Run(step, 0, n_rows * (s.new_tokens - 1), {"batch_size": n_rows})


def check_imposable(name, cfg, s):
    check_length(cfg, s)
    for wrong, why in ((cfg.router == "none" or cfg.n_recur == 1, f"has no router ({cfg.layout}, router={cfg.router!r})"),
                       (s.depth is not None, f"cannot be cut to depth={s.depth}: the steps are imposed from 1 to n_recur"),
                       (s.cache != "full", f"is routed, and cache={s.cache!r} keeps one K and V for all steps"),
                       (s.new_tokens < 2, "needs new_tokens of at least 2, of which the first comes from the prompt"),
                       (cfg.router_choice == "random", "chooses by lot (router_choice='random'), and a lot cannot be told"),
                       (cfg.router == "expert" and [c < 1 for c in cfg.capacities] != [step > 0 for step in range(cfg.n_recur)],
                        f"has capacity={cfg.capacity}, where steps are imposed from 1 on: the first must be 1, the others below 1")):
        if wrong:
            raise ValueError(f"bench.py steps imposes what a router decides, and {name} {why}; for example config/bench/mor3_14.py")


def rules_of(cfg, B):
    """{what is imposed: its rule}: five mean depths, and for several rows one that goes on alone."""
    R = cfg.n_recur
    rules = {f"{mean:g}": on_average(mean, B) for mean in (1 + (R - 1) * i / 4 for i in range(5))}
    return rules | ({f"{R} in one row, else 1": lambda row, i: 1 if row else R} if B > 1 else {})


def told_runs(name, cfg, s, device, autocast):
    """({what is imposed: run}, {(rows, steps): run without a router}), by the names under which they are shown."""
    B, R = s.batch_size, cfg.n_recur
    model, plain, rules = GPT(cfg).to(device).eval(), GPT(cfg.unrouted()).to(device).eval(), rules_of(cfg, B)
    script, read = impose(model), range(s.prompt_tokens + s.new_tokens)
    sizes = {n for rule in rules.values() for i in read for n in rows_in_steps([rule(row, i) for row in range(B)])}
    imposed = {key: told_step(model, B, None, lambda rule=rule: script.begin(rule, B), s, device, autocast) for key, rule in rules.items()}
    free = {(n, depth): told_step(plain, n, depth, lambda: None, s, device, autocast) for n in sorted(sizes, reverse=True) for depth in (1, R)}
    return ({f"{name} at {key}": run for key, run in imposed.items()},
            {f"{name} without router, {n} of {B} rows at {depth}": run for (n, depth), run in free.items()})


def steps(all_settings, cfgs, device, dtype, autocast):
    s = next(iter(all_settings.values()))
    for name, cfg in cfgs.items():
        check_imposable(name, cfg, all_settings[name])
    parts = {name: told_runs(name, cfg, all_settings[name], device, autocast) for name, cfg in cfgs.items()}
    print(heading("steps", all_settings, cfgs, lambda one, cfg: f"{one.batch_size} rows, {one.prompt_tokens} prompt and {one.new_tokens} new tokens",
                  f"{machine(device)}, {dtype}"))
    times, _ = interleave({key: run for part in parts.values() for runs in part for key, run in runs.items()}, s.repeats, device)
    rows, fits = [], {}
    for name, (imposed, free) in parts.items():
        told, plain = ([told_row(key, times[key], all_settings[name].new_tokens - 1) for key in runs] for runs in (imposed, free))
        sizes = [run.facts["batch_size"] for run in free.values()][::2]
        core_ms = {n: (deep["ms"] - shallow["ms"]) / (cfgs[name].n_recur - 1) for n, shallow, deep in zip(sizes, plain[::2], plain[1::2])}
        for row in told:
            row["passes"] = mean_passes(times[row["name"]][0][1][1], core_ms)
        rows, fits[name] = rows + told + plain, fit(told, core_ms, cfgs[name].n_recur)
    table(rows, [("steps", "steps", ".3f", 1), ("passes", "passes", ".3f", 1), ("ms/token", "ms", ".3f", 1), ("spread", "spread_ms", ".3f", 1)])
    for name, found in fits.items():
        print(f"{name}: ms per token = {found['a_ms']:.3f} + {found['b_ms']:.3f} x passes, R^2 {found['r2']:.4f}; "
              f"a pass of the core without a router {found['core_ms']:.3f}; b over it {found['b_over_core']:.3f}")
        if "lone_ms" in found:
            print(f"{name}: a step that one row takes alone {found['lone_ms']:.3f} ms, without a router {found['lone_core_ms']:.3f}; "
                  f"ratio {found['lone_over_core']:.3f}")
    return {"rows": rows, "fits": fits}


def rows_in_steps(steps_B):
    """How many rows go through step 0, 1, ... together, when they take so many each."""
    return [sum(steps > step for steps in steps_B) for step in range(max(steps_B))]


def told_row(name, times, ticks):
    """ms: for one more token in every row. steps: on average over the tokens."""
    ms, taken = [seconds / ticks * 1e3 for _, (seconds, _) in times], times[0][1][1]
    return {"name": name, "steps": statistics.fmean(n for row in taken for n in row), "passes": None, "ms": statistics.median(ms),
            "spread_ms": max(ms) - min(ms)}


def mean_passes(taken, core_ms):
    """Steps per tick, one of n rows counted as a pass of n rows over a pass of all."""
    return statistics.fmean(sum(core_ms[n] for n in rows_in_steps(tick)) / core_ms[len(taken)] for tick in zip(*taken))


def line(x, ms):
    """ms = a + b x by least squares, and how much of the variance that explains."""
    b, a = statistics.linear_regression(x, ms)
    return {"a_ms": a, "b_ms": b, "r2": statistics.correlation(x, ms) ** 2}


def fit(told, core_ms, R):
    """Least squares of the medians over the five mean depths, and what a row that goes on alone costs."""
    points, lone = told[:5], told[5:]
    x, ms, core = [row["passes"] for row in points], [row["ms"] for row in points], core_ms[max(core_ms)]
    found = line(x, ms)
    found |= {"core_ms": core, "b_over_core": found["b_ms"] / core}
    for row in lone:
        found |= {"lone_ms": (row["ms"] - ms[0]) / (R - 1), "lone_core_ms": core_ms[1]}
        found["lone_over_core"] = found["lone_ms"] / core_ms[1]
    return found


# ---------------------------------------------------------------------------------------------------------------- decode


def decode(all_settings, cfgs, device, dtype, autocast):
    s = next(iter(all_settings.values()))
    for name, cfg in () if s.contexts else cfgs.items():
        check_length(cfg, all_settings[name])
    if s.new_tokens < 2:
        raise ValueError(f"new_tokens={s.new_tokens} leaves no token after the first to be timed; give at least 2")
    compiled = want_compile(s.compile, device)
    if s.contexts:
        return lengthen(all_settings, cfgs, device, dtype, compiled)
    fixed = device.type == "cuda" if s.fixed is None else s.fixed
    ways = ["eager", *["compiled"] * compiled, *[("graphs" if device.type == "cuda" else "fixed") + ", compiled" * compiled] * fixed]
    kinds = {name: {f"{name} {kind}": kind for kind in ways} for name in cfgs}
    make = lambda name, kind: (generate_step(cfgs[name], all_settings[name], device, contextlib.nullcontext(), True, dtype, kind == "compiled")  # noqa: E731
                               if kind in ("eager", "compiled") else engine_step(cfgs[name], all_settings[name], device, dtype, compiled))
    runs = {key: make(name, kind) for name, keys in kinds.items() for key, kind in keys.items()}
    print(heading("decode", all_settings, cfgs, lambda one, cfg: f"batch {one.batch_size}, {one.prompt_tokens} prompt and {one.new_tokens} new tokens, "
                  f"depth {depth_of(cfg, one)}, cache {one.cache}", f"{machine(device)}, weights {dtype}"))
    times, first = interleave(runs, s.repeats, device)
    references, rows, flops = list(kinds[next(iter(cfgs))]), [], {name: flops_to_decode(cfg, all_settings[name]) for name, cfg in cfgs.items()}
    for name, keys in kinds.items():
        over = over_first(flops[name], flops)
        for reference, (key, how) in zip(references, keys.items()):
            row = decode_row(times[key], times[reference], all_settings[name])
            rows.append({"name": key, **row, "first_seconds": first[key], "flops_ratio": over, "time_over_flops": over and row["time_ratio"] / over,
                         "peak_bytes": peak_bytes(runs[key], device, "compiled" in how), **runs[key].facts})
    table(rows, [("batch", "batch_size", "", 1), ("prompt", "prompt_tokens", ",", 1), ("new", "new_tokens", ",", 1), ("ms/token", "ms", ".3f", 1),
                 ("spread", "spread_ms", ".3f", 1), ("first ms", "first_token_ms", ".2f", 1), ("prefill tok/s", "prefill_tokens_per_second", ",.0f", 1),
                 ("decode tok/s", "decode_tokens_per_second", ",.0f", 1), ("MiB", "peak_bytes", ",.1f", 2**-20), ("setup s", "setup_seconds", ".2f", 1),
                 ("first s", "first_seconds", ".2f", 1), *RATIOS])
    return {"rows": rows, "compiled": compiled, "memory": show_memory(all_settings, cfgs, dtype)}


def decode_row(times, references, s):
    """Of whole generations and the seconds to their first token. ms: for one more token in every row."""
    more, B = s.new_tokens - 1, s.batch_size
    each, others = ([(took - to_first) / more for took, to_first in of] for of in (times, references))
    to_first, ms = statistics.median(to_first for _, to_first in times), statistics.median(each) * 1e3
    return {"ms": ms, "spread_ms": (max(each) - min(each)) * 1e3, "first_token_ms": to_first * 1e3, "prefill_tokens_per_second": B * s.prompt_tokens / to_first,
            "decode_tokens_per_second": B / ms * 1e3, "time_ratio": statistics.median(a / b for a, b in zip(each, others))}


def flops_to_decode(cfg, s):
    """Of the tokens after the first, in all rows: what a pass over all tokens costs more than one over the prompt. None where a router says how
    far they go."""
    if cfg.router != "none":
        return None
    whole = lambda n: n * cfg.flops_per_token(n, depth=s.depth)
    return s.batch_size * (whole(s.prompt_tokens + s.new_tokens - 1) - whole(s.prompt_tokens)) / (s.new_tokens - 1)


def over_first(flops, all_flops):
    first = next(iter(all_flops.values()))
    return flops / first if flops and first else None


def allocated(cfg, slots, n_places, dtype, depth=None, cache="full"):
    """Bytes of K and V that serving so many requests of n_places tokens allocates, counted without allocating them."""
    with FakeTensorMode():
        stand_in = SimpleNamespace(cfg=cfg, embed=SimpleNamespace(weight=torch.empty(0, dtype=getattr(torch, dtype))))
        return Shelves(stand_in, slots, n_places, slots, cfg.n_recur if depth is None else depth, None, cache).nbytes()


def show_memory(all_settings, cfgs, dtype):
    """The table of what decoding keeps: weights, and K and V by the number of rows and what is kept of the core. Returns its rows."""
    s, rows = next(iter(all_settings.values())), []
    T, dtype = (1024, "bfloat16") if s.paper else (s.prompt_tokens + s.new_tokens, dtype)
    size = getattr(torch, dtype).itemsize
    for name, cfg in cfgs.items():
        for B in (1, 32):
            for cache in FOLDS if cfg.compressible and cfg.n_recur > 1 else ["full"]:
                depth = depth_of(cfg, all_settings[name])
                row = {"name": f"{name}, cache {cache}", "rows": B, "weights_bytes": size * cfg.n_params(), "kv_bytes": allocated(cfg, B, T, dtype, depth, cache),
                       "kv_bytes_by_formula": cfg.kv_bytes(T, B, getattr(torch, dtype), cache, depth)}
                row["total_bytes"] = row["weights_bytes"] + row["kv_bytes"]
                rows.append(row | {"ratio": row["total_bytes"] / next(other for other in [*rows, row] if other["rows"] == B)["total_bytes"]})
    print(f"memory of decoding {T:,} tokens a row, {dtype}, MiB; ratios of the total to the first config's")
    table(rows, [("rows", "rows", "", 1), *((title, name, ",.1f", 2**-20) for title, name in (
        ("weights", "weights_bytes"), ("K/V allocated", "kv_bytes"), ("by formula", "kv_bytes_by_formula"), ("total", "total_bytes"))), ("ratio", "ratio", ".4f", 1)])
    return rows


def lengthen(all_settings, cfgs, device, dtype, compiled):
    """Time per token against the length of the text that it is written after."""
    s, runs = next(iter(all_settings.values())), {}
    contexts = sorted(set(s.contexts))
    for name, cfg in cfgs.items():
        one = all_settings[name]
        wide = replace(cfg, block_size=max(cfg.block_size, contexts[-1] + one.new_tokens))             # random weights: any context will do
        model, _ = build(wide, device, dtype, compiled)
        runs |= {f"{name} at {context}": context_step(model, context, one, device) for context in contexts}
    print(heading("decode", all_settings, cfgs, lambda one, cfg: f"batch {one.batch_size}, {one.new_tokens} new tokens after texts of {', '.join(map(str, contexts))}, "
                  f"depth {depth_of(cfg, one)}, cache {one.cache}", f"{machine(device)}, weights {dtype}{' compiled' if compiled else ''}"))
    times, first = interleave(runs, s.repeats, device)
    rows, fits, curves = [], {}, {}
    for key, run in runs.items():
        ms = [seconds / run.tokens * run.facts["batch_size"] * 1e3 for _, seconds in times[key]]
        rows.append({"name": key, **run.facts, "ms": statistics.median(ms), "spread_ms": max(ms) - min(ms), "first_seconds": first[key]})
    table(rows, [("batch", "batch_size", "", 1), ("context", "context", ",", 1), ("ms/token", "ms", ".3f", 1),
                 ("spread", "spread_ms", ".3f", 1), ("first s", "first_seconds", ".2f", 1)])
    for name in cfgs:
        points = [row for row in rows if row["name"].rpartition(" at ")[0] == name]
        x, y = [row["context"] for row in points], [row["ms"] for row in points]
        fits[name] = found = line(x, y)
        curves[name] = x, y, lambda n, found=found: found["a_ms"] + found["b_ms"] * n
        print(f"{name}: ms per token = {found['a_ms']:.3f} + {found['b_ms'] * 1e3:.3f} x context / 1,000, R^2 {found['r2']:.4f}: {x[-1] / x[0]:g} times the "
              f"context, {y[-1] / y[0]:.2f} times the time; {'it grows as a line' if found['r2'] > 0.9 else 'no line explains it'}")
    picture = draw_curves("decode", curves, "tokens before the one that is written", "ms per token")
    return {"rows": rows, "fits": fits, "compiled": compiled, "picture": picture}


def context_step(model, context, s, device):
    """new_tokens for every row of a text that has been read already; returns the seconds."""
    ids_BT = torch.randint(model.cfg.vocab_size, (s.batch_size, context), device=device)
    model.cfg.check_cache(s.cache)
    filled = make_cache(model, s.batch_size, context + s.new_tokens, s.depth)
    model.feed(ids_BT, filled)
    filled = filled.compress(s.cache)

    @torch.inference_mode()
    def step():
        cache, next_B1 = copy.deepcopy(filled), ids_BT[:, -1:]
        start = clock(device)
        for _ in range(s.new_tokens):
            next_B1 = model.feed(next_B1, cache)[:, 0].argmax(-1, keepdim=True)
        return clock(device) - start

    return Run(step, 0, s.batch_size * s.new_tokens, {"batch_size": s.batch_size, "context": context})


def draw_curves(name, curves, x_label, y_label):
    """out/bench/NAME.png: each config's points, and what was fitted to them. curves: name -> (x, y, function). Returns the path."""
    from eval import new_figure                               # here: eval.py takes its clock from this file
    if (figure := new_figure(8, 5)) is None:
        return None
    axes, path = figure.subplots(), Path("out/bench") / f"{name}.png"
    for i, (label, (x, y, fitted)) in enumerate(curves.items()):
        fine = [x[0] + (x[-1] - x[0]) * j / 200 for j in range(201)]
        axes.plot(x, y, "o", color=f"C{i}", label=label)
        axes.plot(fine, [fitted(value) for value in fine], color=f"C{i}", linewidth=1)
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
    print(f"picture: {path}", file=sys.stderr)
    return str(path)


# ----------------------------------------------------------------------------------------------------------------- serve


class Plan(NamedTuple):
    """A row of serve's table: who is served, how many requests at a time, by an engine of which options."""
    config: str
    slots: int
    kind: str                             # baseline; a, b, c, d; long: a with windows as long as the text
    options: dict = {}
    title = property(lambda self: f"{self.config}, {KINDS_OF_SERVING[self.kind].format(**{'slots': self.slots, **self.options})}")


KINDS_OF_SERVING = {"baseline": "{slots} in flight", "a": "a: {slots} in flight", "long": "a, windows as long as the text",
                    "b": "b: {core_rows} core rows kept full", "c": "c: {slots}, the baseline's K/V memory", "d": "d: {core_rows} rows in every pass"}


def queue_of(s, cfgs, n):
    """Lengths of n requests, the same for all configs."""
    most = min(cfg.block_size for cfg in cfgs.values()) - 1
    drawn = torch.normal(s.length_mean, s.length_std, (n,), generator=generator(s.seed))
    return drawn.round().clamp(1, max(1, most)).int().tolist()


def first_token(i, cfg):
    """All that request i of a queue begins with: each with another, so that they write texts of their own."""
    return [i % cfg.vocab_size]


def balanced(cfg):
    """Steps of a token: of n_recur tokens of a request in a row each takes another number; requests differ in where they begin."""
    return lambda number, position: 1 + (number + position) % cfg.n_recur


def serve_queue(engine, lengths, warm, device, eot=None):
    """All of a queue: yields how much of it is done about once a second (turns of one tick would find the weights of others in the caches).
    Returns marks (seconds in ticks, tokens written, counts): at the start, once `warm` tokens are written, when the queue is empty, at the
    end; the second is None where the queue is empty before. eot: of a trained model, whose tokens are drawn: greedy, all would write one
    text, which soon goes round in circles, and exits would be those of that text."""
    engine.number = 0                                         # imposed steps follow it: the same in each repeat
    for i, length in enumerate(lengths):
        engine.submit(first_token(i, engine.model.cfg) if eot is None else [eot], length, temperature=0.0 if eot is None else 1.0, seed=i)
    tokens, seconds, turn = 0, 0.0, PIECE
    mark = lambda: (seconds, tokens, Counter(engine.counts))                     # noqa: E731
    marks = [mark(), None, None]
    while engine.busy:
        start = clock(device)
        told = engine.tick()
        seconds += clock(device) - start
        for request, token in told:
            if token is None:
                raise ValueError(f"request {request.number} failed: {request.error}")
            tokens += 1
        if marks[1] is None and tokens >= warm and engine.waiting:
            marks[1] = mark()
        if marks[2] is None and not engine.waiting:
            marks[2] = mark()
        if seconds >= turn:
            turn = seconds + PIECE
            yield tokens / sum(lengths)
    return [*marks, mark()]


def between(start, end):
    """(seconds, tokens, counts) from one mark to another."""
    return end[0] - start[0], end[1] - start[1], end[2] - start[2]


def rate_of(marks):
    """tokens/s of the steady state."""
    seconds, tokens, _ = between(*marks[1:3])
    return tokens / seconds


def served_flops(cfg, counts):
    """FLOPs of what an engine did: `exact`'s, at the rows and keys that were counted. Depth-wise each row of the core asks all routers."""
    D, core_rows, first = cfg.n_embd, counts["core_rows"], min(counts["core_rows"], counts["start_rows"])
    at = lambda depth: core_flops(cfg, 0, depth, lambda step: 1.0)               # of a step's blocks without keys; a second step may share K and V
    once, per_step = exact_flops(cfg, 0, 0), UPDATES[cfg.update].flops(cfg)[1] + sum(map(ROUTERS[cfg.router].flops(cfg)[1], range(cfg.n_recur)))
    keys = cfg.n_core * counts["core_keys"] + cfg.n_prelude * counts["start_keys"] + cfg.n_coda * counts["finish_keys"]
    return counts["finish_rows"] * once + first * at(1) + (core_rows - first) * (at(2) - at(1)) + core_rows * per_step + 4 * D * keys


def serving(model, plan, lengths, s, device, eot=None):
    """A Run whose step serves the queue (the first time a few requests, to warm up) and returns its marks. One engine serves all repeats."""
    cfg, calls, n_places = model.cfg, [], max(lengths)
    steps = balanced(cfg) if cfg.router != "none" and s.exits == "balanced" else None
    warm = plan.slots * (statistics.fmean(lengths) if s.warmup is None else s.warmup)
    engine = Engine(model, plan.slots, n_places=n_places, steps=steps, depthwise=plan.kind != "baseline", **plan.options)

    def step():
        calls.append(None)
        if len(calls) == 1:
            return (yield from serve_queue(engine, [min(4, n) for n in lengths[: plan.slots]], warm, device, eot))
        return check_steady(plan, (yield from serve_queue(engine, lengths, warm, device, eot)), lengths)

    return Run(step, 0, sum(lengths), {"in_flight": plan.slots, "kv_bytes": engine.shelves.nbytes(), "kind": plan.kind, "config": plan.config})


@contextlib.contextmanager
def without_writes():
    """K and V are made, and not stored: what the paper's clock measures. The texts are nonsense, their lengths and steps the same."""
    write, Seat.write = Seat.write, lambda seat, place_C, new: None
    try:
        yield
    finally:
        Seat.write = write


def unwritten(run):
    """The same without cache writes."""
    def step():
        pieces = run.step()
        while True:
            with without_writes():
                try:
                    done = next(pieces)
                except StopIteration as end:
                    return end.value
            yield done
    return run._replace(step=step)


def baselines_of(cfgs):
    """{routed config: the baseline named before it}"""
    found, last = {}, None
    for name, cfg in cfgs.items():
        if cfg.router == "none":
            last = name
        elif last is None:
            raise ValueError(f"bench.py serve compares with a baseline, and {name} has a router (router={cfg.router!r}); name a config without one first, "
                             f"for example config/bench/vanilla_14.py")
        else:
            found[name] = last
    return found


def most_that_fit(cfg, n_places, dtype, budget):
    """Requests of n_places tokens whose K and V a budget of bytes holds."""
    n = 0
    while allocated(cfg, n + 1, n_places, dtype) <= budget:
        n += 1
    return n


def plans_of(cfgs, lengths, s, dtype):
    """(rows of the table, {routed config: how many requests its baseline's K/V memory holds})"""
    plans, fits, n_places, above = [], {}, max(lengths), baselines_of(cfgs)
    for name, base in above.items():
        fits[name] = most_that_fit(cfgs[name], n_places, dtype, allocated(cfgs[base], s.slots, n_places, dtype))
    for name, cfg in cfgs.items():
        if cfg.router == "none":
            others = {slots for routed, base in above.items() if base == name for slots in in_flight(cfgs[routed], fits[routed], s).values()} - {s.slots}
            plans += [Plan(name, slots, "baseline") for slots in [s.slots, *sorted(others)]]
        else:
            pooled, full = {"finish_rows": s.finish_rows}, {"core_rows": s.slots}
            options = {"a": pooled, "long": {"by_arrival": False, **pooled}, "b": full | pooled, "c": pooled, "d": full | {"finish_rows": s.slots}}
            plans += [Plan(name, slots, kind, options[kind]) for kind, slots in in_flight(cfg, fits[name], s).items()]
    return plans, fits


def in_flight(cfg, fit, s):
    """{row of a routed config: requests in flight}, of the rows that are wanted. Windows as long as the text change texts: where exits follow them, no row."""
    full = with_full_core(cfg, s)
    slots = {"a": s.slots, "long": s.slots * (s.exits == "balanced"), "b": full, "c": fit, "d": full + s.slots}
    return {kind: n for kind, n in slots.items() if kind in s.rows and n}


def with_full_core(cfg, s):
    """Requests in flight that keep --slots rows in the core: of those (N + 1) / 2 ticks stay each, and then one outside."""
    return s.slots + math.ceil(2 * s.slots / (cfg.n_recur + 1))


def serve_row(plan, cfg, all_marks):
    """Medians over repeats. tokens_per_second: of the steady state; flops_per_token: counted there."""
    steady, whole = [between(marks[1], marks[2]) for marks in all_marks], [between(marks[0], marks[3]) for marks in all_marks]
    rates, counts = list(map(rate_of, all_marks)), steady[0][2]        # the counts of all repeats are the same
    mean = lambda part: counts[f"{part}_rows"] / counts[f"{part}_calls"] if counts[f"{part}_calls"] else None
    return {"name": plan.title, "tokens_per_second": statistics.median(rates), "spread": max(rates) - min(rates), "steady_tokens": steady[0][1],
            "steady_seconds": statistics.median(seconds for seconds, _, _ in steady), "steps": counts["core_rows"] / counts["finish_rows"],
            "whole_tokens_per_second": statistics.median(tokens / seconds for seconds, tokens, _ in whole), "rates": rates,
            "core_mean": mean("core"), "finish_mean": mean("finish"), "flops_per_token": served_flops(cfg, counts) / steady[0][1],
            "put_aside": whole[0][2]["put_aside"], "counts": dict(counts)}


def check_steady(plan, marks, lengths):
    """The marks, where the steady state is long enough to be one: a token and more for each request in flight."""
    n = marks[2][1] - marks[1][1] if marks[1] else 0
    if n < plan.slots:
        raise ValueError(f"requests={len(lengths)} are too few for a steady state of {plan.title}: {n} tokens come between the end of the warm-up and that of the "
                         f"queue; give more --requests, a shorter --warmup, or leave that row out (--rows=)")
    return marks


def compare_rows(rows, above):
    """Ratios to the baseline: as many in flight as its first row (at_slots), and as many as the row itself (at_same)."""
    ratio = lambda a, b, rates="rates": statistics.median(x / y for x, y in zip(a[rates], b[rates])) if a[rates] else None
    for row in rows:
        base = [other for other in rows if other["config"] == above.get(row["config"], row["config"]) and other["kind"] == "baseline"]
        same = next((other for other in base if other["in_flight"] == row["in_flight"]), None)
        row |= {"ratio": ratio(row, base[0]), "ratio_same": same and ratio(row, same), "ceiling": base[0]["flops_per_token"] / row["flops_per_token"]}
        row["share"] = row["ratio"] / row["ceiling"]
        row["unwritten_ratio"] = ratio(row, base[0], "unwritten_rates")


def gains_of(rows):
    """{routed config: the gain over the baseline, factor by factor}"""
    found = {}
    for name in dict.fromkeys(row["config"] for row in rows if row["kind"] != "baseline"):
        of = {row["kind"]: row["ratio"] for row in rows if row["config"] == name}
        over = lambda a, b: of[a] / of[b] if a in of and b in of else None       # noqa: E731, B023
        found[name] = {"fewer steps": of.get("long"), "smaller windows": over("a", "long"), "fewer steps and smaller windows": None if "long" in of else of.get("a"),
                       "fuller core": over("b", "a"), "full passes outside it": over("d", "b"), "or the batch that fits the baseline's memory": over("c", "a")}
    return found


def serve(all_settings, cfgs, device, dtype, autocast):
    s = next(iter(all_settings.values()))
    if s.origins["batch_size"] == "command line":
        raise ValueError(f"batch_size={s.batch_size}: serve counts requests in flight: --slots=, or for a curve --batches=")
    if s.compile is True:
        print("note: bench.py serve runs eagerly", file=sys.stderr)
    cfgs, models, setup, eot = models_of(cfgs, s, device, dtype)
    above, lengths = baselines_of(cfgs), queue_of(s, cfgs, s.requests)
    if s.batches:
        return crowd(cfgs, models, s, device, dtype, eot)
    plans, fits = plans_of(cfgs, lengths, s, dtype)
    runs = {plan.title: serving(models[plan.config], plan, lengths, s, device, eot) for plan in plans}
    for name in static_of(cfgs, s):
        runs[f"{name}, transformers"] = static_batches(models[name], lengths, s, device)
    print_serving(cfgs, s, f"{s.requests:,} requests of {statistics.fmean(lengths):.1f} tokens on average ({min(lengths)} to {max(lengths)})", device, dtype)
    runs |= {f"{plan.title}, unwritten": unwritten(serving(models[plan.config], plan, lengths, s, device, eot)) for plan in plans
             if s.unwritten and (cfgs[plan.config].router == "none" or s.exits == "balanced")}           # learned: what is read decides how far tokens go
    times, first = interleave(runs, s.repeats, device)
    rows = []
    for plan in plans:
        quiet = [rate_of(marks) for _, marks in times.get(f"{plan.title}, unwritten", [])]
        rows.append({**serve_row(plan, cfgs[plan.config], [marks for _, marks in times[plan.title]]), **runs[plan.title].facts, "setup_seconds": setup[plan.config],
                     "first_seconds": first[plan.title], "unwritten_rates": quiet, "unwritten_per_second": statistics.median(quiet) if quiet else None})
    compare_rows(rows, above)
    table(rows, [("in flight", "in_flight", "", 1), ("core rows", "core_mean", ".1f", 1), ("finish rows", "finish_mean", ".1f", 1), ("steps", "steps", ".2f", 1),
                 ("tokens/s", "tokens_per_second", ",.0f", 1), ("spread", "spread", ",.0f", 1), (f"over {s.slots}", "ratio", ".3f", 1), ("over same", "ratio_same", ".3f", 1), ("ceiling", "ceiling", ".3f", 1),
                 ("share", "share", ".3f", 1), ("K/V MiB", "kv_bytes", ",.1f", 2**-20), ("unwritten", "unwritten_per_second", ",.0f", 1),
                 (f"over {s.slots}", "unwritten_ratio", ".3f", 1), ("whole queue", "whole_tokens_per_second", ",.0f", 1),
                 ("setup s", "setup_seconds", ".2f", 1), ("first s", "first_seconds", ".2f", 1), ("steady s", "steady_seconds", ".2f", 1)])
    gains, theirs = gains_of(rows), {name: against_static(name, times, models[name], lengths, s, device) for name in static_of(cfgs, s)}
    for name, found in gains.items():
        N, factors = cfgs[name].n_recur, " x ".join(f"{what} {factor:.3f}" for what, factor in found.items() if factor)
        print(f"{name}: {factors and factors + '; '}the K/V memory of {above[name]} at {s.slots} holds "
              f"{fits[name]} requests of the longest ({s.slots} x 2N/(N+1) is {math.floor(s.slots * 2 * N / (N + 1))})")
    return {"rows": rows, "gains": gains, "fits": fits, "theirs": theirs, "exits": s.exits, "requests": len(lengths), "tokens": sum(lengths)}


def models_of(cfgs, s, device, dtype):
    """(configs, their models, seconds to make each, None); with --run those of the run and of a dense baseline of its shape, and its end-of-text."""
    eot = None
    if s.run:
        start = clock(device)
        model, tokenizer, about = load_run(s.run, device)
        eot, name, trained = tokenizer.eot_token, about["folder"].name, (model.to(getattr(torch, dtype)), clock(device) - start)
        if model.cfg.router == "none":
            raise ValueError(f"run={s.run!r} has no router ({model.cfg.layout}); its tokens all take the same steps: serve it by its config")
        dense = dense_twin(model.cfg, model.cfg.n_recur)
        built = {f"dense {dense.layout}": build(dense, device, dtype), name: trained}
    else:
        built = {name: build(cfg, device, dtype) for name, cfg in cfgs.items()}
    return ({name: model.cfg for name, (model, _) in built.items()}, *({name: pair[i] for name, pair in built.items()} for i in range(2)), eot)


def print_serving(cfgs, s, queue, device, dtype):
    how = {"balanced": "exits balanced: imposed, the routers are asked and not heard",
           "learned": f"exits by the routers{'' if s.run else ', whose weights are random'}"}
    print(f"serve: {', '.join(f'{name} {cfg.layout}' for name, cfg in cfgs.items())}; {queue}, {'drawn after end-of-text' if s.run else 'no prompt, greedy'}; "
          f"warm-up {'as many' if s.warmup is None else s.warmup} tokens for each in flight; {how[s.exits] if baselines_of(cfgs) else 'no exits'}; "
          f"finish waits for {s.finish_rows} rows; {machine(device)}, weights {dtype}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}, commit {commit()}")


# ---- beside transformers

def static_of(cfgs, s):
    """The baselines that --against=transformers is about."""
    return [name for name, cfg in cfgs.items() if s.against and cfg.router == "none"]


def as_hugging_face(model):
    """Their model with our weights."""
    cfg = model.cfg
    if cfg.layout != dense_twin(cfg, 1).layout:
        raise ValueError(f"--against=transformers has no counterpart to {cfg.layout}; name a dense baseline, for example config/bench/vanilla_14.py")
    weights, net = prepare.theirs_of(model.state_dict(), cfg), hugging_face(cfg, use_cache=True).eval()
    net.config.eos_token_id = net.generation_config.eos_token_id = None          # no id ends a text: its length is given
    missing, over = net.load_state_dict(weights, strict=False)
    if over or set(missing) - {"lm_head.weight"}:                                # the head is the token table
        raise ValueError(f"transformers has other weights than {cfg.layout} here: without a place {over}, missing {missing}")
    return net.to(model.embed.weight)


def write_batch(net, first_B1, n_new, device):
    """Their greedy text, so many tokens in each row after its first one."""
    from transformers import GenerationConfig
    ids_B1 = torch.tensor(first_B1, device=device)
    settings = GenerationConfig(max_new_tokens=n_new, do_sample=False, use_cache=True, pad_token_id=0)
    with torch.inference_mode():
        return net.generate(ids_B1, attention_mask=torch.ones_like(ids_B1), generation_config=settings)[:, 1:]


def static_batches(model, lengths, s, device):
    """generate on --slots requests after the other, each batch until its longest is done. Returns (tokens wanted, computed)."""
    net, calls = as_hugging_face(model), []

    def step():
        calls.append(None)
        batches = [lengths[i : i + s.slots] for i in range(0, len(lengths), s.slots)][: None if len(calls) > 1 else 1]
        for i, batch in enumerate(batches):
            first_B1 = [first_token(i * s.slots + row, model.cfg) for row in range(len(batch))]
            write_batch(net, first_B1, max(batch) if len(calls) > 1 else 2, device)
            yield (i + 1) / len(batches)
        return sum(map(sum, batches)), sum(len(batch) * max(batch) for batch in batches)

    return Run(step, 0, sum(lengths), {})


def logits_apart(model, device):
    """The greatest difference between their logits and ours on random tokens: a model of random weights may write one token again and again,
    and texts of that kind are equal soon."""
    ids_BT = torch.randint(model.cfg.vocab_size, (4, min(64, model.cfg.block_size)), device=device)
    with torch.inference_mode():
        return (as_hugging_face(model)(ids_BT).logits.float() - model(ids_BT).logits.float()).abs().max().item()


def first_difference(model, lengths, device):
    """Where the first rows of both differ, (row, token), or None."""
    engine, first_B1 = Engine(model, len(lengths), n_places=max(lengths)), [first_token(i, model.cfg) for i in range(len(lengths))]
    requests = [engine.submit(first, n) for first, n in zip(first_B1, lengths)]
    for _ in engine.run():
        pass
    texts = write_batch(as_hugging_face(model), first_B1, max(lengths), device).tolist()
    return next(((row, i) for row, (request, text) in enumerate(zip(requests, texts)) for i, token in enumerate(request.text) if text[i : i + 1] != [token]), None)


def against_static(name, times, model, lengths, s, device):
    """One line on ours over theirs, the whole queue, start and end included."""
    title, theirs = f"{name}, {s.slots} in flight", f"{name}, transformers"
    wanted, computed = times[theirs][0][1]
    took, over = statistics.median(took for took, _ in times[theirs]), time_ratio(times, theirs, title)
    differs, apart = first_difference(model, lengths[:4], device), logits_apart(model, device)
    texts = "their first texts are equal" if differs is None else f"their texts differ, first in row {differs[0]} at token {differs[1]}"
    print(f"transformers, {name} in static batches of {s.slots}: {wanted / took:,.0f} wanted tokens/s, {computed / took:,.0f} computed; ours over theirs, whole queue: "
          f"{over:.3f} = {computed / wanted:.3f} padding avoided x {over * wanted / computed:.3f}; {texts}; logits of random tokens differ by {apart:.1e} at most")
    return {"wanted_per_second": wanted / took, "computed_per_second": computed / took, "ours_over_theirs": over, "padding_avoided": computed / wanted, "differs": differs,
            "logits_apart": apart}


# ---- against the number of requests in flight

def crowd(cfgs, models, s, device, dtype, eot):
    """tokens/s at several numbers of requests in flight, four of the queue for each. What is fitted is the time of one token in every row."""
    batches, runs, plans = sorted(set(s.batches)), {}, {}
    for name, cfg in cfgs.items():
        for B in batches:
            plan = Plan(name, B, "baseline" if cfg.router == "none" else "a")
            plans[plan.title], lengths = plan, queue_of(s, cfgs, 4 * B)
            runs[plan.title] = serving(models[name], plan, lengths, s, device, eot)
    print_serving(cfgs, s, f"{', '.join(map(str, batches))} in flight, four requests for each of {s.length_mean:g} tokens on average", device, dtype)
    times, _ = interleave(runs, s.repeats, device)
    rows, fits, curves = [], {}, {}
    for title, plan in plans.items():
        rows.append({**serve_row(plan, cfgs[plan.config], [marks for _, marks in times[title]]), **runs[title].facts})
    table(rows, [("in flight", "in_flight", "", 1), ("core rows", "core_mean", ".1f", 1), ("tokens/s", "tokens_per_second", ",.0f", 1), ("spread", "spread", ",.0f", 1)])
    for name in cfgs:
        x, y = batches, [row["tokens_per_second"] for row in rows if row["config"] == name]
        fits[name] = found = line(x, [B / rate * 1e3 for B, rate in zip(x, y)])
        curves[name] = x, y, lambda B, found=found: B / (found["a_ms"] + found["b_ms"] * B) * 1e3
        print(f"{name}: ms for a token in each of B requests = {found['a_ms']:.3f} + {found['b_ms']:.3f} x B, R^2 {found['r2']:.4f}: {x[-1] / x[0]:g} times the requests, "
              f"{y[-1] / y[0]:.2f} times the tokens/s; the line's end is {1e3 / found['b_ms']:,.0f}")
    return {"rows": rows, "fits": fits, "exits": s.exits, "picture": draw_curves("serve", curves, "requests in flight", "tokens per second")}


# ---------------------------------------------------------------------------------------------------------------- counts

# How published.json names what can be counted, at the row's vocabulary: (config, its row) -> number.
OURS = {"n_params": lambda cfg, row: cfg.n_params(), "n_params_without_tables": lambda cfg, row: cfg.n_params(embeddings=False),
        "n_params_of_tables": lambda cfg, row: cfg.n_params() - cfg.n_params(embeddings=False),
        "flops_paper": lambda cfg, row: cfg.flops_per_token(cfg.block_size, "paper"),
        "flops_grt_per_block": lambda cfg, row: cfg.flops_per_token(cfg.block_size, "grt") / cfg.executed_blocks(),
        "kv+weights GiB": lambda cfg, row: 2 * cfg.n_params() + cfg.kv_bytes(row["seq_len"], row["batch_size"], torch.bfloat16, row["cache"])}
UNITS = {"parameters": 1, "steps": 1, "%": 1e-2, "M": 1e6, "MFLOP": 1e6, "B": 1e9, "1e18 FLOP": 1e18, "GiB": 2**30}


def published_rows(number=float):
    """The rows of config/published.json. number: what a value with a point becomes; a Decimal keeps the digits that were printed."""
    path = HERE / "config" / "published.json"
    return json.loads(path.read_text("utf-8"), parse_float=number)["rows"] if path.is_file() else []


def file_of(name):
    return HERE / "config" / f"{name}.py"


def system_of(row):
    """The settings that a row speaks of: its config with the flags that make another system of it."""
    return config.parse([str(file_of(row["config"])), *row.get("overrides", [])], [GPTConfig, TrainConfig], "")


def count(cfg, s):
    """{quantity: number} of one config, by arithmetic; a model is built without memory, to count its parameters."""
    T, D = tokens_of(cfg, s), depth_of(cfg, s)
    with torch.device("meta"):
        GPT(cfg).check_depth(D)
    bare, full = cfg.n_params(embeddings=False), cfg.n_params()
    row = {"parameters": full, "parameters without tables": bare, "blocks executed": cfg.executed_blocks(D),
           "blocks owned": cfg.n_prelude + cfg.n_core + cfg.n_coda}
    row |= {f"FLOPs per token, {name}": cfg.flops_per_token(T, name, D) for name in FLOPS}
    caches = [name for name in FOLDS if name == "full" or cfg.compressible and cfg.n_recur > 1]
    each = {name: cfg.kv_bytes(2, 1, torch.bfloat16, name, D) - cfg.kv_bytes(1, 1, torch.bfloat16, name, D) for name in caches}
    each["full"] = cfg.kv_bytes(T, 1, torch.bfloat16, "full", D) / T            # routed: a share, and no token is like another
    row |= {f"K/V bytes per token, cache {name}": each.get(name) for name in FOLDS}     # one more token; n/a: nothing to compress
    row["K/V entries read per new token"] = cfg.kv_io(T, depth=D)
    return row | {"weights MiB, float32": full * 4 / 2**20, "weights MiB, bfloat16": full * 2 / 2**20}


def counts(all_settings, cfgs):
    rows = {name: count(cfg, all_settings[name]) for name, cfg in cfgs.items()}
    first = next(iter(rows.values()))
    for row in rows.values():
        row["exact FLOPs, ratio to the first"] = row["FLOPs per token, exact"] / first["FLOPs per token, exact"]
    contexts = lambda one, cfg: f"context {tokens_of(cfg, one)}, vocabulary {cfg.vocab_size}"
    print(heading("counts", all_settings, cfgs, contexts, "one forward pass, K/V in bfloat16"))
    text = lambda x: "n/a" if x is None else f"{x:,.0f}" if x == int(x) else f"{x:,.3f}"
    show([["", *rows], *([quantity, *(text(row[quantity]) for row in rows.values())] for quantity in first)])
    published = compare_published(all_settings, cfgs)
    return {"rows": [{"name": name, **row} for name, row in rows.items()], "published": published}


def compare_published(all_settings, cfgs):
    """What the papers printed about the models at hand, beside what is counted here. Prints and returns the rows.
    A row is about its config with its overrides: flags that make another model of the config have rows of their own, or none."""
    found = []
    for row in published_rows():
        for name, cfg in cfgs.items():
            if row["config"] and row["value"] is not None and file_of(row["config"]) == Path(all_settings[name].files[-1]).resolve():
                theirs = system_of(row)
                if theirs.build(GPTConfig, vocab_size=cfg.vocab_size) == cfg:
                    at = theirs.build(GPTConfig, vocab_size=row.get("vocab_size", cfg.vocab_size))
                    mine = OURS[row["ours"]](at, row) / UNITS[row["unit"]] if row["ours"] in OURS else None
                    found.append({"name": name, **row, "counted": mine})
    if found:
        print("published, and counted here at the same vocabulary")
    for row in found:
        print(f"  {row['name']}: {row['quantity']} ({row['paper']}, {row['setting']}) {row['value']} {row['unit']}{verdict(row)}")
    return found


def verdict(row):
    if row["agrees"] is None:                                 # a loss, a time: nothing to count
        return ""
    number = "by tests/test_published.py" if row["counted"] is None else f"{row['counted']:,.10g}"
    return f", counted {number}: {'agrees' if row['agrees'] else 'does not agree'}"


# ----------------------------------------------------------------------------------------------------------------- table

# A paper's name, its convention of FLOPs and its vocabulary.
PAPERS = {"MoR": ("Mixture-of-Recursions", "paper", 49152), "GRT": ("Gated Recurrent Transformers", "grt", 50304), "Ouro": ("Ouro", "exact", 50304)}
BUDGET = 16.5e18                              # FLOPs of the forward passes of one isoFLOP run  [MoR]
# What a row's recipe gives beside its model: (settings, config, row) -> number.
OF_RECIPE = {"steps_paper": lambda s, cfg, row: BUDGET / (cfg.flops_per_token(cfg.block_size, "paper") * tokens_per_step(s)),
             "training_flops_paper": lambda s, cfg, row: cfg.flops_per_token(cfg.block_size, "paper") * tokens_per_step(s) * s.max_iters,
             "tokens": lambda s, cfg, row: tokens_per_step(s) * s.max_iters,
             "flops_grt_over": lambda s, cfg, row: grt_flops_of(cfg) / grt_flops_of(system_of({"config": row["against"]}).build(GPTConfig, vocab_size=1)) - 1}
count_once = functools.cache(GPTConfig.n_params)                               # a model stands in several tables
grt_flops_of = lambda cfg: cfg.flops_per_token(cfg.block_size, "grt")  # noqa: E731
TRAINING = "`python train.py {}`"
SERVED = "`python bench.py serve config/{}.py config/{}.py --paper=true`"
# What a row's command is, by how its setting and its system begin; else a training run.
COMMANDS = {("decode memory", ""): "`python bench.py counts {}`",
            ("latency", ""): "`python bench.py decode {} --paper=true`",
            ("dynamics", "GRT at depth"): "`python train.py {} && python eval.py depth --out_dir=out/grt_large`",
            ("dynamics", "GRT, gate forced"): "`python train.py {} && python eval.py depth --out_dir=out/grt_large`",
            ("dynamics", "GRT, "): "`python train.py {} && python eval.py steps gate --out_dir=out/grt_large`",
            ("throughput", "MoR-2"): SERVED.format("smollm/vanilla_360m", "bench/mor2_360m"),
            ("throughput", "MoR-3"): SERVED.format("smollm/vanilla_360m", "mor_360m"),
            ("throughput", "MoR-4"): SERVED.format("bench/vanilla_34_360m", "bench/mor4_360m")}
PROPERTIES = {"depth of its own per token in training": lambda cfg: cfg.router != "none",
              "leaves early while decoding: as predictions settle (exit=kl)": lambda cfg: accepts(cfg, lambda model: model.check_exit("kl", None)),
              "leaves early while decoding: by an exit gate (exit=cdf)": lambda cfg: accepts(cfg, lambda model: model.check_exit("cdf", None)),
              "input read at every step": lambda cfg: cfg.update != "replace",
              "gate": lambda cfg: cfg.update == "gate",
              "noise in training": lambda cfg: cfg.state_noise > 0 or cfg.gate_noise > 0,
              "random depth in training": lambda cfg: cfg.depth_sampling != "fixed",
              "every step supervised": lambda cfg: cfg.loss == "every",
              "weights change with the step": lambda cfg: cfg.lora_rank > 0 or not cfg.any_depth,
              "runs deeper than trained": lambda cfg: cfg.n_recur > 1 and accepts(cfg, lambda model: model.check_depth(cfg.n_recur + 1)),
              "plain cache: all tokens at every step": lambda cfg: cfg.router == "none",
              "one K and V for all steps while decoding": lambda cfg: cfg.n_recur > 1 and cfg.compressible}
COLUMNS = ("system", "command", "layout", "parameters", "tokens", "MFLOP per token, exact", "by the paper's formula", "published", "agrees", "note")
OPENING = """# The papers' tables, row by row

Made by `python bench.py table` from the configs and config/published.json; a test makes it again and compares. A command trains the row's
model (give it an --out_dir, and --dataset), which ends in its validation loss. Loss by depth, decode memory, latency and throughput have the command
that measures them, and a row that nothing here measures says *none* and why; few-shot accuracy nothing measures, router accuracy `eval.py router`. Parameters, and FLOPs of one forward pass per token at the config's context, are computed
here at the paper's vocabulary: MoR 49,152, GRT 50,304. *agrees* compares, at the digits that were printed, what follows from a config alone;
a loss, an accuracy or a time only a run can tell (n.a.). *Not at hand*: the paper has such a row, and its number could not be read for this
table. What a note calls ours the paper does not say.

FLOPs per token, d wide, context S, f the MLP's width; a multiplication and an addition are two. *Exact* is every matrix product that is run:
causal attention (S/2 keys a query on average), keys and values at their own width, router, adapter and gate, and the head, 2 d vocabulary.
- MoR's formula: a block 2 (2 d² + 2 d² + 3 d f) + 2 d m, times the share of tokens that takes its step, m = the tokens that take it (kv=share: S).
  Neither head nor router, and K and V as wide as queries: MoR-3 at 360M is 555.63; less 54 for K and V, plus 94 for the head, 595.83 exact.
- GRT's formula: a block 24 d² + 4 S d, every pair of tokens, plus 10 d² a step for adapter and gate (adapter alone: 4 d²). No head, and no
  capacities, as if every token took every step: MoR at Small is 207.62 like its dense twin; 192.58 exact, causal, with the head.
"""


def tokens_per_step(s):
    return s.batch_size * s.gradient_accumulation_steps * s.block_size


def accepts(cfg, check):
    """Whether one of the model's own checks lets it pass."""
    with torch.device("meta"):
        model = GPT(cfg).eval()
    try:
        check(model)
        return True
    except ValueError:
        return False


def agrees(number, value):
    """Whether a number, rounded to as many digits as `value` was printed with, is `value`."""
    return Decimal(number).quantize(Decimal(value)) == value


def command_of(row):
    if not row["config"]:
        return "none: this model is not here"
    starts = lambda place: row["setting"].startswith(place[0]) and row["system"].startswith(place[1])
    words = next((words for place, words in COMMANDS.items() if starts(place)), TRAINING)
    return words.format(" ".join([f"config/{row['config']}.py", *row.get("overrides", [])]))


def judge(row, s, vocab_size):
    """One published number beside ours: (its words, whether the two agree, None where nothing can be counted, and that in words)."""
    unit = "" if row["unit"] in ("1", "parameters", "steps") else f" {row['unit']}"
    said = f"{row['quantity']} " + ("not at hand" if row["value"] is None else f"{row['value']}{unit}")
    if not row["ours"]:
        return said, None, ""
    cfg = s.build(GPTConfig, vocab_size=row.get("vocab_size", vocab_size))
    number = (OURS[row["ours"]](cfg, row) if row["ours"] in OURS else OF_RECIPE[row["ours"]](s, cfg, row)) / UNITS[row["unit"]]
    holds = agrees(number, row["value"])
    return said, holds, f"{row['quantity']}: {'yes' if holds else f'no, {number:,.7g} here'}"


def system_line(rows):
    """(the cells of one system of a table, the verdict on each of its numbers)."""
    row, (_, convention, vocab_size) = rows[0], PAPERS[rows[0]["paper"]]
    s, command, counted = row["config"] and system_of(row), command_of(row), ["", "", "", "", ""]
    if s:
        cfg = s.build(GPTConfig, vocab_size=vocab_size)
        flops = [cfg.flops_per_token(cfg.block_size, name) / 1e6 for name in ("exact", convention)]
        tokens = "" if "bench.py" in command else f"{tokens_per_step(s) * s.max_iters / 1e9:.2f}B"                # bench.py trains nothing
        counted = [cfg.layout, f"{count_once(cfg):,}", tokens, *(f"{x:,.2f}" for x in flops)]
    said, verdicts, words = zip(*(judge(row, s, vocab_size) for row in rows))
    notes = dict.fromkeys(row["note"] for row in rows if row.get("note"))
    return [row["system"], command, *counted, "; ".join(said), "; ".join(filter(None, words)) or "n.a.", "; ".join(notes)], verdicts


BAR = r"\|"                                    # a bar inside a cell


def piped(cells):
    """A line of a markdown table."""
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def markdown(cells):
    head, *lines = map(piped, cells)
    return "\n".join([head, "|" + "---|" * len(cells[0]), *lines]) + "\n"


def property_lines(rows):
    """Which system has what, read off the configs of one table, and of ours that has a router and a gate."""
    systems = {row["system"]: row for row in rows} | {"GRT with a router (ours)": {"config": "grt_mor_tiny"}}
    cfgs = {name: system_of(row).build(GPTConfig, vocab_size=50304) for name, row in systems.items()}
    return [["", *cfgs], *([name, *("yes" if has(cfg) else "no" for cfg in cfgs.values())] for name, has in PROPERTIES.items())]


def published_table():
    """(the text of PUBLISHED.md, {what: how many})."""
    tables, parts, tally = {}, [], dict.fromkeys(("tables", "rows", "agree", "do not agree", "only a run can tell", "not at hand"), 0)
    for row in published_rows(Decimal):
        system = row["system"], row["config"], tuple(row.get("overrides", []))
        tables.setdefault((row["paper"], row["setting"]), {}).setdefault(system, []).append(row)
    for (paper, setting), systems in tables.items():
        lines = [COLUMNS]
        for rows in systems.values():
            cells, verdicts = system_line(rows)
            lines.append(cells)
            for row, holds in zip(rows, verdicts):
                tally["not at hand" if row["value"] is None else {True: "agree", False: "do not agree", None: "only a run can tell"}[holds]] += 1
        tally["tables"], tally["rows"] = tally["tables"] + 1, tally["rows"] + len(systems)
        parts.append(f"## {PAPERS[paper][0]}: {setting}\n\n{markdown(lines)}")
    small = [rows[0] for rows in tables["GRT", "isoFLOP, Small"].values()]
    parts.append(f"## {PAPERS['GRT'][0]}: design properties\n\nRead off the configs of the isoFLOP table at Small.\n\n{markdown(property_lines(small))}")
    return "\n".join([OPENING, said_of(tally) + "\n", *parts]), tally


def said_of(tally):
    tables, rows, *verdicts = (f"{n} {what}" for what, n in tally.items())
    return f"{tables}, {rows}; of the numbers {', '.join(verdicts)}."


def publish(all_settings, cfgs):
    (s,) = all_settings.values()
    text, tally = published_table()
    path = Path(s.to or "PUBLISHED.md")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another file, --to=FILE")
    print(f"table: {path}: {said_of(tally)}")
    return tally


# ---------------------------------------------------------------------------------------------------------------- ladder

# Keys that say where and how a run is done, or how often it is looked at; all the others decide what comes out.
ELSEWHERE = ("out_dir", "data_dir", "init_from", "cooldown_from", "device", "compile", "parallel", "tensorboard", "checkpoint_activations",
             "fused_loss", "eval_interval", "log_interval", "keep_interval", "sample_tokens")
OF_A_MACHINE = ("data", "vocab_size", "dtype")                # of what decides, that which follows from data and device


class Trial(NamedTuple):
    """One run of a ladder: a config at one seed."""
    ladder: str                           # the folder of the config
    rung: str                             # its file
    argv: list                            # for train.py: config, flags, seed
    flags: list                           # those of them that stand in the record
    settings: config.Settings             # as train.py will read them
    decides: dict                         # everything that decides the result
    home: Path                            # folder of the run

    @property
    def name(self):
        return f"{self.ladder}/{self.rung} seed {self.settings.seed}"

    @property
    def log(self):
        return self.home / "log.jsonl"


def ladder(all_settings, cfgs):
    """Train what is not recorded yet; then a table for each ladder, that is, for each folder of configs."""
    s = next(iter(all_settings.values()))
    check_ladder(all_settings)
    results, root = Path(s.results or HERE / "config" / "ladder" / "results.jsonl"), Path(s.out_dir or "out/ladder")
    trials, records = trials_of(all_settings, root, data_needed=s.jobs > 0), read_results(results)
    missing = [trial for trial in trials if s.jobs and not recorded(trial, records)]
    failed, found = train_trials(in_order(missing, s.seeds), s, results), {}
    for name in dict.fromkeys(trial.ladder for trial in trials):
        found[name] = report_ladder(name, [trial for trial in trials if trial.ladder == name], read_results(results), s, root)
    return {"ladders": found, "seeds": s.seeds, "failed": failed}


def report_ladder(name, trials, records, s, root):
    """The table of one ladder on stdout; table, record and picture beside the runs. Returns the record."""
    rows = [row_of(rung, [(t.settings.seed, recorded(t, records, s.jobs == 0)) for t in trials if t.rung == rung]) for rung in dict.fromkeys(t.rung for t in trials)]
    text = "\n".join(heading_of(" ".join([name, *trials[0].flags]), rows, s) + ladder_lines(rows) + pair_lines(pairs_of(rows))) + "\n"
    print(text)
    record = {"flags": trials[0].flags, "rows": rows, "pairs": pairs_of(rows)}
    path = root / f"{name}-{trials[0].settings.dataset}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out_dir={str(root)!r} cannot be written ({error.strerror}); choose another with --out_dir=")
    for suffix, content in ((".md", text), (".json", json.dumps(record, indent=1) + "\n")):
        write_whole(path.with_name(path.name + suffix), lambda file: file.write(content.encode("utf-8")))
    draw_ladder(path.with_name(path.name + ".png"), f"{name} on {trials[0].settings.dataset}", [row for row in rows if row["val_loss"]])
    return record


def in_order(trials, seeds):
    """Seed by seed: whenever it is stopped, whole ladders are there to compare. Equal rungs of two ladders are one run."""
    once = {}
    for trial in sorted(trials, key=lambda trial: seeds.index(trial.settings.seed)):
        once.setdefault(trial.home, trial)
    return list(once.values())


def check_ladder(all_settings):
    s = next(iter(all_settings.values()))
    if s.origins["seed"] == "command line":
        raise UserError(f"command line: seed={s.seed} is one of a ladder's seeds; write --seeds={s.seed}")
    if not s.seeds or len(set(s.seeds)) < len(s.seeds) or min(s.seeds) < 0:
        raise UserError(f"{s.origins['seeds']}: seeds={s.seeds} is not a list of different numbers from 0 on; write --seeds=1,2,3")
    files = [Path(one.files[-1]).resolve() for one in all_settings.values()]
    for path in files:
        if files.count(path) > 1:
            raise UserError(f"{path.name} is named twice; a rung stands once in a ladder")
    for one in all_settings.values():
        for name, scratch in (("init_from", "scratch"), ("cooldown_from", None)):
            if one.values[name] != scratch:
                raise UserError(f"{one.origins[name]}: {name}={one.values[name]!r}, but every run of a ladder begins from scratch (and is resumed by "
                                f"itself); leave it out")


def trials_of(all_settings, root, data_needed):
    """Every run of the ladder, rung by rung. Data are looked at, and stdlib is made, before anything starts."""
    trials = []
    for one in all_settings.values():
        path = Path(one.files[-1]).resolve()
        given = {name: one.values[name] for name in GPTConfig.__dataclass_fields__ | TrainConfig.__dataclass_fields__
                 if one.origins[name] == "command line" and name != "out_dir"}
        flags, shown = ([f"--{name}={value}" for name, value in given.items() if name not in hidden] for hidden in ((), ELSEWHERE))
        for seed in one.seeds:
            settings = parse_training([one.files[-1], *flags, f"--seed={seed}"])
            decides = {name: value for name, value in settings.values.items() if name not in ELSEWHERE}
            if data_needed:
                decides |= of_this_machine(settings)
            home = root / f"{path.parent.name}-{path.stem}-seed{seed}-{fingerprint(decides)}"
            others = sorted(root.glob(f"*-seed{seed}-{fingerprint(decides)}"))                   # the same run, begun on another ladder
            trials.append(Trial(path.parent.name, path.stem, [one.files[-1], *flags, f"--seed={seed}"], shown, settings, decides,
                                others[0] if others else home))
    homes = {}                                                # equal rungs of two ladders are one run, in one folder
    return [trial._replace(home=homes.setdefault(fingerprint(trial.decides), trial.home)) for trial in trials]


def of_this_machine(settings):
    """What the data and the device add to that which decides a result."""
    with contextlib.redirect_stdout(sys.stderr):
        make_default_data(settings)
    meta = prepare.load_meta(settings.data_dir, settings.dataset)
    return {"vocab_size": padded_vocab(settings.vocab_size, meta), "dtype": pick_device(settings)[1],
            "data": {"tokenizer": meta["fingerprint"], **{split: meta[split]["sha256"] for split in prepare.SPLITS}}}


def fingerprint(decides):
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]


# ---- the file of results


def read_results(path):
    """The records of a file of JSON lines; a line that a kill cut short is no record."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"results={str(path)!r} cannot be read ({getattr(error, 'strerror', error)}); choose another file with --results=")
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"commit", "torch"} <= set(record) and all(isinstance(record.get(part), dict) for part in ("settings", "results")):
                records += [record] * isinstance(record["results"].get("val_loss"), (int, float))        # null: no result
    return records


def append_result(path, record=None):
    """One more line (None: only what a kill left). What is there is never rewritten: a line that was cut short is closed and stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
            if record:
                file.write(json.dumps(record).encode() + b"\n")                  # one write: lines of two ladders at work do not mix
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"results={str(path)!r} cannot be written ({error.strerror}); choose another file with --results=; the run is kept in its folder")


def recorded(trial, records, anywhere=False):
    """The newest record of this run, or None. anywhere: whatever the machine and its copy of the data set (stdlib is another with each Python).
    A key younger than a record stood at its default then."""
    hidden, found = OF_A_MACHINE if anywhere else (), None
    for record in records:
        then = {**DEFAULTS, **record["settings"]}
        if all(then.get(name) == trial.decides.get(name) for name in (then | trial.decides) if name not in hidden):
            found = record
    return found


DEFAULTS = {name: value for name, value in config.parse([], [GPTConfig, TrainConfig], "").values.items() if name not in ELSEWHERE}


# ---- the runs


def train_trials(trials, s, results):
    """Train, s.jobs at a time, and record each run as it ends. Returns {name: why} of those that failed. A run that another process has,
    of a ladder beside this one or of one that was killed, is waited for. After Ctrl-C every run finishes its step and saves."""
    append_result(results)                                    # a file that cannot be written is found before anything is trained
    waiting, running, failed, held, told = [trial for trial in trials if not (trial.home.is_dir() and ended(trial, results))], {}, {}, set(), False
    if waiting:
        print(f"{len(waiting)} runs to train, {s.jobs} at a time", file=sys.stderr)
    with CtrlC() as ctrl_c, on_sigterm(ctrl_c.ask):
        while running or (waiting and not ctrl_c.asked):
            for trial in waiting[:]:
                if len(running) < s.jobs and not ctrl_c.asked:
                    try:
                        done = ended(trial, results)          # looked at just before it begins: another ladder may have trained it
                        if done is None:
                            tell_held(trial, held)
                            continue
                        if not done:
                            running[begin(trial, s.threads)] = trial
                    except UserError as error:
                        failed[trial.name] = str(error)
                    waiting.remove(trial)
            if ctrl_c.asked and not told:
                told = [process.send_signal(signal.SIGINT) for process in running]
            for process in [process for process in running if process.poll() is not None]:
                trial = running.pop(process)
                done = ended(trial, results)
                if done is None:
                    waiting.append(trial)                     # another ladder began it in the same second
                elif not done and not ctrl_c.asked:
                    failed[trial.name] = why_it_ended(trial, process.returncode)
                    print(f"{trial.name} failed: {failed[trial.name]}", file=sys.stderr)
            time.sleep(0.1 if running or waiting else 0)
    if ctrl_c.asked:
        print("stopped; the same command goes on where the runs are", file=sys.stderr)
        raise KeyboardInterrupt
    return failed


@contextlib.contextmanager
def on_sigterm(do):
    """SIGTERM is what `timeout` sends: it stops a ladder as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, do)
    yield
    signal.signal(signal.SIGTERM, before)


def ended(trial, results):
    """Whether a run is recorded; at its last step it is so here, once, whoever trained it. None: another process has its folder."""
    lock = hold(trial.home)
    if lock is None:
        return None
    with lock:
        if recorded(trial, read_results(results)):
            return True
        record = harvest(trial)
        if record:
            append_result(results, record)
            print(f"{trial.name}: {record['results']['val_loss']:.4f} nats/token, {human(record['results']['seconds'])}", file=sys.stderr)
        return record is not None


def tell_held(trial, held):
    if trial.home not in held:
        held.add(trial.home)
        print(f"{trial.name}: another process is training in {trial.home}; its turn comes when that ends, and Ctrl-C ends the wait", file=sys.stderr)


def begin(trial, threads):
    """The process that trains a run: from its checkpoint if it has one."""
    lock = hold(trial.home)
    if lock is None:
        raise UserError(f"another process is training in {trial.home}; wait for it, then run this again")
    with lock:
        goes_on = (trial.home / "ckpt.pt").is_file()
        if not goes_on:
            trial.log.unlink(missing_ok=True)                 # killed before its first checkpoint: train.py would avoid the folder
    argv = [sys.executable, str(HERE / "train.py"), *trial.argv, f"--out_dir={trial.home}", "--sample_tokens=0", *["--init_from=resume"] * goes_on]
    print(f"{trial.name}: {'goes on' if goes_on else 'begins'} in {trial.home}", file=sys.stderr)
    with open(trial.home / "output.txt", "ab") as output:     # a session of its own: Ctrl-C reaches it through us alone, once
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"})


def why_it_ended(trial, code):
    """The last line that a failed run said."""
    with contextlib.suppress(OSError):
        lines = [line for line in (trial.home / "output.txt").read_text("utf-8", "replace").splitlines() if line.strip()]
        return f"exit code {code}: {lines[-1].strip()}" if lines and code >= 0 else f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def harvest(trial):
    """The record of a finished run; None where it has not come to its last step."""
    events = {kind: [] for kind in ("start", "step", "eval")}
    for event in log_events(trial.log):
        events.get(event["event"], []).append(event)
    s, last = trial.settings, events["eval"][-1] if events["eval"] else {"step": -1}
    if last["step"] < s.max_iters:
        return None
    made, commits = events["start"][-1], dict.fromkeys(event["commit"] for event in events["start"])             # several: resumed by newer code
    cfg = s.build(GPTConfig, vocab_size=trial.decides["vocab_size"], block_size=made["settings"]["block_size"])   # a row of a synthetic set is shorter
    return {"ladder": trial.ladder, "config": trial.rung, "seed": s.seed, "flags": trial.flags,
            "fingerprint": fingerprint(trial.decides), "commit": ",".join(commits), "torch": made["torch"], "python": made["python"],
            "date": datetime.date.today().isoformat(),
            "results": {**{name: value for name, value in last.items() if name != "event"}, "layout": cfg.layout, "parameters": cfg.n_params(),
                        "blocks_executed": cfg.executed_blocks(), "training_flops": training_flops(cfg, s), "seconds": seconds_of(events["step"])},
            "settings": trial.decides}


def log_events(path):
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):                 # a kill may have cut the last line short
            yield json.loads(line)


def seconds_of(steps):
    """Seconds of training by the log: of a step that a resumed run took again, the second time counts."""
    took, seconds, before = {event["step"]: event["ms_per_update"] / 1e3 for event in steps}, 0.0, 0
    for step, each in sorted(took.items()):
        seconds, before = seconds + each * (step - before), step
    return seconds


def training_flops(cfg, s):
    """Exact FLOPs of the whole run: the depths are drawn again, as training drew them. Backward is two forwards, through as many steps as it
    reaches; routed models at their capacities."""
    draw, forward = DEPTHS[cfg.depth_sampling], functools.cache(lambda depth: cfg.train_flops_per_token(cfg.block_size, depth))
    depths = Counter(draw(cfg, generator(fold_in(s.seed, "shared", step, i))) for step in range(s.max_iters) for i in range(s.gradient_accumulation_steps))
    return s.batch_size * cfg.block_size * sum(n * (forward(depth) + 2 * forward(min(depth, cfg.bptt or depth))) for depth, n in depths.items())


# ---- the table


def spread(values):
    """Mean and standard deviation (n - 1; None of one value) of the values that are there; None of none."""
    values = [value for value in values if value is not None]
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None, "values": values} if values else None


def row_of(rung, found):
    """The row of a rung. found: (seed, its record or None)."""
    records = [record for _, record in found if record]
    each = [record["results"] for record in records]
    of = lambda name: spread([result.get(name) for result in each])  # noqa: E731
    inside = lambda name: {key: spread([result.get(name, {}).get(key) for result in each]) for key in sorted({  # noqa: E731
        key for result in each for key in result.get(name, {})}, key=natural)}
    row = {"name": rung, "seeds": [seed for seed, record in found if record], "missing": [seed for seed, record in found if not record]}
    row |= {name: each[0][name] if each else None for name in ("layout", "parameters", "blocks_executed", "step")}
    row["blocks_average"] = spread([blocks_passed(record) for record in records])
    row |= {name: of(name) for name in ("training_flops", "seconds", "val_loss", "bits_per_byte", "accuracy")}
    row |= {"by_depth": inside("by_depth"), "accuracy_by_group": inside("accuracy_by_group")}
    row |= {name: sorted({record[name] for record in records}) for name in ("commit", "torch")}
    return row | {"data": sorted({json.dumps(record["settings"].get("data"), sort_keys=True) for record in records})}


def blocks_passed(record):
    """Blocks that a token passed on average when the validation loss was measured; None without a router: all of them."""
    depth, s = record["results"].get("mean_depth"), DEFAULTS | record["settings"]
    return None if depth is None else s["n_prelude"] + s["n_core"] * depth + s["n_coda"]


def natural(key):
    """Groups sort as numbers where they begin with one."""
    number = re.match(r"\d+", key)
    return (0, int(number[0]), key) if number else (1, 0, key)


def difference(a, b):
    """b - a, its standard error from the pooled variance, and whether it is clear of chance; None: one seed makes no claim."""
    if not a or not b or a["sd"] is None or b["sd"] is None:
        return None
    n, m = len(a["values"]), len(b["values"])
    pooled = ((n - 1) * a["sd"] ** 2 + (m - 1) * b["sd"] ** 2) / (n + m - 2)
    value, error = b["mean"] - a["mean"], math.sqrt(pooled * (1 / n + 1 / m))
    return {"value": value, "standard_error": error, "separated": abs(value) > 2 * error}


def pairs_of(rows):
    """Each rung against the one before it, and against the first."""
    places = [(i - 1, i) for i in range(1, len(rows))] + [(0, i) for i in range(2, len(rows))]
    return [{"from": rows[i]["name"], "to": rows[j]["name"], **{name: difference(rows[i][name], rows[j][name]) for name in ("val_loss", "accuracy")
                                                                if name == "val_loss" or (rows[i][name] and rows[j][name])}} for i, j in places]


FORMULA = ("difference ± standard error s √(1/n + 1/m), s² = ((n - 1) s_a² + (m - 1) s_b²) / (n + m - 2); "
           "not separated: under two standard errors")


def with_spread(x, form):
    return "" if x is None else format(x["mean"], form) + ("" if x["sd"] is None else f" ± {format(x['sd'], form).lstrip('0')}")


def heading_of(name, rows, s):
    several = [f"note: the runs of this table are of {len(data)} different data sets; train them anew for one comparison"
               for data in [{word for row in rows for word in row["data"]}] if len(data) > 1]
    commits, versions = (", ".join(sorted({word for row in rows for word in row[name]})) or "none" for name in ("commit", "torch"))
    return [f"ladder {name}: seeds {', '.join(map(str, s.seeds))}; validation loss at full depth, ± standard deviation over seeds; torch {versions}, commit {commits}",
            *several, ""]


def ladder_lines(rows):
    """A table, and a second one by group where there are groups."""
    loops = [row for row in rows if len(row["by_depth"]) > 1]
    depths = sorted({depth for row in loops for depth in row["by_depth"]}, key=natural)
    accuracy, n = any(row["accuracy"] for row in rows), max(len(row["seeds"]) for row in rows)
    head = ["config", "layout", "parameters", "blocks", "training TFLOP", "steps", "seconds", "nats/token", "bits/byte", *["accuracy"] * accuracy,
            *(f"depth {depth}" for depth in depths), *["seeds"] * any(len(row["seeds"]) < n or row["missing"] for row in rows)]
    count = lambda x: "" if x is None else f"{x:,}"  # noqa: E731
    body = [[f"`{row['name']}`", row["layout"] or "not trained", count(row["parameters"]),
             f"{row['blocks_average']['mean']:.1f} of {row['blocks_executed']}" if row["blocks_average"] else count(row["blocks_executed"]),
             "" if row["training_flops"] is None else f"{row['training_flops']['mean'] / 1e12:,.4g}", count(row["step"]),
             "" if row["seconds"] is None else f"{row['seconds']['mean']:,.0f}", with_spread(row["val_loss"], ".4f"),
             with_spread(row["bits_per_byte"], ".4f"), *[with_spread(row["accuracy"], ".3f")] * accuracy,
             *(with_spread(row["by_depth"].get(depth) if row in loops else None, ".4f") for depth in depths), ", ".join(map(str, row["seeds"])) or "none"] for row in rows]
    lines = pipes(head, [cells[: len(head)] for cells in body])
    groups = sorted({group for row in rows for group in row["accuracy_by_group"]}, key=natural)
    if groups:
        lines += ["", "accuracy on answers, by group", "", *pipes(["config", *groups], [
            [f"`{row['name']}`", *(with_spread(row["accuracy_by_group"].get(group), ".3f") for group in groups)] for row in rows])]
    return lines


def pipes(head, rows):
    return [piped(cells) for cells in (head, ["---"] * len(head), *rows)]


def pair_lines(pairs):
    """What differs from what, in nats and where there is one in accuracy."""
    def say(found):
        if found is None:
            return "fewer than two seeds: no claim"
        return f"{found['value']:+.4f} ± {found['standard_error']:.4f}" + ("" if found["separated"] else ", not separated")
    accuracy = any("accuracy" in pair for pair in pairs)
    return ["", *pipes(["from", "to", "nats/token", *["accuracy"] * accuracy], [
        [f"`{pair['from']}`", f"`{pair['to']}`", say(pair["val_loss"]), *[say(pair["accuracy"]) if "accuracy" in pair else ""] * accuracy]
        for pair in pairs]), "", FORMULA] if pairs else []


def draw_groups(axes, rows, colors):
    """What a task is about: right answers, by how much depth they ask for."""
    groups = sorted({group for row in rows for group in row["accuracy_by_group"]}, key=natural)
    for row in rows:
        there = [place for place, group in enumerate(groups) if row["accuracy_by_group"].get(group)]
        axes.plot(there, [row["accuracy_by_group"][groups[place]]["mean"] for place in there], marker="o", color=colors[row["name"]], label=row["name"])
    axes.set_xticks(range(len(groups)), groups, rotation=30 * (len(groups) > 6))
    axes.set(ylabel="share of right answers", title="accuracy by group, mean over seeds")


def draw_depths(axes, rows, colors):
    for row in rows:
        if len(row["by_depth"]) > 1:
            axes.plot([int(depth) for depth in row["by_depth"]], [each["mean"] for each in row["by_depth"].values()], marker="o",
                      color=colors[row["name"]], label=row["name"])
    axes.set(xlabel="depth", ylabel="nats per token", title="loss by depth, mean over seeds")


def draw_ladder(path, name, rows):
    """Loss of each rung, every seed a dot, its mean a bar; beside it accuracy by group and loss by depth, where there are any. A rung
    keeps its colour."""
    from eval import new_figure                               # here: eval.py takes its clock from this file
    deep, asked = ([row for row in rows if len(row[name]) > least] for name, least in (("by_depth", 1), ("accuracy_by_group", 0)))
    panels = [draw for draw, drawn in ((draw_groups, asked), (draw_depths, deep)) if drawn]
    if (figure := new_figure(6 + 5 * len(panels), 1.2 + 0.45 * max(5, len(rows)))) is None or not rows:
        return
    left, *right = figure.subplots(1, 1 + len(panels), squeeze=False)[0]
    colors = {row["name"]: f"C{place}" for place, row in enumerate(rows)}
    for place, row in enumerate(rows):
        values = row["val_loss"]["values"]
        left.plot(values, [place] * len(values), "o", color=colors[row["name"]], alpha=0.6)
        left.plot(row["val_loss"]["mean"], place, "|", color="black", markersize=16)
    left.set_yticks(range(len(rows)), [row["name"] for row in rows])
    left.invert_yaxis()
    left.set(xlabel="validation loss at full depth, nats per token", title=f"{name}: each seed a dot, the mean a bar")
    for axes, draw in zip(right, panels):
        draw(axes, rows, colors)
        axes.legend(fontsize=8)
    for axes in (left, *right):
        axes.grid(alpha=0.3)
    if draw_depths in panels:
        from matplotlib.ticker import MaxNLocator
        right[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
    print(f"picture: {path}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------------ main

RATIOS = [("time", "time_ratio", ".3f", 1), ("FLOPs", "flops_ratio", ".3f", 1), ("time/FLOPs", "time_over_flops", ".3f", 1)]
MODES = {"table": publish, "ladder": ladder, "counts": counts, "train": train, "generate": generate, "decode": decode, "steps": steps, "serve": serve}
# Keys of this script that mean something to a mode; the model's and train.py's go with every mode. steps says why it takes no depth and no cache.
KEYS = {"table": ["to"], "ladder": ["seeds", "jobs", "results", "threads"], "counts": ["seq_len", "depth", "threads"],
        "train": ["repeats", "seq_len", "depth", "against", "threads"],
        "generate": ["repeats", "depth", "prompt_tokens", "new_tokens", "cache", "threads"],
        "decode": ["repeats", "depth", "prompt_tokens", "new_tokens", "cache", "threads", "fixed", "paper", "contexts"],
        "steps": ["repeats", "depth", "prompt_tokens", "new_tokens", "cache", "threads"],
        "serve": ["repeats", "against", "threads", "paper", "slots", "requests", "length_mean", "length_std", "warmup", "finish_rows", "rows", "exits", "run", "unwritten",
                  "batches"]}
# A curve that stands in place of a mode's table, and what the table alone knows.
CURVES = {"batches": ("slots", "requests", "finish_rows", "rows", "against", "unwritten"), "contexts": ("prompt_tokens", "fixed")}
# (mode, --paper): what a key is where the command line says nothing, in place of a training run's; and the configs where none is named.
SHAPES = {("decode", False): dict(batch_size=4, prompt_tokens=128, new_tokens=64), ("serve", False): dict(repeats=3),
          ("decode", True): dict(batch_size=4, prompt_tokens=1024, new_tokens=128, block_size=1152, vocab_size=50304),
          ("serve", True): dict(repeats=3, requests=1000, length_mean=256.0, length_std=64.0, vocab_size=49152, unwritten=True)}
FILES = {("decode", False): ["bench/gpt_12", "bench/grt_12"], ("serve", False): ["bench/vanilla_14", "bench/mor3_14"],
         ("decode", True): ["gpt2_medium", "grt_medium", "gpt2_large", "grt_large"],
         ("serve", True): ["smollm/vanilla_360m", "bench/mor2_360m", "mor_360m", "bench/vanilla_34_360m", "bench/mor4_360m"]}


def table(rows, columns):
    """A line per row. columns: (title, key, format, factor); None is n/a."""
    text = lambda x, form, factor: "n/a" if x is None else format(x * factor, form)
    show([["", *(title for title, *_ in columns)],
          *([row["name"], *(text(row[name], form, factor) for _, name, form, factor in columns)] for row in rows)])


def show(cells):
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *rest in cells:
        print("  ".join([f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:]))]))


def depth_of(cfg, s):
    return cfg.n_recur if s.depth is None else s.depth


def tokens_of(cfg, s):
    T = s.seq_len or cfg.block_size
    if T > cfg.block_size:
        raise ValueError(f"seq_len={T} is more than block_size={cfg.block_size}")
    return T


def heading(mode, all_settings, cfgs, details, machine):
    return (f"{mode}: {', '.join(f'{name} {cfg.layout} ({details(all_settings[name], cfg)})' for name, cfg in cfgs.items())}; {machine}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}, commit {commit()}")


def check_keys(mode, s):
    """Refuse a key of this script that means something to other modes alone."""
    for name in BenchConfig.__dataclass_fields__:
        if s.origins[name] == "command line" and name not in KEYS[mode] and name not in TrainConfig.__dataclass_fields__ | GPTConfig.__dataclass_fields__:
            modes = " or ".join(other for other, names in KEYS.items() if name in names)
            raise UserError(f"command line: {name}={s.values[name]} has no part in a {mode} run, it goes with mode {modes}; leave it out")
    for curve, names in CURVES.items():
        for name in names:
            if s.values[curve] and s.origins[name] == "command line":
                raise UserError(f"command line: {name}={s.values[name]} has no part in a curve over {curve}; leave one of the two out")


def settings_of(argv):
    """(mode, one Settings for each config file, each with the same flags)."""
    schema, words = [GPTConfig, TrainConfig, BenchConfig], "MODE (" + " or ".join(MODES) + ")"
    s = config.parse(argv, schema, __doc__, words=words)
    mode, folders = s.words[:1], [word for word in s.words[1:] if Path(word).is_dir()]
    if strange := [word for word in s.words[1:] if word not in [*folders, *MODES] and mode[0] in MODES]:
        hint = near_path(strange[0], [*shipped(), *map(os.path.dirname, shipped())])
        raise UserError(f"bench.py {mode[0]}: {strange[0]!r} is neither a config file (.py) nor a folder of them{hint}")
    if len(s.words) != 1 + len(folders) or mode[0] not in MODES:
        raise UserError(f"bench.py takes one mode, {' or '.join(MODES)}, got {' '.join(s.words) or 'none'}; the rest are config files and folders of them")
    files = [path for arg in argv if arg in s.files + folders for path in (configs_in(arg) if arg in folders else [arg])]
    if mode == ["table"]:
        given = s.files + folders + [f"--{name}" for name, origin in s.origins.items() if origin == "command line" and name != "to"]
        if given:
            raise UserError(f"bench.py table takes its configs from config/published.json, and --to; leave out {' '.join(given)}")
        return "table", {"table": s}
    check_keys(mode[0], s)
    if s.run:
        return mode[0], {"": shaped(mode[0], check_run(s))}
    files = files or [str(file_of(name)) for name in FILES.get((mode[0], s.paper), [])]
    if not files:
        raise UserError(f"bench.py {mode[0]} needs config files, for example config/{'ladder/rivals' if mode == ['ladder'] else 'grt_tiny.py'}")
    flags, all_settings = [arg for arg in argv if arg not in s.files], {}
    for path in files:
        name = Path(path).stem
        while name in all_settings:                           # a config beside itself shows how much the machine varies
            name += "'"
        all_settings[name] = shaped(mode[0], config.parse([*flags, path], schema, __doc__, words=words))
    return mode[0], all_settings


def check_run(s):
    """Refuse what a run has answered."""
    given = s.files + [f"--{name}" for name in [*GPTConfig.__dataclass_fields__, "against"] if s.origins[name] == "command line"]
    if given:
        raise UserError(f"--run={s.run} is served beside a dense baseline of its own shape; leave out {' '.join(given)}")
    return s


def shaped(mode, s):
    """The settings with what SHAPES says of the mode. A config file's own keys of this script stay; those of a training run do not."""
    trained = [name for cls in (GPTConfig, TrainConfig) for name in cls.__dataclass_fields__]
    for name, value in SHAPES.get((mode, s.paper), {}).items():
        if s.origins[name] == "default" or name in trained and s.origins[name] != "command line":
            s.values[name], s.origins[name] = value, "default"
    check_ranges(s, RANGES)
    if not s.rows or set(s.rows) - (set(KINDS_OF_SERVING) - {"baseline"}):
        raise UserError(f"{s.origins['rows']}: rows={s.rows} are not rows of a routed config, which are a, long, b, c and d; write --rows=b --rows=d")
    for name in ("contexts", "batches"):
        if min(s.values[name], default=1) < 1 or len(set(s.values[name])) == 1:
            raise UserError(f"{s.origins[name]}: {name}={s.values[name]} makes no curve; give two numbers or more, from 1 up")
    return s


def configs_in(folder):
    """Its config files, 10_ after 9_."""
    files = sorted(Path(folder).glob("[!_]*.py"), key=lambda path: natural(path.name))
    if not files:
        raise UserError(f"{folder!r} holds no config file; name a folder that does, for example config/ladder/rivals")
    return [str(path) for path in files]


def main(argv):
    mode, all_settings = settings_of(argv)
    s = next(iter(all_settings.values()))
    vocab_size = 50304 if mode in ("table", "counts") else 320
    cfgs = {name: one.build(GPTConfig, vocab_size=one.vocab_size or vocab_size) for name, one in all_settings.items()}
    torch.set_num_threads(s.threads)
    torch.manual_seed(0)
    try:
        if mode in ("table", "counts", "ladder"):
            record = MODES[mode](all_settings, cfgs)
        else:
            device, dtype, autocast = pick_device(s)
            record = MODES[mode](all_settings, cfgs, device, dtype, autocast)
            record |= {"settings": {name: s.values[name] for name in KEYS[mode]}, "repeats": s.repeats, "device": machine(device), "dtype": dtype}
    except ValueError as error:
        raise UserError(str(error))
    print(json.dumps({"mode": mode, **record, "threads": torch.get_num_threads(), "torch": str(torch.__version__),
                      "python": platform.python_version(), "commit": commit()}), flush=True)
    if record.get("failed"):
        raise UserError("; ".join(f"{name} failed: {why}" for name, why in record["failed"].items()))


if __name__ == "__main__":
    config.run(main)
