"""Measure trained runs: the loss, what every depth is worth and costs, what routers do, and which of the papers' claims hold.

    python eval.py                                                # every part that the newest run in out/ has something for
    python eval.py loss --full=true --out_dir=out/grt_tiny --compare=out/gpt_tiny       # side by side, with a paired difference
    python eval.py depth --out_dir=out/grt_tiny --compare=out/gpt_tiny --compare=out/recursive_tiny     # and out/grt_tiny/depth.png
    python eval.py steps gate --out_dir=out/grt_tiny              # how each step moves the state, and what the gate lets through
    python eval.py exit --out_dir=out/recursive_tiny              # tokens that leave the loop early: loss, steps, FLOPs, time; exit.png
    python eval.py router --out_dir=out/RUN                       # a routed run: who goes on, and what that is worth; RUN/router.png
    python eval.py answers --out_dir=out/RUN                      # a run on phop or addition: right answers by hops or digits, at every depth
    python eval.py page --out_dir=out/RUN                         # a text, coloured by steps or by loss at every depth; RUN/depth.html
    python eval.py benchmarks --tasks=mor --limit=100             # tasks of lm-evaluation-harness (pip install lm-eval); by name alone

Parts: loss, depth, steps, gate, exit, router, answers, page, benchmarks; several may be named, none named = all that the run
has something for, without benchmarks (and without exit on a routed run). loss reads at most half a megabyte of validation
text, or with --full=true all of it. Tables, the papers' claims with this run's numbers, and one JSON line, the last, go to
stdout; progress goes to stderr. The JSON is also in OUT_DIR/eval.json, with every setting; the parts of earlier calls stay
there while the checkpoint is the same. Benchmarks alone need no data of the run; each task that is done is
at once a line of OUT_DIR/benchmarks.jsonl too, which is only ever added to.
"""
import contextlib
import functools
import hashlib
import html
import io
import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import config  # before torch: see the top of config/__init__.py
import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import prepare
from config import UserError, key, near
from model import (EXITS, GPT, NOT_FINITE, AtEnd, Silence, as_logit, at_least_fp32, causal, exact_flops, fold_in, generator, make_cache, no_cache, rotate,
                   steps_taken, stream, topk)
from sample import at_threshold, load_run, newest_run
from train import (Marks, RouterWatch, Split, agreement, check_ranges, checkpoint_of, commit, count_depths, evaluate, fitting, fixed_windows,
                   load_checkpoint, max_vio, mean_depth, open_split, pick_device, write_whole)

RANGES = {"eval_tokens": (1, math.inf), "batch_size": (1, math.inf), "exit_tokens": (0, math.inf), "limit": (1, math.inf), "num_fewshot": (0, math.inf)}
LOGITS = 2**24                # made at a time: 64 MiB in float32
MOST_BYTES = 500_000          # of validation text that the part loss reads, unless --full
DRAWN = 2**22                 # how often windows are drawn in resamples: numbers at a time, 32 MiB
TOLERANCE = 1e-6              # nats per token between the loss that train.py stored and the same one measured again


@dataclass
class EvalConfig:
    """Evaluation"""
    out_dir: str | None = key(None, "folder of the run, or one of its checkpoints; None = the newest run in out/")
    compare: list[str] = key([], "a further run (folder or checkpoint) to set beside it; may be repeated")
    dataset: str | None = key(None, "data set whose validation split is read; None = each run's own")
    data_dir: str | None = key(None, "folder of the data sets; None = the one that each run was trained from")
    full: bool = key(False, f"loss: read the whole validation split, where it is longer than {MOST_BYTES:,} bytes")
    eval_tokens: int = key(65536, "all other parts: validation tokens, in fixed windows, evenly spaced")
    exit_thresholds: list[float] = key([], "exit: thresholds to try; none = a row of them for each rule that the model knows")
    exit_tokens: int = key(128, "exit: tokens that are decoded one by one at each threshold, to time them; 0 = none")
    thresholds: list[float] = key([n / 10 for n in range(11)], "router, expert-choice: thresholds to try beside the model's own")
    tasks: list[str] = key([], "benchmarks: mor = the six of its paper, or tasks of lm-evaluation-harness by name; several with commas, or repeated")
    include_path: str | None = key(None, "benchmarks: a folder with .yaml files of further tasks")
    limit: int | None = key(None, "benchmarks: documents of each task, for a try; None = all")
    num_fewshot: int | None = key(None, "benchmarks: solved examples before each question; None = as each task has it")
    depth: int | None = key(None, "benchmarks: steps of the loop; None = n_recur")
    threshold: float | None = key(None, "benchmarks, expert-choice: a token goes on if its router gives at least this; None = the model's own")
    exit: str | None = key(None, "benchmarks: rule by which tokens leave the loop early; None = none does", choices=("kl", "cdf"))
    exit_threshold: float | None = key(None, "benchmarks: None = the rule's own")
    batch_size: int | None = key(None, "windows at a time, which changes no result; None = the run's own")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps ...")
    dtype: str | None = key(None, "auto = bfloat16 autocast on CUDA, float32 elsewhere; None = the run's own", choices=("auto", "float32", "bfloat16"))


# -------------------------------------------------------------------------------------------------------------- the runs


class Run(NamedTuple):
    """A trained model beside the validation split that it is measured on."""
    folder: Path                  # or one of its checkpoints
    model: GPT                    # in evaluation mode: no dropout, no noise
    tokenizer: object
    state: dict                   # the checkpoint without its tensors
    dataset: str | None           # None, and no split: benchmarks alone read no data of the run
    meta: dict                    # the data set's meta.json
    split: Split | None
    batch_size: int
    device: torch.device
    autocast: object

    name = property(lambda self: str(self.folder))
    home = property(lambda self: checkpoint_of(self.folder).parent)
    bits = property(lambda self: bits_per_nat(self.meta["val"]))


def bits_per_nat(part):
    """Nats per token times this are bits per byte: x tokens / bytes / ln 2. `part` is a split's entry in meta.json; one that
    asks for answers is no text, and has none."""
    return math.nan if "answers" in part else part["tokens"] / part["bytes"] / math.log(2)


def read_state(folder):
    """The checkpoint without its tensors, and a fingerprint of all of it: its archive keeps a checksum of every piece."""
    path = checkpoint_of(folder)
    state = {name: value for name, value in load_checkpoint(path).items() if name not in ("model", "optimizer")}
    with zipfile.ZipFile(path) as archive:
        sums = "/".join(f"{piece.CRC:08x}" for piece in archive.infolist())
    with fitting(path):
        needed = {"val_step": state["step"], **{name: state[name] for name in ("step", "val_loss", "settings", "fingerprint")}}
        for name in ("dataset", "data_dir", "batch_size", "eval_tokens", "dtype"):
            needed["settings"][name]
    return {**needed, **state, "checkpoint": hashlib.blake2b(sums.encode(), digest_size=8).hexdigest()}


def open_run(folder, state, s, device, autocast):
    own, (model, tokenizer, about) = state["settings"], load_run(folder, device)
    if about["step"] != state["step"]:                        # a run that is still trained
        raise UserError(f"{checkpoint_of(folder)} was saved anew while it was read; run the command again")
    batch_size = s.batch_size or own["batch_size"]
    if reads_no_data(s):
        return Run(folder, model, tokenizer, state, None, {}, None, batch_size, device, autocast)
    dataset, data_dir = s.dataset or own["dataset"], s.data_dir or own["data_dir"]
    try:
        meta = prepare.load_meta(data_dir, dataset)
    except UserError as error:
        raise UserError(f"{error}" + ("" if s.data_dir else f"; or say with --data_dir= where the data of {folder} is now"))
    if meta["fingerprint"] != state["fingerprint"]:
        raise UserError(f"data set {dataset!r} has tokenizer {meta['tokenizer']!r} ({meta['fingerprint']}), but {folder} was trained with "
                        f"{state['tokenizer']!r} ({state['fingerprint']}); give --dataset= one of the same tokenizer, or leave it out")
    if meta["val"]["tokens"] <= model.cfg.block_size:
        raise UserError(f"the validation split of {dataset!r} holds {meta['val']['tokens']} tokens, and {folder} needs more than its "
                        f"block_size={model.cfg.block_size}; use a larger --dataset=")
    split = open_split(data_dir, dataset, "val", meta, model.cfg.block_size)
    split.check_ids(model.cfg.vocab_size)
    return Run(folder, model, tokenizer, state, dataset, meta, split, batch_size, device, autocast)


def reads_no_data(s):
    """Nothing but benchmarks, whose texts are the harness's own: imported weights have no data here. With --dataset= it is looked at all the same."""
    return set(s.words) == {"benchmarks"} and not s.dataset and not s.data_dir


# ----------------------------------------------------------------------------------------------- nats, window by window


def kind_of(cfg):
    """What makes a loop: its update, or its router, on an update of its own."""
    return cfg.update if cfg.router == "none" else f"{cfg.router}-choice router" + f" on a {cfg.update}" * (cfg.update != "replace")


def is_plain(cfg):
    """No loop, no router and no rule of update: a dense transformer, which can be left after any of its blocks."""
    return cfg.n_recur == 1 and cfg.update == "replace" and cfg.router == "none"


def exit_depths(cfg):
    """Where a model can be left, ascending: after each step, to twice n_recur where no step has weights of its own; dense: after
    each core block, as fractions of its one step; the depth that it has, where every step has blocks of its own."""
    if is_plain(cfg):
        return [k / cfg.n_core for k in range(cfg.n_core + 1)]
    if not cfg.any_depth:
        return [cfg.n_recur]
    return list(range((1 if cfg.own_steps else 2) * cfg.n_recur + 1))


def features_at(model, ids_BT, depths, routing="causal"):
    """Yield what the head reads after each of `depths` (ascending) in one pass: a deeper state goes on from a shallower.
    Token-choice models, which end a token's last step in its own way, take a pass for each."""
    cfg = model.cfg
    if cfg.router == "token":
        yield from (features_of(model, ids_BT, depth, routing) for depth in depths)
        return
    if is_plain(cfg):
        p = taken_apart(model, ids_BT)
        yield from (p.features(p.states[round(depth * cfg.n_core)]) for depth in depths)
        return
    cache, noise, done = no_cache(cfg), Silence(), 0
    e_BTD, outer = model.start(ids_BT, cache, routing=routing)
    watch, (h_BTD, anchor, who) = AtEnd(model, outer, cache), model.recursion.enter(e_BTD, outer, cfg.n_recur, noise)
    for depth in depths:
        for step in range(done, depth):
            h_BTD, who = model.recursion.step(h_BTD, anchor, who, step, noise, cache, watch)
        done = depth
        yield watch.features(h_BTD, who)


def features_of(model, ids_BT, depth, routing="causal"):
    """What the head reads after a pass of `depth` steps."""
    cache = no_cache(model.cfg)
    e_BTD, outer = model.start(ids_BT, cache, routing=routing)
    watch = AtEnd(model, outer, cache)
    return watch.features(*model.recursion(e_BTD, outer, depth, Silence(), cache, watch))


def token_nats(model, x_BTD, targets_BT):
    """Nats of each target, (B, T) in float64 on the CPU (0 at -100); few logits at a time."""
    n = max(1, LOGITS // model.cfg.vocab_size)                # tokens at a time
    pieces = zip(x_BTD.flatten(0, 1).split(n), targets_BT.flatten().split(n))
    return torch.cat([F.cross_entropy(at_least_fp32(model.head(x_nD)), target_n, reduction="none") for x_nD, target_n in pieces]
                     ).view(targets_BT.shape).cpu().double()


def row_nats(model, x_BTD, targets_BT):
    """Summed nats of each row and how many targets they are of (-100 is none), float64 on the CPU."""
    return token_nats(model, x_BTD, targets_BT).sum(1), (targets_BT != -100).cpu().double().sum(1)


def loss_windows(run, full):
    """Starts of windows: side by side over all of the split; or, where it holds more than MOST_BYTES of text and `full` is not
    asked for, whole windows of as many bytes, evenly spaced, the same ones every time."""
    part = run.meta["val"]
    if full or part["bytes"] <= MOST_BYTES:
        return run.split.consecutive()
    return fixed_windows(run.split, int(MOST_BYTES * part["tokens"] / part["bytes"]))


def batches(run, starts):
    """(ids, targets) of these windows, batch_size at a time; a window that the end of the data cuts comes alone."""
    starts = [int(start) for start in starts]
    whole = [start for start in starts if start < run.split.n_windows]
    for i in tqdm(range(0, len(whole), run.batch_size), desc=run.name, disable=None, leave=False):
        yield run.split.batch(whole[i : i + run.batch_size], run.device)
    for start in starts[len(whole) :]:
        yield run.split.batch([start], run.device)


@torch.no_grad()
def window_nats(run, starts, depths, routing="causal"):
    """(nats, counts) as float64 arrays: nats[i, w] of window w at depths[i], and counts[w] targets."""
    nats, counts = [], []
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast:
            rows = [row_nats(run.model, x_BTD, targets_BT) for x_BTD in features_at(run.model, ids_BT, depths, routing)]
        nats.append(torch.stack([nats_B for nats_B, _ in rows]))
        counts.append(rows[0][1])
    return torch.cat(nats, 1).numpy(), torch.cat(counts).numpy()


def draws(n_windows, seed, resamples):
    """Yield how often each window is drawn, (resamples, W), some resamples at a time: with replacement, as many as there are."""
    rng, n = np.random.default_rng(seed), max(1, DRAWN // n_windows)
    for i in range(0, resamples, n):
        counts = (np.bincount(rng.integers(n_windows, size=n_windows), minlength=n_windows) for _ in range(min(n, resamples - i)))
        yield np.array([*counts], float)


@functools.lru_cache(maxsize=2)
def kept_draws(n_windows, seed, resamples):
    return [*draws(n_windows, seed, resamples)]


def bootstrap(nats, counts, seed=0, resamples=1000):
    """The mean per token of as many windows drawn with replacement, again and again: how much it depends on the windows
    that happen to be there. (Windows are taken as independent; neighbours from one document are less than that.)"""
    if len(nats) == 1:
        return np.full(resamples, np.nan)                     # one window says nothing about others
    few = len(nats) * resamples <= DRAWN                      # drawn once for all numbers over these windows
    with np.errstate(invalid="ignore", divide="ignore"):      # a draw in which something never occurs has no mean
        means = [draw_RW @ nats / (draw_RW @ counts) for draw_RW in (kept_draws if few else draws)(len(nats), seed, resamples)]
    return np.concatenate(means)


def interval(means):
    """The middle 95%; None where one of the resampled means is none."""
    return np.quantile(means, (0.025, 0.975)).tolist() if np.isfinite(means).all() else None


def loss_of(nats, counts):
    return {"nats_per_token": nats.sum() / counts.sum(), "interval": interval(bootstrap(nats, counts))}


def paired(nats, other, counts):
    """nats minus other, per token, over the same windows."""
    return {"value": (nats - other).sum() / counts.sum(), "interval": interval(bootstrap(nats - other, counts))}


# --------------------------------------------------------------------------------------------------------------- claims
# What the papers say of such a model, asked of this run. A part puts its claims into its record under "claims"; main prints
# those of all parts in one table. The papers' own models are larger and longer trained: a claim that does not hold here is
# news of this run, and no refutation.


def statistic(sums, counts, of=lambda means: means[0]):
    """A number about this run and its 95% interval over windows: {"value", "interval"}.

    sums: (n, W), n quantities summed over each of W windows, or (W,), one; counts: (W,) or (n, W), what they are divided by
    (tokens). of: the n means -> the number, along the first axis, as it is given (n,) and (n, resamples). Every quantity sees
    the same draws of windows, so what is hard for one is hard for all. One window gives no interval."""
    sums, counts = np.atleast_2d(sums), np.broadcast_to(np.atleast_2d(counts), np.atleast_2d(sums).shape)
    with np.errstate(invalid="ignore", divide="ignore"):      # a draw in which something never occurs: no interval
        value, means = of(sums.sum(1) / counts.sum(1)), of(np.array([bootstrap(*row) for row in zip(sums, counts)]))
    return {"value": float(value), "interval": interval(means)}


def judge(text, source, value, interval, above=0.0, below=None):
    """A claim's record: {claim, source, value, interval, above or below, holds}. It says that the value is above `above`, or
    where `below` is given, below that. holds: True where the whole interval is on that side, False where it is on the other;
    None: not separated, or no interval."""
    sign, bound, side = (1, above, "above") if below is None else (-1, below, "below")
    low, high = sorted(sign * (edge - bound) for edge in interval) if interval else (math.nan, math.nan)
    return {"claim": text, "source": source, "value": value, "interval": interval, side: bound, "holds": True if low > 0 else False if high < 0 else None}


def claim(text, source, sums, counts, of=lambda means: means[0], above=0.0, below=None):
    """The record of a claim about a number that comes from sums over windows: see statistic and judge. Two examples:

    claim("the loss falls with the third step", "GRT", nats_SW[2] - nats_SW[3], counts_W)                     # S steps, W windows
    claim("the gate rises at every step", "GRT", gate_SW, counts_W, lambda g_S: (g_S[1:] - g_S[:-1]).min(0))"""
    return judge(text, source, **statistic(sums, counts, of), above=above, below=below)


VERDICTS = {True: "holds", False: "does not hold", None: "not separated"}


def show_claims(run, claims):
    """One table of all claims, with this run's numbers."""
    side = lambda c: f"> {c['above']:g}" if "above" in c else f"< {c['below']:g}"
    print(f"the papers' claims on {run.name} (not separated: the 95% interval lies on both sides)")
    show(("claim", "paper", "says", "here", "95% interval", "verdict"),
         [(c["claim"], c["source"], side(c), "-" if math.isnan(c["value"]) else f"{c['value']:.4g}", show_interval(c["interval"], ".4g"),
           VERDICTS[c["holds"]] if c["interval"] else "no interval") for c in claims])


# ------------------------------------------------------------------------------------------------------------- part: loss


def measure_loss(run, full=True):
    """(numbers for the record, nats of each window, counts): the split once, or of a long one a part, at full depth."""
    depths, starts = [run.model.cfg.n_recur], loss_windows(run, full)
    (nats,), counts = window_nats(run, starts, depths)
    loss = loss_of(nats, counts)
    mean = loss["nats_per_token"]
    numbers = {"tokens": int(counts.sum()), "windows": len(counts), "whole_split": len(starts) == len(run.split.consecutive()),
               "block_size": run.split.width - 1, **loss, "bits_per_byte": mean * run.bits, "perplexity": math.inf if mean > 700 else math.exp(mean)}
    if run.model.cfg.router == "expert":
        (topk_nats,), _ = window_nats(run, starts, depths, "topk")
        numbers["used"] = used(run.model.cfg, routing=["causal", "topk"])
        numbers["topk"] = {"causal": False, **loss_of(topk_nats, counts), "minus_causal": paired(topk_nats, nats, counts)}
    return {**numbers, "train": against_train(run)}, nats, counts


def against_train(run):
    """The loss as train.py takes it, by its own function on its own windows, beside the one that it stored."""
    own, step, stored, at = run.state["settings"], run.state["step"], run.state["val_loss"], run.state["val_step"]
    starts, full = fixed_windows(run.split, own["eval_tokens"]), run.model.cfg.n_recur
    mean, why = evaluate(run.model, run.split, starts, [full], own["batch_size"], run.device, run.autocast)[full], ""
    if at != step:
        why = f"the stored loss is of step {at} and the weights are of step {step}, so they need not agree"
    elif run.dataset != own["dataset"]:
        why = f"the stored loss is of data set {own['dataset']!r}, so they need not agree"
    agrees = None if why else bool(abs(mean - stored) <= TOLERANCE)
    if agrees is False:
        there = ", ".join(f"{name}={own.get(name)}" for name in ("device", "dtype", "compile"))
        why = f"they differ by {mean - stored:+.1e}: another machine rounds otherwise (training had {there}), or the data were made anew"
    return {"windows": len(starts), "nats_per_token": mean, "stored": stored, "stored_step": at, "agrees": agrees, "why": why}


def why_unpaired(a, b):
    """What keeps the windows of two runs from being the same; '' where they are."""
    if a.meta["fingerprint"] != b.meta["fingerprint"]:
        return "the tokenizers differ" + ("" if a.meta["val"]["bytes"] == b.meta["val"]["bytes"] else ", and so do the texts")
    if a.meta["val"] != b.meta["val"]:
        return "the validation texts differ"
    if a.split.width != b.split.width:
        return f"block_size is {a.split.width - 1} here and {b.split.width - 1} there"
    return ""


def difference(run, nats, counts, other, other_nats, other_counts):
    """other minus run at full depth: over the same windows in nats per token, else in bits per byte, each with its own draws."""
    why = why_unpaired(run, other)
    if not why:
        return {"unit": "nats/token", **paired(other_nats, nats, counts), "paired": True, "why": ""}
    value = other_nats.sum() / other_counts.sum() * other.bits - nats.sum() / counts.sum() * run.bits
    means = bootstrap(other_nats, other_counts, seed=1) * other.bits - bootstrap(nats, counts) * run.bits
    return {"unit": "bits/byte", "value": value, "interval": interval(means), "paired": False, "why": why}


def show_bits(numbers):
    return "-" if math.isnan(numbers["bits_per_byte"]) else f"{numbers['bits_per_byte']:.4f}"


def show_interval(pair, form):
    return "-" if pair is None else f"{pair[0]:{form}} .. {pair[1]:{form}}"


def report_loss(runs, s):
    """Nats per token, bits per byte and perplexity of every run; differences to the first one."""
    measured = [(run, *measure_loss(run, s.full)) for run in runs]
    print("loss: the whole validation split at full depth" if all(n["whole_split"] for _, n, *_ in measured) else
          f"loss: of a long validation split the windows that {MOST_BYTES:,} bytes make, evenly spaced (--full=true reads all), at full depth")
    show(("run", "step", "nats/token", "95% interval", "bits/byte", "perplexity", "tokens", "windows"),
         [(run.name, str(run.state["step"]), f"{n['nats_per_token']:.4f}", show_interval(n["interval"], ".4f"), show_bits(n),
           f"{n['perplexity']:,.2f}", f"{n['tokens']:,}", f"{n['windows']:,}") for run, n, *_ in measured])
    for run, n, *_ in measured:
        if "topk" in n:
            value, pair = n["topk"]["minus_causal"].values()
            print(f"{run.name}: the same with {TOPK} {n['topk']['nats_per_token']:.4f} nats/token: {value:+.4f}, 95% interval {show_interval(pair, '+.4f')}")
        t = n["train"]
        print(f"{run.name}: train.py's {t['windows']} windows {t['nats_per_token']:.7f} nats/token, stored {t['stored']:.7f}: "
              f"{t['why'] or f'they agree to {TOLERANCE:.0e}'}")
    (first, numbers, *rows), others = measured[0], []
    for run, n, *other_rows in measured[1:]:
        d = difference(first, *rows, run, *other_rows)
        print(f"{run.name} minus {first.name}: {d['value']:+.4f} {d['unit']}, 95% interval {show_interval(d['interval'], '+.4f')}, "
              + (f"paired over {n['windows']:,} windows" if d["paired"] else f"not paired: {d['why']}"))
        others.append({**identity(run), "data": data(run), **n, "difference": d})
    return {**numbers, "compare": others}


# ------------------------------------------------------------------------------------------------------------ part: depth


MEASURES = ("nats", "kl", "agreement", "accuracy")
HELD = (0, 1)                 # what a gate is held at: the whole proposal, the whole state


@contextlib.contextmanager
def gate_held(model, value):
    """While it lasts, the gate of a model with update=gate is `value` everywhere: with 1 a step keeps the old state whole, so that
    it makes no difference, with 0 it leaves the core's whole proposal."""
    gate = model.recursion.update.gate
    gate.forward = lambda h_BTD, e_BTD, noise_BT1: torch.full_like(h_BTD, value, dtype=noise_BT1.dtype)
    try:
        yield
    finally:
        del gate.forward                                      # the class's own is there again


def features_held(model, ids_BT):
    """What the head reads after n_recur steps with the gate held at each of HELD; nothing where there is no gate."""
    for value in HELD if model.cfg.update == "gate" else ():
        with gate_held(model, value):
            yield features_of(model, ids_BT, model.cfg.n_recur)


def against_full(model, features, full, targets_BT):
    """Sums over each row's targets, float64 on the CPU (MEASURES, features, B), few logits at a time. Of every (B, T, D) of `features`:
    nats of the targets; KL(p_full || p), p_full being the distribution after features[full]; how often the likeliest token is that of
    features[full]; how often it is the target."""
    log_p = lambda x_nD: at_least_fp32(model.head(x_nD)).log_softmax(-1)
    n = max(1, LOGITS // model.cfg.vocab_size // 2)           # two distributions are there at once
    chunks, pieces = [x_BTD.flatten(0, 1).split(n) for x_BTD in features], []
    for i, target_n in enumerate(targets_BT.flatten().split(n)):
        full_nV = log_p(chunks[full][i])
        best_n, columns = full_nV.argmax(-1), []
        for k, x_nD in enumerate(column[i] for column in chunks):
            own_nV = full_nV if k == full else log_p(x_nD)
            guess_n, kl_n = own_nV.argmax(-1), (full_nV.exp() * (full_nV - own_nV)).sum(-1)
            columns.append(torch.stack([F.nll_loss(own_nV, target_n, reduction="none"), kl_n, guess_n == best_n, guess_n == target_n]))
        pieces.append(torch.stack(columns, 1) * (target_n != -100))
    return torch.cat(pieces, -1).unflatten(-1, targets_BT.shape).cpu().double().sum(-1)


@torch.no_grad()
def depth_sums(run, starts, depths):
    """({measure: (rows, W) sums over the targets of each window}, counts (W,)): a row for each of `depths`, then, where there is a
    gate, for each of HELD."""
    sums, counts, full = [], [], depths.index(run.model.cfg.n_recur)
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast:
            features = [*features_at(run.model, ids_BT, depths), *features_held(run.model, ids_BT)]
            sums.append(against_full(run.model, features, full, targets_BT))
        counts.append((targets_BT != -100).cpu().double().sum(1))
    return dict(zip(MEASURES, torch.cat(sums, -1).numpy())), torch.cat(counts).numpy()


def measure_depth(run, eval_tokens):
    """Of every depth: loss; KL(full depth's distribution || this depth's) in nats, which GRT calls the KL to the final distribution (in
    this direction it is what the loss is above that of the full depth, if the full depth is calibrated, and so are the paper's numbers:
    2.61 = 5.29 - 2.68 at depth 0, .46 = 3.14 - 2.68 at depth 2); agreement, the share of tokens whose likeliest next token is the
    same as at full depth; accuracy, the share whose likeliest next token is the right one."""
    cfg, depths, starts = run.model.cfg, exit_depths(run.model.cfg), fixed_windows(run.split, eval_tokens)
    (sums, counts), flops, full = depth_sums(run, starts, depths), flops_of(run, starts), depths.index(cfg.n_recur)

    def point(k):
        means = {name: (of[k].sum() / counts.sum()).item() for name, of in sums.items()}
        nats = means.pop("nats")
        return {"nats_per_token": nats, "bits_per_byte": nats * run.bits, **means, "minus_full": paired(sums["nats"][k], sums["nats"][full], counts)}

    points = [{"depth": depth, "flops_per_token": flops(depth), **point(k), "training": training_at(cfg, depth)} for k, depth in enumerate(depths)]
    held = [{"gate": value, "flops_per_token": flops(cfg.n_recur), **point(len(depths) + k)} for k, value in enumerate(HELD) if cfg.update == "gate"]
    return {"windows": len(starts), "tokens": int(counts.sum()), "layout": cfg.layout, "update": cfg.update, "used": used(cfg, depth=depths), "points": points,
            "held": held, **gains(cfg, sums, counts, full), "claims": depth_claims(cfg, sums, counts, full)}


def early_share(nats_S):
    """Of the loss that all these steps take off, what the first two do."""
    return (nats_S[0] - nats_S[2]) / drop(nats_S[0], nats_S[-1])


def drop(first, last):
    """How far a loss falls; NaN where it does not, of which nothing is a share."""
    return np.where(first > last, first - last, math.nan)


def gains(cfg, sums, counts, full):
    """What the first steps are worth beside all `full` of them: of a loop with more than two, the share of the loss drop that the first two
    bring; the accuracy after half of them, rounded up, over that after all (dense: of the core blocks)."""
    nats, half = sums["nats"][: full + 1], math.ceil(full / 2)
    numbers = {"share_of_first_two": statistic(nats, counts, early_share)} if full > 2 and not is_plain(cfg) else {}
    if full > 1:
        numbers["accuracy_kept"] = {"after": half, "of": full, **statistic(sums["accuracy"][[half, full]], counts, lambda share: share[0] / share[1])}
    return numbers


def depth_claims(cfg, sums, counts, full):
    """What GRT says of depth, and MoR of a smaller maximum than the trained one."""
    nats, kl, claims = sums["nats"], sums["kl"], []
    fall = lambda means: (means[:-1] - means[1:]).min(0)      # the smallest of all steps
    rise = lambda means: (means[2] - means[1]) / drop(means[0], means[1])
    says = lambda text, *what, paper="GRT", **side: claims.append(claim(text, paper, what[0], counts, *what[1:], **side))
    loops = full > 1 and cfg.router == "none" and not is_plain(cfg)
    if full > 1 and cfg.router != "none":
        says("a larger maximum depth at test time lowers the loss (smallest fall from 1 on, nats)", nats[1 : full + 1], fall, paper="MoR")
    if loops:
        says("every step up to n_recur lowers the loss (smallest fall, nats)", nats[: full + 1], fall)
        says("every step brings the distribution nearer to the final one (smallest fall of KL, nats)", kl[: full + 1], fall)
    if loops and full > 2:
        says("most of the loss drop comes with the first two steps (share; Large: .82)", nats[: full + 1], early_share, above=0.5)
    if loops and not cfg.own_steps:                           # others run no deeper than n_recur
        says("beyond n_recur the loss falls no more (at twice the depth minus at n_recur, nats; Large: .06)", nats[2 * full] - nats[full])
        says("beyond n_recur it rises little (the same over the drop from depth 0; Large: .02)", nats[[0, full, 2 * full]], rise, below=0.1)
    if cfg.update == "gate":
        says("a gate held at 0 hurts more than one held at 1 (nats; Large: 6.8)", nats[-2] - nats[-1])
    return claims


@torch.no_grad()
def flops_of(run, starts):
    """depth -> FLOPs per token of a forward pass; routed: with as many tokens in each step as went there on these windows."""
    cfg, depths = run.model.cfg, []
    if cfg.router == "none":
        return lambda depth: cfg.flops_per_token(cfg.block_size, depth=depth)
    for ids_BT, _ in batches(run, starts):
        with run.autocast:
            depths.append(full_pass(run.model, ids_BT)[1].cpu())
    shares = step_shares(torch.cat(depths).numpy(), cfg.n_recur)
    return lambda depth: flops_at(cfg, shares, depth)


def tell_unpaired(runs):
    for run in runs[1:]:
        if why := why_unpaired(runs[0], run):
            print(f"{run.name}: not the windows of {runs[0].name}, as {why}" + ("; compare bits/byte alone" if "tokenizers" in why else ""))


def common_unit(runs):
    """In what the losses of these runs can be drawn together."""
    return "nats_per_token" if all(run.meta["fingerprint"] == runs[0].meta["fingerprint"] for run in runs) else "bits_per_byte"


def training_at(cfg, depth):
    """What training knew of a depth. A model does best where it was trained; elsewhere expect worse."""
    low, high = cfg.trained_depths
    return "full depth" if depth == cfg.n_recur else "trained" if low <= depth <= high else "never trained"


def depth_name(cfg, depth):
    return f"{round(depth * cfg.n_core)}/{cfg.n_core}" if is_plain(cfg) else str(depth)


def report_depth(runs, s):
    """Loss, distance to full depth and accuracy after every step (dense: every core block) against FLOPs; one picture for all runs."""
    measured = [(run, measure_depth(run, s.eval_tokens)) for run in runs]
    print(f"depth: after each step against FLOPs of a forward pass, on {measured[0][1]['windows']:,} fixed windows ({measured[0][1]['tokens']:,} tokens); "
          f"KL, same guess and minus: beside n_recur steps; k/L = a dense model left after k of its L core blocks; routed: at most so many steps, and FLOPs of "
          f"who really went on")
    tell_unpaired(runs)
    for run, n in measured:
        if len(n["points"]) == 1:
            print(f"{run.name}: sharing={run.model.cfg.sharing_name!r} has one depth only, n_recur={run.model.cfg.n_recur}")
    show(("run", "depth", "MFLOP/token", "nats/token", "bits/byte", "KL", "same guess", "right guess", "minus", "95% interval", ""),
         [depth_row(run, *name_of(run.model.cfg, p), p) for run, n in measured for p in (*n["points"], *n["held"])])
    for run, n in measured:
        if "share_of_first_two" in n:
            share, R = n["share_of_first_two"], run.model.cfg.n_recur
            print(f"{run.name}: the loss after {R} steps is no lower than before them" if math.isnan(share["value"]) else
                  f"{run.name}: the first two of {R} steps bring {share['value']:.1%} of the loss drop, 95% interval {show_interval(share['interval'], '.1%')}")
        if "accuracy_kept" in n:
            kept = n["accuracy_kept"]
            print(f"{run.name}: after {kept['after']} of {kept['of']} {'core blocks' if is_plain(run.model.cfg) else 'steps'} {kept['value']:.1%} of the "
                  f"accuracy is there, 95% interval {show_interval(kept['interval'], '.1%')}")
    others = [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]
    return {**measured[0][1], "picture": draw(measured), "compare": others}


def name_of(cfg, p):
    """(depth, remark) of a point in the table."""
    return (f"gate={p['gate']}", "held at every step") if "gate" in p else (depth_name(cfg, p["depth"]), p["training"])


def depth_row(run, depth, remark, p):
    return (run.name, depth, f"{p['flops_per_token'] / 1e6:,.3f}", f"{p['nats_per_token']:.4f}", show_bits(p), f"{p['kl']:.4f}", f"{p['agreement']:.1%}",
            f"{p['accuracy']:.1%}", f"{p['minus_full']['value']:+.4f}", show_interval(p["minus_full"]["interval"], "+.4f"), remark)


def draw(measured):
    """OUT_DIR/depth.png: one line per run, a ring around its full depth; at the right how far each depth is from that one. Returns the
    path, or None, and says why."""
    if (figure := new_figure(14, 5.5)) is None:
        return None
    left, right = figure.subplots(1, 2)
    draw_losses(left, measured)
    draw_kl(right, measured)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="FLOPs per token, one forward pass")
        axes.grid(alpha=0.3, which="both")
    left.legend()
    return save_picture(figure, measured[0][0].home / "depth.png")


def draw_losses(axes, measured):
    """What is far above all rings leaves the frame, or nobody could tell those apart."""
    unit = common_unit([run for run, _ in measured])
    for i, (run, n) in enumerate(measured):
        color = draw_line(axes, i, run, unit, n["points"], label=plain(f"{n['layout']} {kind_of(run.model.cfg)} ({run.name})"))
        for p in n["points"]:
            if p["depth"] == run.model.cfg.n_recur:
                axes.plot(p["flops_per_token"], p[unit], "o", markersize=11, fillstyle="none", color=color)
    crop(axes, [p[unit] for _, n in measured for p in n["points"]],
         1.5 * max(p[unit] for _, n in measured for p in n["points"] if p["training"] == "full depth"))
    axes.set(ylabel=f"validation loss, {unit.replace('_', ' ')}", title="Loss at every depth (number: steps; ring: full depth; dense: after each block)")


def draw_kl(axes, measured):
    """The full depth itself, at 0, has no place on this axis: the line is broken there."""
    for i, (run, n) in enumerate(measured):
        draw_line(axes, i, run, "kl", [p if p["kl"] > 0 else p | {"kl": math.nan} for p in n["points"]])
    axes.set(ylabel="KL(full depth || this depth), nats per token", title="How far the distribution is from that at full depth")
    by_decades(axes)


def draw_line(axes, i, run, what, points, **style):
    """The line of run number i, numbered by its steps, of every other run below it; its colour."""
    x, y = [p["flops_per_token"] for p in points], [p[what] for p in points]
    (line,) = axes.plot(x, y, marker="o", markersize=4, linewidth=1.5, **style)
    for p, x_p, y_p in zip(points, x, y):
        if not is_plain(run.model.cfg) and math.isfinite(y_p):
            axes.annotate(str(p["depth"]), (x_p, y_p), textcoords="offset points", xytext=(0, -15 if i % 2 else 8), ha="center", fontsize=8, color=line.get_color())
    return line.get_color()


def new_figure(width, height):
    """An empty picture of so many inches; None, and one line, without matplotlib."""
    try:
        from matplotlib.figure import Figure                  # not pyplot: no display, no global state, PNG is drawn by Agg
        return Figure(figsize=(width, height), layout="constrained")
    except ImportError:
        no_pictures()


@functools.cache                                              # said once
def no_pictures():
    print("note: no pictures, as matplotlib is not here (pip install matplotlib)", file=sys.stderr)


def by_decades(axes):
    """A logarithmic y axis, if anything drawn has a place on it: matplotlib fails on an axis without one."""
    if any(0 < y < math.inf for line in axes.get_lines() for y in line.get_ydata()):
        axes.set_yscale("log")


def plain(text):
    """Text that matplotlib shall not take for mathematics."""
    return text.replace("$", r"\$")


def crop(axes, values, top):
    """Leave what is far above out of the frame, or nobody could tell the rest apart."""
    every = [value for value in values if math.isfinite(value)]
    if every and max(every) > top:
        axes.set_ylim(min(every) - (top - min(every)) / 20, top)


def save_picture(figure, path):
    """Its path; None, and why, where it could not be written."""
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
        print(f"picture: {path}")
        return str(path)
    except UserError as error:                                # the numbers are worth more than the picture
        print(f"note: no picture: {error}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ part: steps

STEP_TOKENS = 16384           # steps, gate: read no more than so many, which is enough for means over tokens
TENTHS = 10                   # of the tokens, by their initial loss
CKA_BYTES, GROUPS, REDRAWN = 2**30, 20, 200          # what its sums may take; groups of windows, and how often they are drawn, for its interval
HEAD_SHARE, HEAD_SPREAD = 0.3, 0.75           # of a head's attention on one place, and its spread: from here on it has a type
HEAD_TYPES = ("previous token", "self", "broadcast", "mixed")


class Pass(NamedTuple):
    """A forward pass at full depth, taken apart by steps; the steps of a dense model are its core's blocks. Who did not take
    a step keeps the state, and has zeros for proposal and gate there."""
    states: list                  # h_0 before the loop, then h_r after each step r: (B, T, D)
    proposals: list               # o_r, what the core gave in step r; without gate, router and loop_norm h_r itself
    gates: list                   # g_r; none without a gate
    took: list                    # who went through step r, (B, T)
    features: object              # of a state, what the head reads


class Ear(AtEnd):
    """Inside `with`: takes down what the core's blocks and the gate give in every step."""

    def __init__(self, model, outer, cache):
        super().__init__(model, outer, cache)
        self.outputs, self.gates, self.steps, self.gated = [], [], [], model.cfg.update == "gate"

    def __enter__(self):
        recursion, into = self.model.recursion, lambda heard: lambda module, args, out: heard.append(out)
        self.hooks = [block.register_forward_hook(into(self.outputs)) for block in recursion.core]
        self.hooks += [recursion.update.gate.register_forward_hook(into(self.gates))] if self.gated else []
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def look(self, h_BTD, who, step):
        """(state, proposal, gate, who took the step), all of (B, T)."""
        whole = lambda x_ACD: who.put(torch.zeros_like(h_BTD), x_ACD.to(h_BTD.dtype))
        everyone_BT = torch.ones(h_BTD.shape[:2], dtype=torch.bool, device=h_BTD.device)
        took_BT = everyone_BT if who.index_AC is None else who.depth[..., 0] == step
        self.steps.append((h_BTD, whole(self.outputs[-1]), whole(self.gates[-1]) if self.gated else None, took_BT))
        return who

    def nobody(self, h_BTD):
        """A step that was left out, as nobody was there to take it."""
        nothing_BTD = torch.zeros_like(h_BTD)
        self.steps.append((h_BTD, nothing_BTD, nothing_BTD, nothing_BTD[..., 0].bool()))


def taken_apart(model, ids_BT):
    """The Pass of these tokens; routers choose causally."""
    cfg, recursion, cache, noise = model.cfg, model.recursion, no_cache(model.cfg), Silence()
    e_BTD, outer = model.start(ids_BT, cache)
    first_BTD, anchor, who = recursion.enter(e_BTD, outer, cfg.n_recur, noise)
    h_BTD = first_BTD
    with Ear(model, outer, cache) as ear:
        for step in range(cfg.n_recur):
            h_BTD, who = recursion.step(h_BTD, anchor, who, step, noise, cache, ear)
            if len(ear.steps) == step:
                ear.nobody(h_BTD)
    states, proposals, gates, took = map(list, zip(*ear.steps))
    if is_plain(cfg):                                         # left after a block, it has this state
        proposals = ear.outputs
        states, took = [recursion.norm(y_BTD) for y_BTD in proposals], took * len(proposals)
    return Pass([first_BTD, *states], proposals, gates if ear.gated else [], took, lambda h_BTD: ear.features(h_BTD, who))


def readable(cfg):
    """Which of a Pass's states are those of the model run to that depth: all, h_0 included; of a token-choice model, which ends
    each token's last step in its own way, the first and the last; of one that has a single depth the last alone."""
    n_steps = cfg.n_core if is_plain(cfg) else cfg.n_recur
    return [n_steps] if not cfg.any_depth and not is_plain(cfg) else [0, n_steps] if cfg.router == "token" else list(range(n_steps + 1))


def movements(p):
    """{name: for each step (its number, a value of each token (B, T), the tokens that count)}, of a Pass p, d_r = h_r - h_(r-1):

    update_norm      ||d_r||, over the tokens that took step r                                          [GRT: 17.6 -> 6.5]
    relative_update  ||d_r|| / ||h_(r-1)||, over the same
    update_cosine    cos(d_r, d_(r-1)), over those that took both steps: does a step go on where the last one went?
    proposal_cosine  cos(o_r, o_(r-1)), over the same: does the core say the same again?"""
    updates, cos = [new - old for old, new in zip(p.states, p.states[1:])], functools.partial(F.cosine_similarity, dim=-1)
    both = [(r + 1, old & new) for r, (old, new) in enumerate(zip(p.took, p.took[1:]), 1)]
    norms = [update_BTD.norm(dim=-1) for update_BTD in updates]
    return {"update_norm": [(r, norm_BT, took_BT) for r, (norm_BT, took_BT) in enumerate(zip(norms, p.took), 1)],
            "relative_update": [(r, norm_BT / h_BTD.norm(dim=-1), took_BT) for r, (norm_BT, h_BTD, took_BT) in enumerate(zip(norms, p.states, p.took), 1)],
            **{name: [(r, cos(x_BTD[r - 2], x_BTD[r - 1]), both_BT) for r, both_BT in both]
               for name, x_BTD in (("update_cosine", updates), ("proposal_cosine", p.proposals))}}


def in_double(x):
    """In float64, on the CPU where the device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


class Sums:
    """Sums over the tokens of each window, beside how many those are, by a name and a step. With all windows kept apart a
    mean over all tokens has an interval."""

    def __init__(self):
        self.rows = {}

    def add(self, name, step, x_BT, in_BT):
        """x: a value of each token; in: those that count."""
        in_BT = in_BT.cpu()
        sum_B = torch.where(in_BT, x_BT.cpu().double(), 0.0).sum(1)
        self.rows.setdefault((name, step), []).append(torch.stack((sum_B, in_BT.double().sum(1))).numpy())

    def __getitem__(self, name_step):
        """(2, W): sums and counts."""
        return np.concatenate(self.rows[name_step], 1)


def ratio(pair_2W):
    return pair_2W[0].sum() / pair_2W[1].sum() if pair_2W[1].any() else math.nan


def number_of(*pairs, of=lambda means: means[0]):
    """statistic, of pairs of sums and counts, (2, W) each."""
    return statistic(*np.stack(pairs, 1), of)


def change(first_2W, last_2W):
    """The last mean minus the first, over the same windows."""
    return number_of(first_2W, last_2W, of=lambda means: means[1] - means[0])


class Cka:
    """Linear CKA between the states of all steps, over the same tokens, columns centred over all tokens [Kornblith et al. 2019]:
    ||X^T Y||_F^2 / (||X^T X||_F ||Y^T Y||_F). 1: the same up to a rotation and a scale; nothing to do with each other: near 0.

    Only sums over tokens are kept, of x and of x x^T, x being all states of a token in a row, float64: never (tokens x tokens).
    Of states that are too many and too wide for CKA_BYTES some are taken, evenly spaced. Windows go in turn to groups that are
    summed apart, for an interval: GROUPS of them, or one where five have no room."""

    def __init__(self, n_states, width):
        n_kept = max(2, min(n_states, math.isqrt(CKA_BYTES // 8) // width))
        self.kept = sorted({round(i) for i in np.linspace(0, n_states - 1, n_kept)})
        size = len(self.kept) * width
        n_groups = min(GROUPS, CKA_BYTES // (8 * size**2))
        self.n_windows, self.whole = 0, len(self.kept) == n_states
        self.count_G, self.sum_GX, self.product_GXX = (np.zeros((n_groups if n_groups >= 5 else 1, *shape)) for shape in ((), (size,), (size, size)))

    def add(self, states, in_BT):
        """states: h_0, h_1 .., (B, T, D); in: the tokens that count."""
        for b, in_T in enumerate(in_BT):
            x_NX = in_double(torch.cat([states[i][b][in_T] for i in self.kept], -1))
            group = self.n_windows % len(self.count_G)
            self.count_G[group] += len(x_NX)
            self.sum_GX[group] += x_NX.sum(0).cpu().numpy()
            self.product_GXX[group] += (x_NX.T @ x_NX).cpu().numpy()
            self.n_windows += 1

    def of(self, pairs, weight_G=None):
        """CKA of these pairs of the kept states, by their places; weights: how often each group counts (None: once)."""
        weight_G = np.ones(len(self.count_G)) if weight_G is None else weight_G
        n, sum_X, width = weight_G @ self.count_G, weight_G @ self.sum_GX, len(self.sum_GX[0]) // len(self.kept)
        if n < 2:
            return np.full(len(pairs), np.nan)
        part = lambda i: slice(i * width, (i + 1) * width)

        @functools.cache
        def norm2(i, j):                                      # ||X_i^T X_j||_F^2 of centred columns
            product_DD = np.einsum("g,gxy->xy", weight_G, self.product_GXX[:, part(i), part(j)]) - np.outer(sum_X[part(i)] / n, sum_X[part(j)])
            return np.square(product_DD).sum()

        with np.errstate(invalid="ignore", divide="ignore"):
            return np.array([norm2(min(i, j), max(i, j)) / np.sqrt(norm2(i, i) * norm2(j, j)) for i, j in pairs])

    def matrix(self):
        """CKA between every two of the kept states."""
        n = len(self.kept)
        return self.of(list(np.ndindex(n, n))).reshape(n, n)

    def neighbours(self, weight_G=None):
        """Mean CKA between what a step gave and what the next one gave; h_0, which no step gave, is left out."""
        return float(self.of([(i, i + 1) for i in range(1, len(self.kept) - 1)], weight_G).mean())

    def draws(self, seed=0):
        """neighbours of as many groups drawn with replacement, again and again; NaN where there is one group. Their mean is set
        to the number itself: tokens that are there twice look more alike than as many others would, so the draws alone lie too high."""
        rng, n = np.random.default_rng(seed), len(self.count_G)
        draw = lambda: np.bincount(rng.integers(n, size=n), minlength=n).astype(float)
        draws = np.array([self.neighbours(draw()) for _ in range(REDRAWN)]) if n > 1 else np.full(REDRAWN, np.nan)
        return draws - draws.mean() + self.neighbours()


def head_sums(attention, x_BTD, cos, sin, low):
    """Where each head looks, summed over rows and queries: (5, H) of the share of a query's attention that is on the previous
    token, on itself, on the first token; its entropy over that of an even spread, ln(tokens that it sees); and how many queries
    those are: all from a row's third on, where previous, itself and first are three tokens."""
    B, T, _ = x_BTD.shape
    K, total = attention.head_width, 0
    q_BTHK, k_BTGK = (rotate(linear(x_BTD, low.get(name)).unflatten(-1, (-1, K)), cos, sin)
                      for name, linear in (("query", attention.query), ("key", attention.key)))
    later_1TS = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).triu(1)[None]
    for q_THK, k_TGK in zip(at_least_fp32(q_BTHK), at_least_fp32(k_BTGK)):                     # a row at a time: (H, T, T) is large
        k_THK = k_TGK.repeat_interleave(q_THK.size(1) // k_TGK.size(1), 1)
        p_HTS = (torch.einsum("thk,shk->hts", q_THK, k_THK) / math.sqrt(K)).masked_fill(later_1TS, -math.inf).softmax(-1)
        spread_HT = torch.special.entr(p_HTS).sum(-1)[:, 2:] / torch.arange(3, T + 1, device=p_HTS.device).log()
        looks = (p_HTS.diagonal(-1, 1, 2)[:, 1:], p_HTS.diagonal(0, 1, 2)[:, 2:], p_HTS[:, 2:, 0], spread_HT, torch.ones_like(spread_HT))
        total = total + torch.stack([x_HT.sum(1) for x_HT in looks]).cpu().double()
    return total


def head_type(previous, itself, first, spread):
    """The place that has most of a head's attention, and at least HEAD_SHARE of it; else broadcast, as of the first token, where
    it is spread widely; else mixed. (Where the bounds lie is ours; the means are in eval.json.)"""
    share, kind = max((previous, 0), (itself, 1), (first, 2))
    return HEAD_TYPES[kind if share >= HEAD_SHARE else 2 if spread >= HEAD_SPREAD else 3]


class HeadWatch:
    """Inside `with`: where the heads of the core look in a forward pass, step by step. Attention is computed anew from each
    block's own weights, as kernels do not give it; so not where a step attends to the chosen alone, or to another step's keys."""

    def __init__(self, model):
        cfg = model.cfg
        self.why = f"router={cfg.router!r}" if cfg.router != "none" else f"kv={cfg.kv!r}" if cfg.kv != "own" else ""
        self.attentions = [] if self.why else [block.attention for block in model.recursion.core]
        self.sums, self.per_step = [], 1 if is_plain(cfg) else cfg.n_core

    def __enter__(self):
        self.n_heard, self.hooks = 0, [attention.register_forward_pre_hook(self.hear) for attention in self.attentions]

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def hear(self, attention, args):
        x_BTD, cos, sin, _, low = args
        if x_BTD.size(1) < 3:
            return                                            # not three places to look at
        self.sums += [0] * (self.n_heard == len(self.sums))
        self.sums[self.n_heard] = self.sums[self.n_heard] + head_sums(attention, x_BTD, cos, sin, low)
        self.n_heard += 1

    def numbers(self):
        """For each step its heads, block by block, and how many there are of each type."""
        names, steps = ("previous", "self", "first", "spread"), []
        for i in range(0, len(self.sums), self.per_step):
            blocks = [(sums_5H[:4] / sums_5H[4]).T.tolist() for sums_5H in self.sums[i : i + self.per_step]]
            heads = [{"block": j, "head": h, **dict(zip(names, looks)), "type": head_type(*looks)}
                     for j, block in enumerate(blocks) for h, looks in enumerate(block)]
            steps.append({"counts": {name: sum(head["type"] == name for head in heads) for name in HEAD_TYPES}, "heads": heads})
        return {"why": self.why, "steps": steps}


def in_tenths(initial_N, value_N, window_N, n_windows):
    """[(2, W)] of each tenth of the tokens, from those with the lowest initial loss to those with the highest: sums of value
    in each window, and counts."""
    tenth_N = np.empty(len(initial_N), int)
    tenth_N[initial_N.argsort(kind="stable")] = np.arange(len(initial_N)) * TENTHS // len(initial_N)
    cell_N, n_cells = tenth_N * n_windows + window_N, TENTHS * n_windows
    return np.stack([np.bincount(cell_N, value_N, n_cells), np.bincount(cell_N, minlength=n_cells)]).reshape(2, TENTHS, n_windows).swapaxes(0, 1)


def explained(x, y):
    """R^2 of a straight line through points, by least squares; further axes: many such sets."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (x * y).sum(0) ** 2 / ((x * x).sum(0) * (y * y).sum(0))


def improvement(initial_N, final_N, window_N, n_windows):
    """What the loop is worth to easy and to hard tokens: the loss at depth 0 minus that at full depth, mean of each tenth of
    the tokens by their loss at depth 0; and R^2 of the line through (mean loss at depth 0, mean improvement) of the ten [GRT: .49
    to 5.02 nats, R^2 .998]. Some of it is no merit: a token that depth 0 got wrong by chance is hard here and improves as chance does.
    (Who is in which tenth stays as it is when windows are drawn for the intervals.)"""
    gains, firsts = (in_tenths(initial_N, value_N, window_N, n_windows) for value_N in (initial_N - final_N, initial_N))
    x, y = (np.array([ratio(pair) for pair in pairs]) for pairs in (firsts, gains))
    better = np.stack([np.bincount(window_N, final_N < initial_N, n_windows), np.bincount(window_N, minlength=n_windows)])
    return {"initial": "depth 0", "tenths": [{"initial": a, "improvement": b} for a, b in zip(x.tolist(), y.tolist())],
            "hardest_minus_easiest": change(gains[0], gains[-1]), "better": number_of(better),
            "r2": number_of(*firsts, *gains, of=lambda means: explained(*np.split(means, 2)))}


def step_windows(run, s):
    return fixed_windows(run.split, min(s.eval_tokens, STEP_TOKENS))


@torch.no_grad()
def measure_steps(run, s):
    """(numbers for the record, its Cka)"""
    cfg, starts, depths = run.model.cfg, step_windows(run, s), readable(run.model.cfg)
    n_steps, sums, heads, nats, there = cfg.n_core if is_plain(cfg) else cfg.n_recur, Sums(), HeadWatch(run.model), [], []
    cka = Cka(n_steps + 1, cfg.n_embd)
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast, heads:
            p = taken_apart(run.model, ids_BT)
            nats.append(torch.stack([token_nats(run.model, p.features(p.states[r]), targets_BT) for r in depths]))
        there.append((targets_BT != -100).cpu())
        for name, values in movements(p).items():
            for r, x_BT, in_BT in values:
                sums.add(name, r, x_BT, in_BT)
        for r, took_BT in enumerate(p.took, 1):
            sums.add("took", r, took_BT, torch.ones_like(took_BT))
        for r, nats_BT in zip(depths, nats[-1]):
            sums.add("nats", r, nats_BT, there[-1])
        cka.add(p.states, torch.stack(p.took).all(0))
    in_WT, nats_RWT = torch.cat(there).numpy(), torch.cat(nats, 1).numpy()
    numbers = {"windows": len(in_WT), "tokens": int(in_WT.size), "layout": cfg.layout, "update": cfg.update, "router": cfg.router,
               "used": used(cfg, depth=[r / cfg.n_core if is_plain(cfg) else r for r in depths]), "steps": [step_numbers(sums, r, depths) for r in range(1, n_steps + 1)],
               "cka": {"states": cka.kept, "matrix": cka.matrix().tolist(), "neighbours": cka.neighbours() if cka.whole and n_steps > 1 else None},
               "improvement": improvement(nats_RWT[0][in_WT], nats_RWT[-1][in_WT], in_WT.nonzero()[0], len(in_WT)) if len(depths) > 1 else None,
               "heads": heads.numbers()}
    return {**numbers, "claims": step_claims(numbers, sums, n_steps) if not is_plain(cfg) else []}, cka


def step_numbers(sums, r, depths):
    """gain: the mean loss before the step minus that after it."""
    of = lambda name: number_of(sums[name, r]) if (name, r) in sums.rows else None
    gain = change(sums["nats", r], sums["nats", r - 1]) if {r - 1, r} <= {*depths} else None
    return {"step": r, "took": ratio(sums["took", r]), **{name: of(name) for name in ("update_norm", "relative_update", "update_cosine", "proposal_cosine")},
            "gain": gain, "nats_per_token": of("nats")}


def step_claims(n, sums, n_steps):
    """What GRT's paper says of the steps, on this run; a dense model has none. (Of steps that others take than the first one
    a difference would say little.)"""
    claims = []
    if n_steps > 1 and n["router"] == "none":
        falls = change(sums["update_norm", 1], sums["update_norm", n_steps])
        claims.append(judge("the update norm falls (last step minus first; Large: 17.6 to 6.5)", "GRT", **falls, below=0))
    if n["improvement"]:
        more, line = (n["improvement"][name] for name in ("hardest_minus_easiest", "r2"))
        claims += [judge("harder tokens improve more (hardest tenth minus easiest, nats; Large: 5.02 - .49)", "GRT", **more, above=0),
                   judge("the improvement is a straight line in the initial loss (R^2; Large: .998)", "GRT", **line, above=0.9)]
    return claims


def alike(run, cka, other, other_cka):
    """The claim that the states of neighbouring steps are more alike than a dense model's layers: mean CKA of neighbours here
    minus there."""
    draws = cka.draws() - other_cka.draws(seed=1 if why_unpaired(run, other) else 0)
    return judge(f"neighbouring steps are more alike than a dense model's layers (mean CKA minus that of {other.name})", "GRT",
                 value=cka.neighbours() - other_cka.neighbours(), interval=interval(draws), above=0)


def report_steps(runs, s):
    """How the state moves from step to step, to whom that is worth what, and where the heads look; one picture for all runs."""
    measured = [(run, *measure_steps(run, s)) for run in runs]
    (first, n, cka), tables = measured[0], [(run, n) for run, n, _ in measured]
    print(f"steps: how the state moves, on {n['windows']:,} fixed windows ({n['tokens']:,} tokens); k/L = the k-th of a dense model's L core blocks; "
          f"means over the tokens that took a step (cosines: it and the last one)")
    tell_unpaired(runs)
    show_steps(tables)
    show_improvement(tables)
    show_heads(tables)
    for run, other, other_cka in measured[1:]:
        if is_plain(run.model.cfg) and not is_plain(first.model.cfg) and None not in (n["cka"]["neighbours"], other["cka"]["neighbours"]):
            n["claims"].append(alike(first, cka, run, other_cka))
    return {**n, "picture": draw_steps(tables), "compare": [{**identity(run), "data": data(run), **n} for run, n in tables[1:]]}


def step_name(cfg, step):
    return depth_name(cfg, step / cfg.n_core if is_plain(cfg) else step)


def number(mean, form):
    """A table's cell of {"value": ...}, or of what is not there."""
    return "-" if mean is None else f"{mean['value']:{form}}"


def show_steps(measured):
    rows = []
    for run, n in measured:
        at = {state: i for i, state in enumerate(n["cka"]["states"])}
        for p in n["steps"]:
            r, gain = p["step"], p["gain"]
            near = f"{n['cka']['matrix'][at[r - 1]][at[r]]:.3f}" if r in at and r - 1 in at else "-"
            rows.append((run.name, step_name(run.model.cfg, r), f"{p['took']:.1%}", number(p["update_norm"], ".3f"),
                         show_interval(p["update_norm"]["interval"], ".3f"), number(p["relative_update"], ".3f"), number(p["update_cosine"], "+.3f"),
                         number(p["proposal_cosine"], "+.3f"), near, number(gain, "+.4f"), show_interval(gain and gain["interval"], "+.4f")))
    show(("run", "step", "took it", "||update||", "95% interval", "/ ||state||", "cos to last", "cos of proposals", "CKA to last", "loss drop",
          "95% interval"), rows)


def show_improvement(measured):
    rows = [(run.name, *(f"{tenth['improvement']:+.3f}" for tenth in n["improvement"]["tenths"]), number(n["improvement"]["r2"], ".3f"),
             number(n["improvement"]["better"], ".1%")) for run, n in measured if n["improvement"]]
    if rows:
        print("what the loop (dense: the core) gains, nats: tenths of the tokens by their loss at depth 0; R^2 of a line through them; tokens that got better")
        show(("run", "easiest", *(f"{i}" for i in range(2, TENTHS)), "hardest", "R^2", "better"), rows)
    for run, n in measured:
        if not n["improvement"]:
            print(f"{run.name}: one depth only, so there is no loss at depth 0 to improve on")


def show_heads(measured):
    rows = [(run.name, step_name(run.model.cfg, r), *(str(step["counts"][name]) for name in HEAD_TYPES))
            for run, n in measured for r, step in enumerate(n["heads"]["steps"], 1)]
    if rows:
        print(f"heads of the core by where they look: {HEAD_SHARE:.0%} or more of it on one place; broadcast: on the first token, or entropy at least "
              f"{HEAD_SPREAD:.0%} of an even spread's")
        show(("run", "step", *HEAD_TYPES), rows)
    for run, n in measured:
        if n["heads"]["why"]:
            print(f"{run.name}: heads are left out, as with {n['heads']['why']} a step attends to a part of the tokens, or to another step's keys")


def curve(axes, n, name, **style):
    """A line over the steps, with its intervals."""
    points = [(p["step"], p[name]["value"], p[name]["interval"]) for p in n["steps"] if p[name]]
    x, y = [r for r, *_ in points], [value for _, value, _ in points]
    (line,) = axes.plot(x, y, marker="o", markersize=4, **style)
    if points and all(pair for *_, pair in points):
        axes.fill_between(x, *zip(*(pair for *_, pair in points)), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return line


def draw_steps(measured):
    """OUT_DIR/steps.png: how far and whither the state moves, what that gains, and how alike the states are, a map for each run."""
    if (figure := new_figure(14, 8.5)) is None:
        return None
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    norms, cosines, gains = top.subplots(1, 3)
    for run, n in measured:
        label = plain(f"{n['layout']} {kind_of(run.model.cfg)} ({run.name})")
        color = curve(norms, n, "relative_update", label=label).get_color()
        curve(cosines, n, "update_cosine", color=color)
        curve(cosines, n, "proposal_cosine", color=color, linestyle="--")
        if n["improvement"]:
            gains.plot(range(1, TENTHS + 1), [tenth["improvement"] for tenth in n["improvement"]["tenths"]], marker="o", markersize=4, color=color)
    norms.set(title="How far a step moves the state", xlabel="step (dense: core block)", ylabel="||update|| / ||state||")
    by_decades(norms)
    for style, label in (("-", "updates"), ("--", "proposals")):
        cosines.plot([], [], style, color="grey", label=label)
    cosines.set(title="Cosine to the step before", xlabel="step (dense: core block)")
    gains.set(title="Improvement by tenth of the tokens", xlabel="tenth, by loss at depth 0 (10: hardest)", ylabel="loss at depth 0 minus at full depth, nats")
    gains.axhline(0, color="black", linewidth=0.8)
    every = [(is_plain(run.model.cfg), tenth["improvement"]) for run, n in measured if n["improvement"] for tenth in n["improvement"]["tenths"]]
    loops = [value for dense, value in every if not dense and math.isfinite(value)]
    if loops and max(loops) > 0:                              # a dense model's embedding alone has a loss beyond all others
        crop(gains, [value for _, value in every], 1.5 * max(loops))
    norms.legend(fontsize=7)
    cosines.legend(fontsize=8, loc="lower right")
    for axes in (norms, cosines, gains):
        axes.grid(alpha=0.3)
    maps = bottom.subplots(1, len(measured), squeeze=False)[0]
    for axes, (run, n) in zip(maps, measured):
        image = draw_cka(axes, run, n)
    bottom.suptitle("CKA between states (0: before the core)", fontsize=12)
    bottom.colorbar(image, ax=list(maps), shrink=0.8)
    return save_picture(figure, measured[0][0].home / "steps.png")


def draw_cka(axes, run, n):
    """The heat map of a run's states, with numbers in it where there is room for them."""
    matrix, states = np.array(n["cka"]["matrix"]), n["cka"]["states"]
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis", origin="lower")
    step = math.ceil(len(states) / 12)
    axes.set(xticks=range(0, len(states), step), yticks=range(0, len(states), step), xticklabels=states[::step], yticklabels=states[::step],
             xlabel="core block" if is_plain(run.model.cfg) else "step", ylabel="core block" if is_plain(run.model.cfg) else "step")
    axes.set_title(plain(f"{n['layout']} {kind_of(run.model.cfg)}\n" + textwrap.fill(run.name, 28, break_on_hyphens=True)), fontsize=8)
    for i, j in np.ndindex(matrix.shape) if len(states) <= 8 else ():
        axes.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=8, color="black" if matrix[i, j] > 0.6 else "white")
    return image


# ------------------------------------------------------------------------------------------------------------- part: gate

OPEN, SHUT = 0.05, 0.95       # a feature's gate below is open to the proposal, above it keeps the state
TOP_VALUES = 8                # singular values that are told


def gate_values(p):
    """{name: for each step (its number, a value of each token (B, T), the tokens that count)}, of a gated Pass p, over the tokens
    that took the step. g: all features alike; 1 keeps the state, 0 takes the proposal.

    gate, square    mean over features of g, of g^2 (for the spread over tokens and features)     [GRT: mean .82 -> .87]
    shut, open      share of features with g > .95, with g < .05                                   [GRT: shut 19.7% -> 28.8%]
    openness        ||(1 - g) (o - h)|| / ||o||, h the state before: how much of a proposal gets through [GRT: .182 -> .066]"""
    mean = lambda of: [(r, in_double(of(g_BTD)).mean(-1), took_BT) for r, (g_BTD, took_BT) in enumerate(zip(p.gates, p.took), 1)]
    through = [(1 - g_BTD) * (o_BTD - h_BTD) for g_BTD, o_BTD, h_BTD in zip(p.gates, p.proposals, p.states)]
    return {"gate": mean(lambda g: g), "square": mean(lambda g: in_double(g).square()),
            "shut": mean(lambda g: g > SHUT), "open": mean(lambda g: g < OPEN),
            "openness": [(r, x_BTD.norm(dim=-1) / o_BTD.norm(dim=-1), took_BT)
                         for r, (x_BTD, o_BTD, took_BT) in enumerate(zip(through, p.proposals, p.took), 1)]}


def correlation(x_N, y_N, window_N, n_windows):
    """Pearson's, over tokens; its interval by windows, from their sums of 1, x, y, x^2, y^2, x y."""
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()             # or large means would cost digits
    counts = np.bincount(window_N, minlength=n_windows)
    sums_5W = np.stack([np.bincount(window_N, value_N, n_windows) for value_N in (x_N, y_N, x_N * x_N, y_N * y_N, x_N * y_N)])
    return statistic(sums_5W, counts, lambda m: (m[4] - m[0] * m[1]) / np.sqrt((m[2] - m[0] ** 2) * (m[3] - m[1] ** 2)))


def difficulty(nats_N, open_N, window_N, n_windows):
    """Does the gate open for hard tokens? Correlation of a token's mean of 1 - g with its loss at depth 0, and the mean of each
    tenth of the tokens by that loss."""
    return {**correlation(open_N, nats_N, window_N, n_windows), "tenths": [ratio(pair) for pair in in_tenths(nats_N, open_N, window_N, n_windows)]}


def gate_weights(update):
    """What the gate and the adapter listen to: W1's two halves, state and anchor, by their singular values and Frobenius norms
    (before it both are normed), and the cosine between row i of W_proj's state half and row i of its anchor half, over the rows."""
    exact = lambda linear: linear.weight.detach().cpu().double()
    halves = dict(zip(("state", "anchor"), exact(update.gate.up).chunk(2, 1)))
    norms = {name: half_DD.norm().item() for name, half_DD in halves.items()}
    cos_D = F.cosine_similarity(exact(update.from_state), exact(update.from_anchor), dim=1)
    values = lambda w: torch.linalg.svdvals(w) if w.isfinite().all() else torch.full((len(w),), math.nan, dtype=w.dtype)         # a run that diverged
    return {"singular_values": {name: values(half_DD)[:TOP_VALUES].tolist() for name, half_DD in halves.items()},
            "frobenius": {**norms, "state_over_anchor": norms["state"] / norms["anchor"] if norms["anchor"] else math.inf},
            "projection_row_cosine": {"mean": cos_D.mean().item(), "std": cos_D.std(correction=0).item()}}


@torch.no_grad()
def measure_gate(run, s):
    cfg, starts, sums, R = run.model.cfg, step_windows(run, s), Sums(), run.model.cfg.n_recur
    there, nats, opens, tooks, counts = [], [], [], [], np.zeros((R, BINS), int)
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast:
            p = taken_apart(run.model, ids_BT)
            nats.append(token_nats(run.model, p.features(p.states[0]), targets_BT).numpy())
        there.append((targets_BT != -100).cpu().numpy())
        for name, values in gate_values(p).items():
            for r, x_BT, in_BT in values:
                sums.add(name, r, x_BT, in_BT)
        for r, (g_BTD, took_BT) in enumerate(zip(p.gates, p.took)):
            counts[r] += torch.bincount(bins(g_BTD[took_BT].flatten()), minlength=BINS).cpu().numpy()
        opens.append(torch.stack([1 - in_double(g_BTD).mean(-1) for g_BTD in p.gates]).cpu().numpy())
        tooks.append(torch.stack(p.took).cpu().numpy())
    in_WT, nats_WT, open_RWT, took_RWT = np.concatenate(there), np.concatenate(nats), np.concatenate(opens, 1), np.concatenate(tooks, 1)
    hard = lambda open_WT, in_WT: difficulty(nats_WT[in_WT], open_WT[in_WT], in_WT.nonzero()[0], len(in_WT)) if in_WT.any() else None
    steps_WT = took_RWT.sum(0)
    whole_WT = (open_RWT * took_RWT).sum(0) / np.maximum(1, steps_WT)
    steps = [{**gate_numbers(sums, r), "histogram": counts[r - 1].tolist(), "difficulty": hard(open_RWT[r - 1], in_WT & took_RWT[r - 1])}
             for r in range(1, R + 1)]
    return {"windows": len(in_WT), "tokens": int(in_WT.size), "layout": cfg.layout, "router": cfg.router, "used": used(cfg, depth=[0, R]), "steps": steps,
            "difficulty": hard(whole_WT, in_WT & (steps_WT > 0)), "weights": gate_weights(run.model.recursion.update), "claims": gate_claims(cfg, sums, R)}


def gate_numbers(sums, r):
    """std: over tokens and features of one step."""
    mean = {name: number_of(sums[name, r]) for name in ("gate", "shut", "open", "openness")}
    return {"step": r, **mean, "std": math.sqrt(max(0.0, ratio(sums["square", r]) - mean["gate"]["value"] ** 2))}


def gate_claims(cfg, sums, R):
    """What GRT's paper says of the gate, on this run: the last step minus the first, where the same tokens take both."""
    rises = lambda name, **side: change(sums[name, 1], sums[name, R]) | side
    return [judge("the gate's mean rises (last step minus first; Large: .82 to .87)", "GRT", **rises("gate", above=0)),
            judge("the share of g > .95 rises (the same; Large: .197 to .288)", "GRT", **rises("shut", above=0)),
            judge("openness falls (the same; Large: .182 to .066)", "GRT", **rises("openness", below=0))] if R > 1 and cfg.router == "none" else []


def report_gate(runs, s):
    """What the gate keeps, step by step, whom it opens for, and what it listens to: every gated run; one picture."""
    for run in runs:
        if run.model.cfg.update != "gate":
            print(f"note: {run.name} has no gate, so it has no part in what follows", file=sys.stderr)
    measured = [(run, measure_gate(run, s)) for run in runs if run.model.cfg.update == "gate"]
    n = measured[0][1]
    print(f"gate: g = 1 keeps the state, 0 takes the proposal, on {n['windows']:,} fixed windows ({n['tokens']:,} tokens); openness = ||(1-g)(o-h)|| / ||o||; "
          f"r: correlation of a token's mean 1-g with its loss at depth 0")
    tell_unpaired([run for run, _ in measured])
    show_gate(measured)
    return {**n, "picture": draw_gate(measured), "compare": [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]}


def show_gate(measured):
    show(("run", "step", "mean g", "95% interval", "std", f"g > {SHUT:g}", f"g < {OPEN:g}", "openness", "95% interval", "r", "95% interval"),
         [(run.name, str(p["step"]), number(p["gate"], ".4f"), show_interval(p["gate"]["interval"], ".4f"), f"{p['std']:.4f}",
           number(p["shut"], ".1%"), number(p["open"], ".1%"), number(p["openness"], ".4f"), show_interval(p["openness"]["interval"], ".4f"), number(p["difficulty"], "+.3f"),
           show_interval(p["difficulty"] and p["difficulty"]["interval"], "+.3f")) for run, n in measured for p in n["steps"]])
    print("mean 1-g over the steps that a token took: tenths of the tokens by their loss at depth 0")
    show(("run", "easiest", *(f"{i}" for i in range(2, TENTHS)), "hardest", "r", "95% interval"),
         [(run.name, *(f"{value:.4f}" for value in n["difficulty"]["tenths"]), number(n["difficulty"], "+.3f"),
           show_interval(n["difficulty"]["interval"], "+.3f")) for run, n in measured if n["difficulty"]])
    for run, n in measured:
        w = n["weights"]
        values = ", ".join(f"{name} {' '.join(f'{value:.2f}' for value in w['singular_values'][name][:4])} ..." for name in ("state", "anchor"))
        print(f"{run.name}: W1's halves by their singular values: {values}; Frobenius, state over anchor {w['frobenius']['state_over_anchor']:.3f}; "
              f"W_proj: cosine of its halves' rows {w['projection_row_cosine']['mean']:+.3f} +- {w['projection_row_cosine']['std']:.3f}")


def draw_gate(measured):
    """OUT_DIR/gate.png: the first run's gates in each step; mean and openness by step and difficulty, a line for each run."""
    if (figure := new_figure(13, 8)) is None:
        return None
    (spread, means), (opens, hard) = figure.subplots(2, 2)
    from matplotlib import colormaps
    (run, n), edges = measured[0], np.linspace(0, 1, BINS + 1)
    for p in n["steps"]:
        total = max(1, sum(p["histogram"]))
        color = colormaps["viridis"](0.9 * (p["step"] - 1) / max(1, len(n["steps"]) - 1))
        spread.stairs([count / total for count in p["histogram"]], edges, label=f"step {p['step']}", color=color)
    spread.set(title=plain(f"Gates of all features and tokens ({run.name})"), xlabel="g", ylabel="share", xlim=(0, 1), yscale="log")
    spread.legend(fontsize=8, loc="upper left")
    for run, n in measured:
        color = curve(means, n, "gate", label=plain(f"{n['layout']} ({run.name})")).get_color()
        curve(means, n, "shut", color=color, linestyle="--")
        curve(opens, n, "openness", color=color)
        if n["difficulty"]:
            hard.plot(range(1, TENTHS + 1), n["difficulty"]["tenths"], marker="o", markersize=4, color=color)
    means.plot([], [], "--", color="grey", label=f"share of g > {SHUT:g}")
    means.set(title="Mean gate", xlabel="step", ylim=(-0.03, 1.03))
    means.legend(fontsize=8)
    opens.set(title="Openness: how much of a proposal gets through", xlabel="step", ylabel="||(1-g)(o-h)|| / ||o||", ylim=(0, None))
    hard.set(title="Does the gate open for hard tokens?", xlabel="tenth of the tokens, by loss at depth 0 (10: hardest)", ylabel="mean 1-g")
    for axes in (spread, means, opens, hard):
        axes.grid(alpha=0.3)
    return save_picture(figure, measured[0][0].home / "gate.png")


# ------------------------------------------------------------------------------------------------------------- part: exit

TRIED = {"kl": [1e-4, 1e-3, 1e-2, 0.1, 1.0], "cdf": [0.9, 0.7, 0.5, 0.3, 0.1]}          # from late to early
REPEATS = 5                   # of a timing, interleaved; the median counts


def rules_of(model):
    """The exit rules that a model can follow, and why not where there is none."""
    why, rules = "", []
    for rule in filter(None, EXITS):
        try:
            rules += [rule] if model.check_exit(rule, None) is not None else []
        except ValueError as error:
            why = why or str(error)
    return rules, why


def full_pass(model, ids_BT, exit=None, exit_threshold=None, choose=causal, threshold=None, depth=None):
    """(what the head reads, steps taken (B, T)) of a forward pass. depth: None = n_recur. exit: the rule by which tokens leave early
    (None: none does); choose, threshold: how routers choose."""
    cache = no_cache(model.cfg, exit)
    e_BTD, outer = model.start(ids_BT, cache, threshold=threshold)
    watch = EXITS[exit](model, outer, cache, exit_threshold)
    h_BTD, who = model.recursion(e_BTD, outer._replace(choose=choose), model.check_depth(depth), Silence(), cache, watch)
    return watch.features(h_BTD, who), steps_taken(who, ids_BT)


@torch.no_grad()
def exit_point(run, starts, rule, threshold):
    """Loss, steps and FLOPs per token of one threshold, the score's own included."""
    cfg, nats, counts, load = run.model.cfg, 0.0, 0.0, 0
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast:
            x_BTD, depth_BT = full_pass(run.model, ids_BT, rule, threshold)
            nats_B, count_B = row_nats(run.model, x_BTD, targets_BT)
        nats, counts = nats + nats_B.sum().item(), counts + count_B.sum().item()
        load = load + count_depths(depth_BT, cfg.n_recur)
    mean, shares = mean_depth(load.tolist()), (load / load.sum()).tolist()
    flops = cfg.flops_per_token(cfg.block_size, depth=mean, exit=rule) if cfg.router == "none" else None       # of routed models: not counted
    return {"rule": rule, "threshold": threshold, "mean_depth": mean, "depth_shares": shares, "flops_per_token": flops,
            "nats_per_token": nats / counts, "bits_per_byte": nats / counts * run.bits}


@torch.inference_mode()
def time_exits(run, starts, points, n_tokens):
    """Adds to each point the median milliseconds of decoding one token more of real text, one row, with a cache, and the mean
    steps of those tokens. Points take turns."""
    from bench import clock                                   # here: bench.py takes its figures from this file
    n = min(n_tokens, run.model.cfg.block_size - 1)
    ids_1T, took = run.split.batch([int(starts[0])], run.device)[0][:, : n + 1], [[] for _ in points]
    for repeat in range(-1, REPEATS):                         # the first round warms up
        for point, ms in zip(points, took):
            with run.autocast:
                cache, steps = make_cache(run.model, 1, n + 1, exit=point["rule"]), 0
                run.model.feed(ids_1T[:, :1], cache, exit=point["rule"], exit_threshold=point["threshold"])
                start = clock(run.device)
                for i in range(1, n + 1):
                    run.model.feed(ids_1T[:, i : i + 1], cache, exit=point["rule"], exit_threshold=point["threshold"])
                    steps += int(cache.taken_BT)
                seconds = clock(run.device) - start
            point["timed_depth"] = steps / n
            ms += [seconds / n * 1e3] * (repeat >= 0)
    for point, ms in zip(points, took):
        point["ms_per_token"] = float(np.median(ms))


def fit_line(points):
    """ms per token = a + b x steps by least squares, and how much of the variance that explains."""
    from bench import line
    x, y = [p["timed_depth"] for p in points], [p["ms_per_token"] for p in points]
    return line(x, y) if len(set(x)) > 1 else None            # no line through one depth


def measure_exit(run, s):
    rules, why = rules_of(run.model)
    if not rules:
        return {"why": why, "points": []}
    starts = fixed_windows(run.split, s.eval_tokens)
    points = [exit_point(run, starts, None, None)]
    points += [exit_point(run, starts, rule, t) for rule in rules for t in s.exit_thresholds or TRIED[rule] if rule != "cdf" or t <= 1]
    if s.exit_tokens:
        time_exits(run, starts, points, s.exit_tokens)
    fits = {rule: fit_line([p for p in points if p["rule"] == rule]) for rule in rules if s.exit_tokens}
    tried = {name: list(dict.fromkeys(p[key] for p in points)) for name, key in (("exit", "rule"), ("exit_threshold", "threshold"))}
    return {"windows": len(starts), "layout": run.model.cfg.layout, "used": used(run.model.cfg, **tried), "points": points, "fits": fits}


def report_exit(runs, s):
    """Loss, steps, FLOPs and time per token when tokens leave early; one picture for all runs."""
    measured = [(run, measure_exit(run, s)) for run in runs]
    print(f"exit: tokens leave the loop by their own score, on {measured[0][1].get('windows', 0):,} fixed windows; MFLOP count the score, and the coda that it "
          f"reads; ms: one row decoded token by token with a cache")
    tell_unpaired(runs)
    number = lambda p, name, form: f"{p[name]:{form}}" if p.get(name) is not None else "-"
    show(("run", "rule", "threshold", "mean depth", "MFLOP/token", "nats/token", "bits/byte", "ms/token", "at depth"),
         [(run.name, p["rule"] or "none", number(p, "threshold", "g"), f"{p['mean_depth']:.3f}",
           "-" if p["flops_per_token"] is None else f"{p['flops_per_token'] / 1e6:,.3f}", f"{p['nats_per_token']:.4f}", show_bits(p),
           number(p, "ms_per_token", ".3f"), number(p, "timed_depth", ".3f")) for run, n in measured for p in n["points"]])
    for run, n in measured:
        if not n["points"]:
            print(f"{run.name}: no early exit: {n['why']}")
        for rule, line in n.get("fits", {}).items():
            print(f"{run.name}: {rule}: " + ("all thresholds end at one depth" if line is None else
                  f"ms per token = {line['a_ms']:.3f} + {line['b_ms']:.3f} x mean steps, R^2 {line['r2']:.3f}"))
    others = [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]
    return {**measured[0][1], "picture": draw_exit(measured), "compare": others}


def draw_exit(measured):
    """OUT_DIR/exit.png: loss against mean steps, a line for each run and rule, a ring where nobody leaves early."""
    unit, drawn = common_unit([run for run, _ in measured]), [p for _, n in measured for p in n["points"]]
    if not drawn or (figure := new_figure(8, 5)) is None:
        return None
    axes, n_lines = figure.subplots(), 0
    extent = [max(p[name] for p in drawn) - min(p[name] for p in drawn) for name in ("mean_depth", unit)]
    for run, n in measured:
        for rule in dict.fromkeys(p["rule"] for p in n["points"] if p["rule"]):
            points = sorted((p for p in n["points"] if p["rule"] == rule), key=lambda p: p["mean_depth"])
            (line,) = axes.plot([p["mean_depth"] for p in points], [p[unit] for p in points], marker="o", markersize=4,
                                label=plain(f"{n['layout']} by {rule} ({run.name})"))
            n_lines += 1
            above = 8 * n_lines - 2 if n_lines % 2 else -6 - 5 * n_lines               # the first line's numbers stand above it, the second's below, ...
            for text, place in joined_labels([(p["mean_depth"], p[unit], p["threshold"]) for p in points], extent):
                axes.annotate(text, place, textcoords="offset points", xytext=(0, above), ha="center", fontsize=8,
                              color=line.get_color())
            axes.plot(n["points"][0]["mean_depth"], n["points"][0][unit], "o", markersize=11, fillstyle="none", color=line.get_color())
    axes.margins(0.06, 0.12)                                  # for the numbers
    axes.set(xlabel="mean steps per token", ylabel=f"validation loss, {unit.replace('_', ' ')}",
             title="Leaving early (number: threshold; ring: nobody leaves early)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save_picture(figure, measured[0][0].home / "exit.png")


def joined_labels(points, extent):
    """[(text, (x, y))] of points (x, y, number): those that would lie on each other have one label. extent: of the picture, in x and in y."""
    groups = []
    for point in points:
        if groups and all(abs(a - b) <= 0.05 * size for a, b, size in zip(groups[-1][0], point, extent)):
            groups[-1].append(point)
        else:
            groups.append([point])
    numbers = [sorted({number for _, _, number in group}) for group in groups]
    return [((", " if len(each) < 3 else " ... ").join(f"{number:g}" for number in dict.fromkeys(each[:1] + each[-1:])), group[0][:2])
            for each, group in zip(numbers, groups)]


# ----------------------------------------------------------------------------------------------------------- part: router

TOPK = "top-k (not causal)"   # training's choice: the k best of a row, for which a token's fate hangs on later ones
LOT = "as many by lot"        # the floor
BINS = 20                     # of a score in 0..1
PANELS = 4                    # histograms in the picture

CLASSES = ("word start", "continuation", "opening mark", "closing mark", "after an opening mark", "whitespace", "other")
START, CONTINUATION, OPENING, CLOSING, AFTER, WHITESPACE, OTHER = range(len(CLASSES))


def character_kind(c):
    """What a character is, as the class of a token that begins with it. An opening and a closing mark is a bracket; a quote
    may be either, and is other. U+FFFD is a byte that is no character by itself: a part of one, most often of a letter."""
    return (OPENING if c in "([{" else CLOSING if c in ")]}" else WHITESPACE if c.isspace() else
            START if c.isalnum() or c in "_\ufffd" else OTHER)


class TokenClasses:
    """Each token's class, by its first character that is no whitespace and by the character before that one, which is in
    the token too (" the") or ends the token before. In this order:

    whitespace             there is no such character: the token is spaces, tabs, line ends
    opening, closing mark  it is one of ( [ {, or of ) ] }
    after an opening mark  the character before it is ( [ or {
    word start             it is a letter, digit or _, and the one before it is none of these
    continuation           the same, and so is the one before it
    other                  the rest: punctuation, quotes, operators, end-of-text

    A window's first token follows nothing, and so does what comes after end-of-text. With a token per byte the rule is
    the same; all bytes of a character beyond ASCII count as letters."""

    def __init__(self, tokenizer, vocab_size):
        special, rows = set(tokenizer._special_tokens.values()), []
        for token in range(vocab_size):
            try:
                text = "" if token in special else tokenizer.decode_single_token_bytes(token).decode("utf-8", "replace")
            except KeyError:                                  # the table is longer than the tokenizer's, or that has gaps
                text = ""
            first = character_kind((text.lstrip() or text)[0]) if text else OTHER
            rows.append((first, character_kind(text[-1]) if text else OTHER, not text or text[0].isspace()))
        self.first_V, self.last_V, self.apart_V = (torch.tensor(column) for column in zip(*rows))      # apart: from the token before

    def of(self, ids_BT):
        """(B, T) indices into CLASSES, on the CPU."""
        ids_BT = ids_BT.cpu()
        first_BT = self.first_V[ids_BT]
        before_BT = F.pad(self.last_V[ids_BT[:, :-1]], (1, 0), value=OTHER).masked_fill(self.apart_V[ids_BT], WHITESPACE)
        free_BT = (first_BT == START) | (first_BT == OTHER)   # no mark and no space
        class_BT = first_BT.masked_fill((first_BT == START) & (before_BT == START), CONTINUATION)
        return class_BT.masked_fill(free_BT & (before_BT == OPENING), AFTER)


class Lot:
    """In place of topk: as many tokens of each row, drawn by lot, and the score of each is still its own. So it shows what
    choosing is worth. A draw is a function of row and step alone; `first`: how many rows came before this batch."""

    def __init__(self, first):
        self.first, self.step = first, 0

    def __call__(self, by_BC, decided_BC, share, T, real_BC):
        self.step += 1
        draws = [torch.rand(by_BC.size(1), generator=generator(fold_in(0, "lot", self.first + b, self.step))) for b in range(len(by_BC))]
        return topk(torch.stack(draws).to(by_BC.device), decided_BC, share, T, real_BC)


def routed_pass(model, ids_BT, choose, threshold):
    """(what the head reads, steps taken (B, T), what routers were asked: see RouterWatch) at full depth, tokens chosen by
    `choose`. Token-choice models choose in one way only."""
    with RouterWatch(model) as watch:
        x_BTD, depth_BT = full_pass(model, ids_BT, choose=choose, threshold=threshold)
    return x_BTD, depth_BT, watch.asked(depth_BT)


class Tally:
    """What one way of choosing came to: nats of each window, steps of each token, and at each step how the tokens that were
    asked fall on the router's scores, those who went on (row 1) and those who did not (row 0) apart."""

    def __init__(self, cfg, bits):
        self.cfg, self.bits, self.nats, self.depths = cfg, bits, [], []
        self.score_counts = np.zeros((cfg.n_recur, 2, BINS), int)
        self.yes_counts = np.zeros((cfg.n_recur, 2, 2), int)      # by going on, by reaching the threshold

    def add(self, nats_B, depth_BT, asked):
        self.nats.append(nats_B.numpy())
        self.depths.append(depth_BT.cpu().numpy().astype(np.int16))
        for step, heard in enumerate(asked):
            if heard is not None:
                logit_N, went_N = heard[0], heard[1].long()
                self.score_counts[step] += grid(went_N, bins(logit_N.sigmoid()), BINS)
                self.yes_counts[step] += grid(went_N, (logit_N >= as_logit(self.cfg.threshold)).long(), 2)

    @property
    def depth_WT(self):
        return np.concatenate(self.depths)

    def numbers(self, counts):
        loss, depth_WT = loss_of(np.concatenate(self.nats), counts), self.depth_WT
        return {**loss, "bits_per_byte": loss["nats_per_token"] * self.bits, "mean_depth": float(depth_WT.mean()),
                "depth_shares": depth_shares(depth_WT, self.cfg.n_recur), "flops_per_token": flops_at(self.cfg, step_shares(depth_WT, self.cfg.n_recur))}

    def minus(self, other, counts):
        return paired(np.concatenate(self.nats), np.concatenate(other.nats), counts)


def bins(score_N):
    return (score_N * BINS).nan_to_num(0).long().clamp(0, BINS - 1)          # a run that diverged has NaN


def grid(row_N, column_N, n_columns):
    return torch.bincount(row_N * n_columns + column_N, minlength=2 * n_columns).view(2, n_columns).cpu().numpy()


def depth_shares(depths, n_recur):
    """Share of the tokens at depth 0, 1 .. n_recur."""
    return (np.bincount(depths.flatten(), minlength=n_recur + 1) / max(1, depths.size)).tolist()


def step_shares(depths, n_recur):
    """Share of the tokens that took each step."""
    return [float((depths > step).mean()) for step in range(n_recur)]


def flops_at(cfg, shares, depth=None):
    """FLOPs per token of a routed model whose step r was taken by shares[r] of all tokens (None: n_recur steps), in a whole
    context. (Attention as if all windows had the mean: a little less than the mean over windows.)"""
    return exact_flops(cfg, cfg.block_size, cfg.n_recur if depth is None else depth, shares.__getitem__)


def by_class(depth_WT, class_WT, n_recur):
    """{class: how many tokens, their mean depth, their shares at depth 0 .. n_recur}"""
    members = {name: depth_WT[class_WT == i] for i, name in enumerate(CLASSES)}
    return {name: {"count": len(depths), "mean_depth": float(depths.mean()) if len(depths) else None, "depth_shares": depth_shares(depths, n_recur)}
            for name, depths in members.items()}


def ways(cfg, thresholds, first):
    """{name or threshold: (how tokens are chosen, threshold)}, for a batch that `first` rows came before."""
    own = {"causal": (causal, cfg.threshold)}
    return own if cfg.router == "token" else {**own, "topk": (topk, cfg.threshold), "lot": (Lot(first), cfg.threshold),
                                              **{threshold: (causal, threshold) for threshold in thresholds if cfg.router_choice == "score"}}


@torch.no_grad()
def walk(run, starts, thresholds):
    """({way: Tally}, targets of each window, class of each token (W, T), token-choice: histogram of p of the depth chosen)."""
    model, cfg = run.model, run.model.cfg
    kinds, classes, counts, p_counts = TokenClasses(run.tokenizer, cfg.vocab_size), [], [], np.zeros(BINS, int)
    tallies = {name: Tally(cfg, run.bits) for name in ways(cfg, thresholds, 0)}
    for ids_BT, targets_BT in batches(run, starts):
        for name, way in ways(cfg, thresholds, sum(map(len, counts))).items():
            with run.autocast:
                x_BTD, depth_BT, asked = routed_pass(model, ids_BT, *way)
                nats_B, count_B = row_nats(model, x_BTD, targets_BT)
            tallies[name].add(nats_B, depth_BT, asked)
        if cfg.router == "token":
            p_counts += chosen_scores(model, ids_BT, depth_BT, run.autocast)
        classes.append(kinds.of(ids_BT))
        counts.append(count_B)
    return tallies, torch.cat(counts).numpy(), torch.cat(classes).numpy(), p_counts


def chosen_scores(model, ids_BT, depth_BT, autocast):
    """Token-choice: histogram of the score that each token gives the depth that it chose."""
    router = model.recursion.router
    with autocast:
        p_BTR = router.score(router.unit(model.start(ids_BT, no_cache(model.cfg))[0]))
    p_N = p_BTR.gather(-1, depth_BT[..., None] - 1).flatten()
    return torch.bincount(bins(p_N), minlength=BINS).cpu().numpy()


def measure_router(run, s):
    cfg, starts = run.model.cfg, fixed_windows(run.split, s.eval_tokens)
    tallies, counts, class_WT, p_counts = walk(run, starts, {*s.thresholds} - {cfg.threshold})
    causal = tallies["causal"]
    numbers = {"router": cfg.router, "layout": cfg.layout, "windows": len(counts), "tokens": int(counts.sum()), "block_size": cfg.block_size,
               **causal.numbers(counts), "classes": by_class(causal.depth_WT, class_WT, cfg.n_recur)}
    numbers["kv"] = measure_kv(run, starts) if cfg.n_recur > 1 else None
    return numbers | (token_numbers if cfg.router == "token" else expert_numbers)(cfg, tallies, counts, p_counts)


def token_numbers(cfg, tallies, counts, p_counts):
    load = np.bincount(tallies["causal"].depth_WT.flatten(), minlength=cfg.n_recur + 1).tolist()
    return {"max_vio": max_vio(load), "scores": p_counts.tolist()}


def expert_numbers(cfg, tallies, counts, p_counts):
    causal, best, lot = (tallies[name] for name in ("causal", "topk", "lot"))
    asks = cfg.router_choice == "score"                       # a lot has no threshold and no scores to agree with
    choices = [step for step in range(cfg.n_recur) if cfg.capacities[step] < 1 and asks]
    dead_T = (best.depth_WT < cfg.n_recur).all(0)
    dial = {cfg.threshold: causal, **{way: tally for way, tally in tallies.items() if not isinstance(way, str)}} if asks else {}
    return {"threshold": cfg.threshold if asks else None, "used": used(cfg, routing=["causal", "topk", "lot"], threshold=sorted(dial)), "capacities": cfg.capacities,
            "topk": {"causal": False, **best.numbers(counts), "minus_causal": best.minus(causal, counts)},
            "lot": {**lot.numbers(counts), "minus_topk": lot.minus(best, counts), "minus_causal": lot.minus(causal, counts)},
            "accuracy": {"pooled": agreement(best.yes_counts[choices].sum(0)), "steps": {step: agreement(best.yes_counts[step]) for step in choices}},
            "dead": {"ratio": float(dead_T.mean()), "positions": len(dead_T), "windows": len(counts)},
            "scores": {step: dict(zip(("left", "chosen"), best.score_counts[step].tolist())) for step in choices},
            "thresholds": [{"threshold": threshold, "own": threshold == cfg.threshold, **tally.numbers(counts)}
                           for threshold, tally in sorted(dial.items())]}


def report_router(runs, s):
    """Who goes on, by which choice, at what loss: every routed run; one picture."""
    for run in runs:
        if run.model.cfg.router == "none":
            print(f"note: {run.name} has no router, so it has no part in what follows", file=sys.stderr)
    measured = [(run, measure_router(run, s)) for run in runs if run.model.cfg.router != "none"]
    n = measured[0][1]
    print(f"router: who goes on, on {n['windows']:,} fixed windows ({n['tokens']:,} tokens)")
    tell_unpaired([run for run, _ in measured])
    show_choices(measured)
    show_shares(measured)
    show_accuracy(measured)
    show_thresholds(measured)
    for run, n in measured:
        show_classes(run, n)
    show_kv(measured)
    others = [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]
    claims = kv_claims(measured[0][1]["kv"]) if measured[0][1]["kv"] else []
    return {**measured[0][1], "claims": claims, "picture": draw_router(measured), "compare": others}


def show_choices(measured):
    rows = []
    for run, n in measured:
        causal = "token-choice" if n["router"] == "token" else "causal, by lot" if n["threshold"] is None else f"causal, threshold {n['threshold']:g}"
        for name, way in [(causal, n)] + [(name, n[key]) for name, key in ((TOPK, "topk"), (LOT, "lot")) if key in n]:
            d = way.get("minus_causal")
            rows.append((run.name, name, f"{way['nats_per_token']:.4f}", show_interval(way["interval"], ".4f"), show_bits(way),
                         f"{way['mean_depth']:.3f}", f"{way['flops_per_token'] / 1e6:,.3f}",
                         *((f"{d['value']:+.4f}", show_interval(d["interval"], "+.4f")) if d else ("-", "-"))))
    head = ("run", "who goes on", "nats/token", "95% interval", "bits/byte", "mean depth", "MFLOP/token", "minus causal", "95% interval")
    show(head, rows)


def show_shares(measured):
    """Shares of the tokens at each depth, as they decide for themselves (causal)."""
    deepest = max(len(n["depth_shares"]) for _, n in measured)
    low = 0 if any(n["depth_shares"][0] for _, n in measured) else 1
    print("share of the tokens at each depth (causal)")
    show(("run", *(f"depth {depth}" for depth in range(low, deepest)), "MaxVio"),
         [(run.name, *(f"{share:.1%}" for share in n["depth_shares"][low:]), *[""] * (deepest - len(n["depth_shares"])),
           f"{n['max_vio']:.3f}" if "max_vio" in n else "-") for run, n in measured])


def show_accuracy(measured):
    """Does a token know by itself what top-k would say?"""
    rate = lambda value: "-" if value is None else f"{value:.3f}"
    rows = [(run.name, str(step), f"{a['asked']:,}", f"{a['chosen']:,}", *(rate(a[name]) for name in RATES))
            for run, n in measured if n["router"] == "expert" and n["scores"]
            for step, a in [*n["accuracy"]["steps"].items(), ("all", n["accuracy"]["pooled"])]]
    if rows:
        print(f"the threshold's answer against membership of {TOPK}, among the tokens asked")
        show(("run", "step", "asked", "chosen", *(name.replace("_", " ") for name in RATES)), rows)
    for run, n in measured:
        if dead := n.get("dead"):
            print(f"{run.name}: dead tokens {dead['ratio']:.1%}: of {dead['positions']:,} positions, those that {TOPK} sends through the last step "
                  f"in none of {dead['windows']:,} windows")


RATES = ("accuracy", "balanced", "true_positive", "true_negative")


def show_thresholds(measured):
    rows = [(run.name, f"{p['threshold']:g}", f"{p['mean_depth']:.3f}", f"{p['flops_per_token'] / 1e6:,.3f}", f"{p['nats_per_token']:.4f}",
             "the model's own" * p["own"]) for run, n in measured for p in n.get("thresholds", ())]
    if rows:
        print("the threshold as a dial (causal)")
        show(("run", "threshold", "mean depth", "MFLOP/token", "nats/token", ""), rows)


def show_classes(run, n):
    print(f"{run.name}: depth by kind of token (causal)")
    low = 0 if n["depth_shares"][0] else 1
    show(("kind of token", "tokens", "mean depth", *(f"depth {depth}" for depth in range(low, len(n["depth_shares"])))),
         [(name, f"{c['count']:,}", f"{c['mean_depth']:.3f}", *(f"{share:.1%}" for share in c["depth_shares"][low:]))
          for name, c in n["classes"].items() if c["count"]])


def draw_router(measured):
    """OUT_DIR/router.png: loss against mean depth for every run; scores and depth by kind of token for the first."""
    (run, n), panels = measured[0], score_panels(measured[0][1])
    if (figure := new_figure(12, 8)) is None:
        return None
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.3, 1)) if panels else (figure, None)
    left, right = top.subplots(1, 2)
    draw_dial(left, measured)
    draw_classes(right, run, n)
    for axes, (title, series) in zip(bottom.subplots(1, len(panels), squeeze=False)[0] if panels else (), panels):
        edges = np.linspace(0, 1, BINS + 1)
        for label, counts in series.items():
            axes.stairs(counts, edges, fill=True, alpha=0.5, label=label)
        axes.set(title=title, xlabel="score", ylabel="tokens", xlim=(0, 1), yscale="log")                 # most are at the ends
        axes.set_ylim(bottom=0.7)
        axes.grid(alpha=0.3)
        if n["router"] == "expert":
            axes.axvline(n["threshold"], color="black", linewidth=1, linestyle="--")
            axes.legend(fontsize=8, loc="upper center")
    return save_picture(figure, run.home / "router.png")


def score_panels(n):
    """(title, {label: histogram}) of each panel; of many steps some, evenly spaced."""
    if n["router"] == "token":
        return [("score of the depth that a token chose", {"": n["scores"]})]
    steps = sorted(n["scores"])
    shown = {steps[round(i)]: n["scores"][steps[round(i)]] for i in np.linspace(0, len(steps) - 1, min(PANELS, len(steps)))}
    return [(f"step {step}: sigmoid(logit) of those asked", {"chosen by top-k": counts["chosen"], "left": counts["left"]}) for step, counts in shown.items()]


def draw_dial(axes, measured):
    unit = common_unit([run for run, _ in measured])
    every = [p[unit] for _, n in measured for p in n.get("thresholds", ())]
    for run, n in measured:
        points = sorted(n.get("thresholds", ()), key=lambda p: p["mean_depth"]) or [n]
        x, y = [p["mean_depth"] for p in points], [p[unit] for p in points]
        (line,) = axes.plot(x, y, marker="o", markersize=4, label=plain(f"{n['layout']} {n['router']} ({run.name})"))
        color = line.get_color()
        axes.plot(n["mean_depth"], n[unit], "o", markersize=11, fillstyle="none", color=color)
        for way, (marker, _) in MARKS.items():
            if way in n:
                axes.plot(n[way]["mean_depth"], n[way][unit], marker, markersize=9, color=color)
                every.append(n[way][unit])
        free = -math.inf                                      # right of this there is room for the next number
        for p in points:
            if p.get("threshold") is not None and p["mean_depth"] >= free:          # a lot has none
                axes.annotate(f"{p['threshold']:g}", (p["mean_depth"], p[unit]), textcoords="offset points", xytext=(0, -15), ha="center",
                              fontsize=8, color=color)
                free = p["mean_depth"] + n_steps(n) / 25
    crop(axes, every, 1.5 * max(n[unit] for _, n in measured))
    for marker, label in MARKS.values() if every else ():
        axes.plot([], [], marker, color="grey", markersize=9, label=label)
    axes.margins(0.06, 0.12)                                  # for the numbers
    axes.set(xlabel="mean depth", ylabel=f"validation loss, {unit.replace('_', ' ')}",
             title="Loss against mean depth" + "\n(number: threshold; ring: the model's own)" * bool(every),
             xlim=(min(1, *(n["mean_depth"] for _, n in measured)) - 0.1, max(n_steps(n) for _, n in measured) + 0.1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


MARKS = {"topk": ("x", TOPK), "lot": ("+", LOT)}


def n_steps(n):
    return len(n["depth_shares"]) - 1


def draw_classes(axes, run, n):
    from matplotlib import colormaps
    classes, left = {name: c for name, c in n["classes"].items() if c["count"]}, 0
    shares = np.array([c["depth_shares"] for c in classes.values()])
    for depth in range(n_steps(n) + 1):
        if shares[:, depth].any():
            axes.barh(list(classes), shares[:, depth], left=left, label=f"{depth}", color=colormaps["viridis"](1 - depth / n_steps(n)))
            left = left + shares[:, depth]
    for i, c in enumerate(classes.values()):
        axes.annotate(f"{c['mean_depth']:.2f}", (1.01, i), va="center", fontsize=8, annotation_clip=False)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the tokens at each depth", title=plain(f"Depth by kind of token (right: the mean)\n{run.name}"))
    axes.legend(title="depth", fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))


# ---------------------------------------------------------------------------------------- part: router, K and V by step


def kv_by_step(model, ids_BT):
    """Yield {("K" or "V", core block): (B, T, width)} for each step of a pass at full depth: what keys and values are made of,
    before the rotary turn. NaN where a token took no such step, or the step made none (kv=share: those of step 0 serve all)."""
    cfg, cache, noise, heard = model.cfg, no_cache(model.cfg), Silence(), {}
    linears = {(name, j): part for j, block in enumerate(model.recursion.core) for name, part in (("K", block.attention.key), ("V", block.attention.value))}
    hooks = [part.register_forward_hook(lambda part, args, x_ACW: heard.__setitem__(part, at_least_fp32(x_ACW))) for part in linears.values()]
    try:
        e_BTD, outer = model.start(ids_BT, cache, routing="causal")
        watch, (h_BTD, anchor, who) = AtEnd(model, outer, cache), model.recursion.enter(e_BTD, outer, cfg.n_recur, noise)
        for step in range(cfg.n_recur):
            heard.clear()
            inside, (h_BTD, who) = who, model.recursion.step(h_BTD, anchor, who, step, noise, cache, watch)
            nothing_BTW = torch.full((*ids_BT.shape, model.recursion.core[0].attention.key.out_features), math.nan, device=ids_BT.device)
            yield {where: inside.put(nothing_BTW, heard[part]) if part in heard else nothing_BTW for where, part in linears.items()}
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def walk_kv(run, starts):
    """{("K" or "V", "norm" or "cosine", step, core block): (sum of each window, tokens of each window)}; cosine: between a
    token's at this step and at the next."""
    rows = {}
    for ids_BT, _ in batches(run, starts):
        before = {}
        with run.autocast:
            for step, made in enumerate(kv_by_step(run.model, ids_BT)):
                made = {where: in_double(x_BTW) for where, x_BTW in made.items()}
                seen = {(name, "norm", step, j): x_BTW.norm(dim=-1) for (name, j), x_BTW in made.items()}
                seen |= {(name, "cosine", step - 1, j): F.cosine_similarity(x_BTW, made[name, j], dim=-1) for (name, j), x_BTW in before.items()}
                for where, value_BT in seen.items():
                    rows.setdefault(where, []).append(torch.stack([value_BT.nansum(1), value_BT.isfinite().sum(1)]).cpu())
                before = made
    return {where: torch.cat(pieces, 1).numpy() for where, pieces in rows.items()}


def measure_kv(run, starts):
    """Mean norm of K and V at each step, and mean cosine to the same token's at the next step, over the tokens that took both:
    for each core block, over the blocks (`by_step`), and over the steps too (`all`). A cosine of whole vectors, all heads
    together, as MoR's appendix compares them to say that recursions can share. V_minus_K: of the cosines, over equal tokens."""
    cfg, rows = run.model.cfg, walk_kv(run, starts)
    pooled = lambda name, what, steps: sum(rows[name, what, step, j] for step in steps for j in range(cfg.n_core))
    record = {name: {what: {"blocks": [[mean_of(rows[name, what, step, j]) for j in range(cfg.n_core)] for step in range(n)],
                            "by_step": [mean_of(pooled(name, what, [step])) for step in range(n)]}
                     for what, n in (("norm", cfg.n_recur), ("cosine", cfg.n_recur - 1))} for name in "KV"}
    both = {name: pooled(name, "cosine", range(cfg.n_recur - 1)) for name in "KV"}
    for name, pair_2W in both.items():
        record[name]["cosine"]["all"] = {"value": mean_of(pair_2W), "interval": interval(bootstrap(*pair_2W))}
    (k_W, n_W), (v_W, others_W) = both["K"], both["V"]
    equal = n_W.any() and (n_W == others_W).all()             # not where the steps share one of the two
    return {"kv": cfg.kv, **record, "V_minus_K": paired(v_W, k_W, n_W) if equal else None}


def mean_of(row):
    """Of (sums, counts); None: there is nothing to have a mean."""
    sums_W, n_W = row
    return float(sums_W.sum() / n_W.sum()) if n_W.sum() else None


def kv_claims(n):
    """MoR shares K and V between recursions because they are much alike there, and finds values harder to share. It sets no bar
    for a cosine: .9 is ours."""
    alike, less = "{} of neighbouring steps point the same way (mean cosine; the bar is ours)", n["V_minus_K"]
    claims = [judge(alike.format(word), "MoR", *n[name]["cosine"]["all"].values(), above=0.9)
              for name, word in (("K", "keys"), ("V", "values")) if n[name]["cosine"]["all"]["value"] is not None]
    return claims + ([judge("values are harder to share than keys (cosine of values minus that of keys)", "MoR", *less.values(), below=0.0)] if less else [])


def show_kv(measured):
    print("K and V of the core before the rotary turn: mean norm at each step, and mean cosine to the same token's at the next step")
    number = lambda row, step: "-" if step >= len(row) or row[step] is None else f"{row[step]:.3f}"
    show(("run", "step", "norm K", "norm V", "cosine K", "cosine V"),
         [(run.name, str(step), *(number(n["kv"][name][what]["by_step"], step) for what in ("norm", "cosine") for name in "KV"))
          for run, n in measured if n["kv"] for step in range(n_steps(n))])


# ------------------------------------------------------------------------------------------------------------- part: page

TEMPLATE = Path(__file__).resolve().parent / "assets" / "depth.html"
PASSAGE = 1024                # tokens on the page, from the start of the validation split
GLANCE = 280                  # of them in the terminal
SHADES = 65                   # of a ramp of colours
COLUMNS = 100                 # of the terminal


class Passage(NamedTuple):
    """A text and what each of its tokens came to. The loss of a token is that of predicting it from those before it; so the
    first has none (NaN). Its steps are those that it takes itself, once it is there."""
    id_N: torch.Tensor
    nats_RN: torch.Tensor         # after each of exit_depths(cfg)
    likeliest_RN: torch.Tensor    # the id that stood highest there instead
    p_RN: torch.Tensor            # its probability
    steps_N: torch.Tensor         # as it decides for itself (causal) at full depth


def passage_windows(split):
    """(ids, targets), (W, T) each: windows side by side from the start of the split. Between windows the context begins anew."""
    T = min(split.width - 1, PASSAGE)
    n = max(1, min(PASSAGE, split.n_tokens - 1) // T)
    id_N = torch.from_numpy(split.read(0, n * T + 1))
    return id_N[:-1].view(n, T), id_N[1:].view(n, T)


@torch.no_grad()
def read_passage(run):
    told, steps, (ids_WT, targets_WT) = [], [], passage_windows(run.split)
    for ids_BT, targets_BT in zip(ids_WT.to(run.device).split(run.batch_size), targets_WT.to(run.device).split(run.batch_size)):
        with run.autocast:
            features = features_at(run.model, ids_BT, exit_depths(run.model.cfg))
            told.append(torch.stack([predict(run.model, x_BTD, targets_BT) for x_BTD in features]))
            steps.append(full_pass(run.model, ids_BT)[1].flatten().cpu())
    first_R31 = torch.tensor([math.nan, 0, 0], dtype=torch.float64).view(1, 3, 1).expand(len(told[0]), 3, 1)
    nats_RN, likeliest_RN, p_RN = torch.cat([first_R31, *told], 2)[..., :-1].unbind(1)         # what is predicted stands one place on
    return Passage(ids_WT.flatten(), nats_RN, likeliest_RN.long(), p_RN, torch.cat(steps))


def predict(model, x_BTD, targets_BT):
    """(nats of each target, the likeliest token there, its probability) as (3, B x T), float64 on the CPU; few logits at a time."""
    n, pieces = max(1, LOGITS // model.cfg.vocab_size), []
    for x_nD, target_n in zip(x_BTD.flatten(0, 1).split(n), targets_BT.flatten().split(n)):
        log_nV = at_least_fp32(model.head(x_nD)).log_softmax(-1)
        best_n, id_n = log_nV.max(-1)
        pieces.append(torch.stack([-log_nV.gather(1, target_n[:, None])[:, 0].double(), id_n.double(), best_n.double().exp()]).cpu())
    return torch.cat(pieces, 1)


def token_text(tokenizer, token):
    """A token's text: U+FFFD for bytes that are no character by themselves, '' for an id that the tokenizer does not have."""
    try:
        return tokenizer.decode_single_token_bytes(token).decode("utf-8", "replace")
    except KeyError:                                          # the table is longer than the tokenizer's
        return ""


def stand_in(c):
    """One visible character in place of one that is none."""
    if c.isprintable():
        return c
    return {"\n": "↵", "\t": "→", "\x7f": "␡"}.get(c) or (chr(0x2400 + ord(c)) if c < " " else " " if c.isspace() else "\ufffd")


def token_name(tokenizer, token):
    """A token as one can read it alone: spaces and line ends are seen, a byte that is no character has its number."""
    if not (text := token_text(tokenizer, token)):
        return f"id {token}"
    raw = tokenizer.decode_single_token_bytes(token)
    return f"byte {raw.hex()}" if text == "\ufffd" and len(raw) == 1 else "".join(map(stand_in, text)).replace(" ", "␣")


def as_html(text):
    """Text that can do nothing in a page but be read; line ends and tabs stay, small marks show where they are."""
    mark = lambda c: f"<i>{stand_in(c)}</i>{c if c in (chr(10), chr(9)) else ''}"
    return "".join(html.escape(c) if c.isprintable() else mark(c) for c in text)


def as_json(record):
    """JSON that no text in it can end: in a script element `</script>` and `<!--` would."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


# OKLab to the cube roots of cone responses, and those to linear sRGB  [Ottosson 2020]
TO_CONES = np.array([[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]])
FROM_CONES = np.array([[4.0767416621, -3.3077115913, 0.2309699292], [-1.2684380046, 2.6097574011, -0.3413193965], [-0.0041960863, -0.7034186147, 1.7076147010]])


def shade(x, dark):
    """(red, green, blue), each in 0..1: x in 0..1 goes from close to the paper to far from it. In OKLCH, in
    which equal steps of lightness look equal; the hues are those from yellow over green to violet."""
    L, C, h = (0.25 + 0.65 * x, 0.03 + 0.11 * x, 300 - 195 * x) if dark else (0.97 - 0.57 * x, 0.03 + 0.10 * x, 105 + 195 * x)
    a, b = C * math.cos(math.radians(h)), C * math.sin(math.radians(h))
    linear = (FROM_CONES @ (TO_CONES @ (L, a, b)) ** 3).clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def ink_on(rgb):
    """Black or white, whichever stands out more (WCAG: at least 4.58 to 1, whatever the colour)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return "#000" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "#fff"


def ramp(dark):
    """[(background, ink)] from 0 to 1."""
    colors = [shade(i / (SHADES - 1), dark) for i in range(SHADES)]
    return [("#" + "".join(f"{round(255 * c):02x}" for c in rgb), ink_on(rgb)) for rgb in colors]


def finite(values):
    """Numbers as JSON can hold them."""
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def page_data(run, passage):
    """All that the page shows, as plain lists; what depends on depth has one list for each place of the slider."""
    cfg, depths, blocks = run.model.cfg, exit_depths(run.model.cfg), is_plain(run.model.cfg)
    used = torch.cat([passage.id_N, passage.likeliest_RN.flatten()]).unique()
    places = [round(depth * cfg.n_core) if blocks else depth for depth in depths]
    index = lambda ids: torch.searchsorted(used, ids).tolist()
    deepest, known = cfg.n_core if blocks else cfg.n_recur, passage.nats_RN[:, 1:]
    usual = known[1 if len(depths) > 2 else 0 :]              # depth 0 is far off the rest, and would pale it
    return {"names": [token_name(run.tokenizer, token) for token in used.tolist()], "ids": index(passage.id_N),
            "unit": "block" if blocks else "depth", "places": places, "labels": [depth_name(cfg, depth) for depth in depths],
            "full": places.index(deepest), "said": [said(place, deepest, blocks) for place in places],
            "training": [training_at(cfg, depth) for depth in depths], "n_recur": cfg.n_recur,
            "nats": [finite(row) for row in passage.nats_RN.tolist()], "means": finite(known.mean(1).tolist()), "top_nats": top_of(usual),
            "top": [index(row) for row in passage.likeliest_RN], "p": [finite(row) for row in passage.p_RN.tolist()],
            "steps": passage.steps_N.tolist() if cfg.router != "none" else None, "ramp": {"light": ramp(False), "dark": ramp(True)}}


def said(place, deepest, blocks):
    """A place of the slider in words."""
    if blocks:
        return f"After {place} of {deepest} core blocks"
    return f"At depth {place} of {deepest}" if place <= deepest else f"At depth {place}, beyond {deepest}"


def top_of(nats):
    """Where a scale of losses ends: few are above."""
    seen = nats[nats.isfinite()]
    return max(1.0, math.ceil(2 * float(seen.quantile(0.97))) / 2) if len(seen) else 1.0


def fill_page(run, passage, data):
    cfg, escape = run.model.cfg, html.escape
    texts = {token: as_html(token_text(run.tokenizer, token)) for token in set(passage.id_N.tolist())}
    facts = [f"{cfg.layout} {kind_of(cfg)}", f"step {run.state['step']:,}", f"data {run.dataset} ({run.meta['tokenizer']} {run.meta['fingerprint']})",
             f"the first {len(passage.id_N):,} tokens of the validation split, {min(cfg.block_size, PASSAGE):,} at a time", f"commit {commit()}"]
    ticks = (f'<option value="{place}" label="{place}"{" class=beyond" * (training == "never trained")}></option>'
             for place, training in zip(data["places"], data["training"]))
    slots = {"title": escape(f"{run.name}: a text at every depth"), "facts": escape(" · ".join(facts)), "data": as_json(data),
             "passage": "".join(f"<span>{texts[token]}</span>" for token in passage.id_N.tolist()), "ticks": "".join(ticks),
             "first": data["places"][0], "last": data["places"][-1], "full": data["places"][data["full"]],
             "one_view": " hidden" * (data["steps"] is None), "one_depth": " disabled" * (len(data["places"]) == 1),
             "slider": f"Depth: {'core blocks' if data['unit'] == 'block' else 'steps'} before the next token is predicted"}
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: str(slots[slot[1]]), TEMPLATE.read_text("utf-8"))


def paints():
    """How the terminal takes colours: '' (none), '256' or 'true'. https://no-color.org"""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return ""
    return "true" if os.environ.get("COLORTERM") in ("truecolor", "24bit") else "256"


def painted(text, x, how):
    """Text on the colour of x, as a terminal takes it."""
    rgb = shade(min(1, max(0, x)), dark=True)
    levels = [f"{round(255 * c)}" for c in rgb]
    nearest = [int(np.abs(np.array([0, 95, 135, 175, 215, 255]) - 255 * c).argmin()) for c in rgb]
    back = ";".join(["2", *levels]) if how == "true" else f"5;{16 + 36 * nearest[0] + 6 * nearest[1] + nearest[2]}"
    return f"\x1b[38;5;{16 if ink_on(rgb) == '#000' else 231};48;{back}m{text}\x1b[0m"


def glance(run, passage, data, how):
    """Lines for the terminal: the start of the passage, by steps where there is a router, else by loss at some depths. In
    colour one view after the other; without, each line of text stands over a line of digits for each view, 9 for all above."""
    names = ["".join(map(stand_in, token_text(run.tokenizer, token))) for token in passage.id_N[:GLANCE].tolist()]
    few = sorted({*range(min(3, data["full"])), data["full"]})
    views = [(f"steps taken, of {data['n_recur']}", "steps", data["steps"], data["n_recur"])] if data["steps"] else [
        (f"{data['said'][at]}: {show_nats(data['means'][at])} nats per token", str(data["places"][at]), data["nats"][at], data["top_nats"]) for at in few]
    if how:
        for title, _, values, top in views:
            scale = range(top + 1) if data["steps"] else np.linspace(0, top, 5)
            yield f"{title}  " + "".join(painted(f" {value:g} ", value / top, how) for value in scale)
            yield from colored(names, values, top, how)
    else:
        yield from (f"{label}: {title[:1].lower()}{title[1:]}" for title, label, *_ in views)
        yield from numbered(names, {label: values for _, label, values, _ in views})


def show_nats(value):
    return "-" if value is None else f"{value:.3f}"


def colored(names, values, top, how):
    for line in rows_of(names):
        yield "".join(names[i] if values[i] is None else painted(names[i], values[i] / top, how) for i in line)


def numbered(names, views):
    digit = lambda values, i: " " if values[i] is None or not names[i] else str(min(9, round(values[i])))
    room = shutil.get_terminal_size().columns - 7 if sys.stdout.isatty() else COLUMNS          # a line that a terminal breaks stands over no digits
    for line in rows_of(names, min(COLUMNS, max(1, room))):
        yield " " * 7 + "".join(names[i] for i in line)
        for label, values in views.items():
            yield f"{label:>5}  " + "".join(digit(values, i).ljust(len(names[i])) for i in line).rstrip()


def rows_of(names, columns=COLUMNS):
    """Which tokens stand on each line: a line ends where the text's does, and before it is too long."""
    line, width = [], 0
    for i, name in enumerate(names):
        if line and (width + len(name) > columns or names[i - 1].endswith("↵")):
            yield line
            line, width = [], 0
        line.append(i)
        width += len(name)
    if line:
        yield line


def report_page(runs, s):
    """OUT_DIR/depth.html: a passage of validation text, each token coloured by its steps or its loss at every depth; the start of it here."""
    run = runs[0]
    passage = read_passage(run)
    data = page_data(run, passage)
    how, encoding = paints(), sys.stdout.encoding or "utf-8"
    print(f"page: the start of the validation split, {'coloured' if how else 'under each token a digit: its loss in whole nats, or its steps'}")
    for line in glance(run, passage, data, how):
        print(line.encode(encoding, "replace").decode(encoding))
    return {"page": save_page(run.home / "depth.html", fill_page(run, passage, data)), "tokens": len(passage.id_N),
            "window": min(run.model.cfg.block_size, PASSAGE), "depths": exit_depths(run.model.cfg), "nats_per_token": data["means"],
            "mean_depth": float(passage.steps_N.double().mean()), "used": used(run.model.cfg, depth=exit_depths(run.model.cfg))}


def save_page(path, text):
    """Its path; None, and why, where it could not be written."""
    try:
        write_whole(path, lambda file: file.write(text.encode("utf-8")))
        print(f"page: {path} (open it in a browser)")
        return str(path)
    except UserError as error:                                # the numbers are worth more than the page
        print(f"note: no page: {error}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------- part: benchmarks

# {set: {column: {task of the harness: the metric that counts}}}; two tasks in a column: their mean.
# MoR takes the answer that is likeliest per byte, but for LAMBADA, WinoGrande and MMLU the likeliest as it is, and asks MMLU
# for the text of an answer (continuation), not for its letter. The harness's acc_norm counts characters in place of bytes.
TASK_SETS = {"mor": {"LAMBADA": {"lambada_openai": "acc"}, "HellaSwag": {"hellaswag": "acc_bytes"}, "PIQA": {"piqa": "acc_bytes"},
                     "WinoGrande": {"winogrande": "acc"}, "ARC": {"arc_easy": "acc_bytes", "arc_challenge": "acc_bytes"},
                     "MMLU": {"mmlu_continuation": "acc"}}}
BY_BYTES = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm", "acc_bytes")]
N_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")        # what tasks call the length of an answer in text
NEW_TOKENS = 256              # where a task does not say
DRAWS = 1000                  # resamples for the standard error of a metric that is no mean
OF_BENCHMARKS = ("tasks", "include_path", "limit", "num_fewshot", "depth", "threshold", "exit", "exit_threshold")         # settings that no other part reads
OLDEST = "0.4.12"             # of lm-evaluation-harness: the first whose TaskManager loads tasks by itself


def text_windows(context, continuation, block_size):
    """Yield (ids, n): the last n ids are asked for, the others are read. Every id of the continuation is asked for once; where
    it is longer than block_size, so many at a time, each window as far back as it can reach."""
    ids, n = context + continuation, len(continuation)
    for start in range(0, n, block_size):
        end = len(context) + min(start + block_size, n)
        yield ids[max(0, end - block_size - 1) : end], min(block_size, n - start)


def until_first(text, stops):
    """The text before the first of these."""
    return text[: min([at for at in map(text.find, stops) if at >= 0], default=None)]


class Answers:
    """What lm-evaluation-harness asks of a model, answered by a run; harness_model joins it to the harness's own class.

    No answer depends on what else is in its batch: rows are padded on the right, where nothing sees it, and routers choose
    causally. how: depth, threshold, exit and exit_threshold, as model.py's. Of `asked` contexts, `cut` lost their beginning
    to block_size."""

    def __init__(self, run, **how):
        super().__init__()
        self.run, self.how, self.asked, self.cut = run, how, 0, 0
        self.block_size, self.end = run.model.cfg.block_size, run.tokenizer.eot_token

    def loglikelihood(self, requests, disable_tqdm=False):
        """(nats, whether greedy decoding would say the same) of the continuation in each (context, continuation)."""
        pairs = [self.split(*request.args) for request in requests]
        self.count(len(context) + len(continuation) - 1 > self.block_size for context, continuation in pairs)
        return self.score(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Nats of each text, all of it, after end-of-text."""
        return [nats for nats, _ in self.score([([self.end], self.encode(request.args[0])) for request in requests])]

    def generate_until(self, requests, disable_tqdm=False):
        """The greedy text after each (context, settings), up to a stop string, which is left out, or end-of-text."""
        texts, alike = [""] * len(requests), {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        batches = [batch for rows in alike.values() for batch in self.batches(sorted(rows, key=lambda i: -len(requests[i].args[0])))]
        for batch in tqdm(batches, desc=f"{self.run.name}: text", disable=None, leave=False):
            for i, text in zip(batch, self.go_on([requests[i].args[0] for i in batch], requests[batch[0]].args[1])):
                texts[i] = text
        return texts

    def encode(self, text):
        return self.run.tokenizer.encode_ordinary(text)

    def decode(self, ids):
        return self.run.tokenizer.decode([i for i in ids if i != self.end and i < self.run.tokenizer.n_vocab], errors="replace")

    def split(self, context, continuation):
        """Ids of both, as the harness splits them: encoded as one text, for a tokenizer may join across, and spaces between them
        belong to the continuation. What stands first has end-of-text before it, as documents had in training."""
        stem = context.rstrip()
        head, rest = self.encode(stem), context[len(stem) :] + continuation
        return head or [self.end], self.encode(stem + rest)[len(head) :] or self.encode(rest)          # or: all of it was joined to the stem

    def count(self, cuts):
        cuts = list(cuts)
        self.asked, self.cut = self.asked + len(cuts), self.cut + sum(cuts)

    def batches(self, rows):
        return [rows[i : i + self.run.batch_size] for i in range(0, len(rows), self.run.batch_size)]

    def score(self, pairs):
        """(nats, greedy) of each (context ids, continuation ids), in order; read longest first, which pads little."""
        rows = [(i, ids, n) for i, pair in enumerate(pairs) for ids, n in text_windows(*pair, self.block_size)]
        nats, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for batch in tqdm(self.batches(sorted(rows, key=lambda row: -len(row[1]))), desc=f"{self.run.name}: scores", disable=None, leave=False):
            for (i, _, _), value, same in zip(batch, *self.read([row[1:] for row in batch])):
                nats[i], greedy[i] = nats[i] + value, greedy[i] and same
                if not math.isfinite(nats[i]):
                    raise UserError(f"{self.run.name}: {NOT_FINITE}")
        return list(zip(nats, greedy))

    @torch.inference_mode()
    def read(self, rows):
        """Of each (ids, n), longest first: nats of its last n ids together, and whether each of them is the likeliest."""
        model, counts, T = self.run.model, [n for _, n in rows], len(rows[0][0])
        row_BT = torch.tensor([ids + [self.end] * (T - len(ids)) for ids, _ in rows], device=self.run.device)
        place_2N = torch.tensor([(b, t) for b, (ids, n) in enumerate(rows) for t in range(len(ids) - n, len(ids))], device=self.run.device).T
        with self.run.autocast:
            x_BTD, _ = full_pass(model, row_BT[:, :-1], **self.how)
            x_ND, target_N, n = x_BTD[place_2N[0], place_2N[1] - 1], row_BT[place_2N[0], place_2N[1]], max(1, LOGITS // model.cfg.vocab_size)
            told = [told_of(at_least_fp32(model.head(x_nD)), target_n) for x_nD, target_n in zip(x_ND.split(n), target_N.split(n))]
        nats_N, same_N = (torch.cat(column).cpu() for column in zip(*told))
        return [nats.double().sum().item() for nats in nats_N.split(counts)], [same.all().item() for same in same_N.split(counts)]

    def go_on(self, contexts, settings):
        """Texts after these contexts; of a long one, the newest part that leaves room for the answer, half a block at least, is read."""
        if settings.get("do_sample", settings.get("temperature")):
            raise UserError(f"a task asks for sampled text ({settings}), and only greedy text is given here; set do_sample: false in it")
        until, n = settings.get("until") or [], next((int(settings[name]) for name in N_NEW if settings.get(name)), NEW_TOKENS)
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        rows, room = [self.encode(context) or [self.end] for context in contexts], max(1, self.block_size // 2, self.block_size - n)
        self.count(len(row) > room for row in rows)
        try:
            with self.run.autocast:
                return [until_first(self.decode(ids), until) for ids in self.tokens_until([row[-room:] for row in rows], n, until)]
        except ValueError as error:                           # logits that are not finite
            raise UserError(f"{self.run.name}: {error}") from None

    def tokens_until(self, rows, n, until):
        """The greedy tokens after each row, n at most; none is made once every row holds a stop string or end-of-text."""
        new, done = [[] for _ in rows], [False] * len(rows)
        for next_B in stream(self.run.model, rows, n, temperature=0.0, **self.how):
            for i, token in enumerate(next_B):
                new[i] += [] if done[i] else [token]
                done[i] = done[i] or token == self.end or any(stop in self.decode(new[i]) for stop in until)
            if all(done):
                break
        return new


def told_of(logits_nV, target_n):
    """(nats, whether it is the likeliest) of each target."""
    return -F.cross_entropy(logits_nV, target_n, reduction="none"), logits_nV.argmax(-1) == target_n


def harness():
    """lm-evaluation-harness, told to be quiet and to start no processes."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise UserError(f"the part benchmarks runs tasks of lm-evaluation-harness, which is not here ({error}); pip install 'lm-eval>={OLDEST}'") from None
    if not hasattr(lm_eval.tasks.TaskManager, "load"):
        raise UserError(f"lm-evaluation-harness {lm_eval.__version__} finds its tasks in another way than is known here; pip install 'lm-eval>={OLDEST}'")
    for library in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)    # once they are loaded, which sets it too
    return lm_eval


def harness_model(run, depth=None, threshold=None, exit=None, exit_threshold=None):
    """A model for lm_eval.simple_evaluate(model=...), which answers by this run. The rest is as for GPT.generate. ValueError."""
    harness()
    from lm_eval.api.model import LM
    at_threshold(run.model.cfg, threshold)                    # says why not, where there is none
    how = {"depth": run.model.check_depth(depth), "threshold": threshold, "exit": exit, "exit_threshold": run.model.check_exit(exit, exit_threshold)}
    return type("Run", (Answers, LM), {})(run, **how)


def task_names(words):
    """{task: the metric that a set counts; None: of no set} of what --tasks names."""
    names = {}
    for word in (word.strip() for text in words for word in text.split(",")):
        columns = TASK_SETS.get(word)
        names |= {word: names.get(word)} if columns is None else {task: metric for column in columns.values() for task, metric in column.items()}
    if "grt" in names:
        raise UserError("which nine tasks the GRT paper reports is not known here; name them as lm-evaluation-harness does: --tasks=NAME,NAME")
    if not names:
        raise UserError(f"the part benchmarks runs what --tasks= names: {', '.join(TASK_SETS)}, or tasks of lm-evaluation-harness, as in --tasks=hellaswag,piqa")
    return names


def task_manager(names, include_path):
    """Where the harness finds its tasks. Its own are thousands of files: they are left unread where include_path has all names."""
    from lm_eval.tasks import TaskManager
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"include_path={include_path!r} is no folder; give one with the .yaml files of your tasks")
    own = TaskManager(include_path=include_path, include_defaults=False)
    manager = own if set(names) <= set(own.all_subtasks) else TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"lm-evaluation-harness has no task {name!r}{near(name, [*manager.all_tasks, *TASK_SETS]) or '; lm-eval ls tasks lists them'}")
    return manager


def load_task(name, metric, manager):
    """A task or group of the harness (or several tasks under one name), with its data, which it downloads once."""
    try:
        spec = name if metric != "acc_bytes" else {"group": f"{name} by bytes", "task": [{"task": name, "metric_list": BY_BYTES}]}
        found = manager.load([spec])
    except Exception as error:
        raise UserError(f"task {name!r} cannot be loaded: {prepare.one_line(error)}; if it is its data that are missing, which come from the Hugging Face "
                        f"Hub unless its .yaml says otherwise: connect and run this again") from None
    return manager.load([found["groups"][name]] if name in found["groups"] else list(found["tasks"].values()))


def set_shots(tasks, num_fewshot):
    """How many solved examples each task shows. A task whose .yaml says 0 keeps to it, and the draw is that of the harness's own command line."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    for task in tasks:
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=own or 0 if num_fewshot is None or own == 0 else num_fewshot)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def metrics_of(row):
    """{metric: {value, stderr}} of a task's or group's results; a filter that is not the only one stays in the name."""
    found = {}
    for name, value in row.items():
        metric, comma, how = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            stderr = row.get(f"{metric}_stderr,{how}")
            found[metric if how == "none" else name] = {"value": float(value), "stderr": float(stderr) if isinstance(stderr, (int, float)) else None}
    return found


def outermost(results):
    """Names to show: groups that have a number of their own, and tasks and groups that are in none of these."""
    children, inside, todo = results["group_subtasks"], set(), list(results.get("groups", ()))
    while todo:
        below = children.get(todo.pop(), [])
        inside, todo = inside | set(below), todo + below
    return [name for name in results["results"] if name not in inside and (name in results.get("groups", ()) or name not in children)]


def measure_task(lm, found, s):
    """{shown, tasks} of what one name loads."""
    from lm_eval.evaluator import evaluate as evaluate_tasks
    set_shots(found["tasks"].values(), s.num_fewshot)
    results = evaluate_tasks(lm, found, limit=s.limit, bootstrap_iters=DRAWS, log_samples=False)
    shots = {name: {results["n-shot"][task.task_name] for task in group.get_all_tasks()} for name, group in found["groups"].items()}
    shots |= {name: {results["n-shot"][name]} for name in found["tasks"]}
    tasks = {name: {"version": results["versions"].get(name), "shots": shots[name].pop() if len(shots[name]) == 1 else None, "n": row.get("sample_len"),
                    "metrics": metrics_of(row)} for name, row in results["results"].items()}
    return {"shown": outermost(results), "tasks": tasks}


def measure_benchmarks(run, s, names):
    """The record of one run. Tasks can take hours: each that is done is at once a line of benchmarks.jsonl, and one that fails spoils no other."""
    try:
        lm = harness_model(run, s.depth, s.threshold, s.exit, s.exit_threshold)
    except ValueError as error:
        raise UserError(f"{run.name}: {error}") from None
    how = used(run.model.cfg, **{name: value for name, value in lm.how.items() if value is not None})
    record = {"harness": harness().__version__, "used": how, "limit": s.limit, "num_fewshot": s.num_fewshot, "block_size": lm.block_size}
    manager, shown, tasks, failed = task_manager(names, s.include_path), [], {}, {}
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())       # the harness draws bars in pipes too
    with quiet, contextlib.redirect_stdout(sys.stderr):
        for name, found in {name: load_task(name, metric, manager) for name, metric in names.items()}.items():      # all are here before the first begins
            try:
                done = measure_task(lm, found, s)
            except Exception as error:                        # of a task's own code, or of its documents
                failed[name] = str(error) if isinstance(error, UserError) else prepare.one_line(error)
                continue
            shown, tasks = [*shown, *done["shown"]], {**tasks, **done["tasks"]}
            keep_line(run.home / "benchmarks.jsonl", {**identity(run), **record, "dtype": s.dtype, "commit": commit(), **done})
    return {**record, "contexts": lm.asked, "cut_contexts": lm.cut, "shown": list(dict.fromkeys(shown)), "tasks": tasks, "failed": failed,
            "sets": set_means(names, tasks)}


def keep_line(path, record):
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(json.loads(json.dumps(record), parse_constant=str)) + "\n")
    except OSError as error:                                  # the numbers are printed in the end
        print(f"note: {path}: {error.strerror}", file=sys.stderr)


def set_means(names, tasks):
    """Columns and mean of each set of which all tasks have been run."""
    sets = {}
    for word, columns in TASK_SETS.items():
        if all(names.get(task) == metric and task in tasks for parts in columns.values() for task, metric in parts.items()):
            means = {column: float(np.mean([tasks[task]["metrics"][metric]["value"] for task, metric in parts.items()])) for column, parts in columns.items()}
            sets[word] = {"columns": means, "mean": float(np.mean(list(means.values())))}
    return sets


def failures(record):
    """Of a part's record, its compared runs included: "task: why"."""
    return [f"{n['folder'] + ': ' if 'folder' in n else ''}{name}: {why}" for n in (record, *record.get("compare", ())) for name, why in n.get("failed", {}).items()]


def report_benchmarks(runs, s):
    """Tasks of lm-evaluation-harness."""
    names = task_names(s.tasks)
    measured = [(run, measure_benchmarks(run, s, names)) for run in runs]
    if not any(n["tasks"] for _, n in measured):
        raise UserError(f"no task could be run: {'; '.join(failures(measured[0][1]))}")
    first, number = measured[0][1], lambda value, form: "-" if value is None else f"{value:{form}}"
    how = ", ".join(f"{name}={value}" for name, value in first["used"].items() if value is not None)
    print(f"benchmarks: lm-evaluation-harness {first['harness']}, {how}" + (f"; at most {s.limit} documents of a task: a try, not the benchmark" if s.limit else ""))
    show(("run", "task", "metric", "value", "stderr", "n", "shots"),
         [(run.name, name, metric, f"{m['value']:.4f}", number(m["stderr"], ".4f"), number(n["tasks"][name]["n"], ","), number(n["tasks"][name]["shots"], ""))
          for run, n in measured for name in n["shown"] for metric, m in n["tasks"][name]["metrics"].items()])
    for word in first["sets"]:
        print(f"{word}: of each task the metric that its paper takes, in %")
        show(("run", *TASK_SETS[word], "mean"), [(run.name, *(f"{100 * value:.1f}" for value in [*n["sets"][word]["columns"].values(), n["sets"][word]["mean"]]))
                                                 for run, n in measured if word in n["sets"]])
    for run, n in measured:
        if n["cut_contexts"]:
            print(f"{run.name}: {n['cut_contexts']:,} of {n['contexts']:,} contexts are longer than block_size={n['block_size']} lets, and lost their beginning")
    return {**first, "compare": [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]}


# ----------------------------------------------------------------------------------------------------------- part: answers


@torch.no_grad()
def measure_answers(run, eval_tokens):
    """Share of right answers after every depth, in all and by group, on rows evenly spaced over all groups."""
    cfg, depths, starts = run.model.cfg, exit_depths(run.model.cfg), fixed_windows(run.split, eval_tokens)
    marks = Marks(run.split, depths)
    for rows in tqdm(starts.split(run.batch_size), desc=run.name, disable=None, leave=False):
        ids_BT, targets_BT = run.split.batch(rows, run.device)
        with run.autocast:
            for depth, x_BTD in zip(depths, features_at(run.model, ids_BT, depths)):
                marks(depth, rows, run.model.head(x_BTD), targets_BT)
    points = [{"depth": depth, "flops_per_token": cfg.flops_per_token(run.split.width - 1, depth=depth), "accuracy": share,
               "accuracy_by_group": groups, "training": training_at(cfg, depth)} for depth, (share, groups) in zip(depths, marks.shares())]
    return {"windows": len(starts), "answers": int(marks.asked[0].sum()), "layout": cfg.layout, "update": cfg.update, "points": points}


def report_answers(runs, s):
    """Right answers of a synthetic set after every step (dense: every core block), by group."""
    for run in runs:
        if "row" not in run.meta:
            raise UserError(f"data set {run.dataset!r} of {run.name} asks for no answers; leave the part out, or name another run")
    measured = [(run, measure_answers(run, s.eval_tokens)) for run in runs]
    print(f"answers: share of right ones after each step, on {measured[0][1]['windows']:,} rows ({measured[0][1]['answers']:,} answers); k/L = a dense "
          f"model left after k of its L core blocks")
    tell_unpaired(runs)
    groups = list(dict.fromkeys(name for run in runs for name in run.split.groups))
    rows = [(run.name, depth_name(run.model.cfg, p["depth"]), f"{p['flops_per_token'] / 1e6:,.3f}", f"{p['accuracy']:.3f}",
             *(f"{p['accuracy_by_group'][name]:.3f}" if name in p["accuracy_by_group"] else "-" for name in groups), p["training"])
            for run, n in measured for p in n["points"]]
    show(("run", "depth", "MFLOP/token", "all", *groups, ""), [*guesses_of(runs, groups), *rows])
    return {**measured[0][1], "no_model": {name: {"accuracy": share, "accuracy_by_group": by} for name, share, by in prepare.guess_rows(runs[0].meta)}, "compare": [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]}


def guesses_of(runs, groups):
    """Rows of the table for what is right without a model, on the whole split; once for each set of data."""
    sets = {str(run.split.path): run for run in runs}
    return [(name if len(sets) == 1 else f"{name}, {run.dataset}", "-", "-", f"{share:.3f}",
             *(f"{by[group]:.3f}" if group in by else "-" for group in groups), "no model") for run in sets.values()
            for name, share, by in prepare.guess_rows(run.meta)]


# ------------------------------------------------------------------------------------------------------- tables, the record


class Part(NamedTuple):
    """A part of the evaluation. Its record may hold "claims" (see there), and "used" where that is not what used() says."""
    report: Callable                                          # (runs, the first one in front; settings) -> its record; prints
    lacks: Callable = lambda run: ""                          # why this run has nothing for the part; "": it has
    unnamed: Callable = lambda run: True                      # whether it runs where no part is named


PARTS = {
    "loss": Part(report_loss),
    "depth": Part(report_depth),
    "steps": Part(report_steps),
    "gate": Part(report_gate, lambda run: f"{run.name} has no gate" * (run.model.cfg.update != "gate")),
    "exit": Part(report_exit, lambda run: "" if rules_of(run.model)[0] else f"{run.name}: {rules_of(run.model)[1]}",
                 lambda run: run.model.cfg.router == "none"),
    "router": Part(report_router, lambda run: f"{run.name} has no router" * (run.model.cfg.router == "none")),
    "answers": Part(report_answers, lambda run: f"data set {run.dataset!r} of {run.name} asks for no answers" * ("row" not in run.meta)),
    "page": Part(report_page, lambda run: f"data set {run.dataset!r} of {run.name} is no text" * ("row" in run.meta)),
    "benchmarks": Part(report_benchmarks, unnamed=lambda run: False),
}


def parts_for(words, run):
    """The parts to run: those named, else all that the run has something for."""
    why = {name: part.lacks(run) for name, part in PARTS.items()}
    for name in words:
        if why[name]:
            raise UserError(f"{why[name]}, so there is nothing for the part {name}; name another run with --out_dir=, or leave the part out")
    if left := [f"{name} ({reason})" for name, reason in why.items() if reason and not words]:
        print(f"note: left out: {', '.join(left)}", file=sys.stderr)
    return list(dict.fromkeys(words or [name for name, part in PARTS.items() if not why[name] and part.unnamed(run)]))


def used(cfg, **changes):
    """How a part ran the model: full depth, its own routing and threshold, nobody leaving early; unless the part says otherwise."""
    return {"depth": cfg.n_recur, "routing": None if cfg.router == "none" else "causal", "threshold": cfg.threshold if cfg.router == "expert" else None,
            "exit": None, "exit_threshold": None, **changes}


def made_from(run, s, device, dtype):
    """Everything that a number may depend on beside the checkpoint."""
    return {"commit": commit(), "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__, "platform": platform.platform(),
            "device": str(device), "dtype": dtype, "data": data(run), "settings": {"parts": s.words, **s.values}, "used": used(run.model.cfg)}


class Above:
    """Standard output while bars are drawn on the same terminal: whole lines, and the bars step aside for each."""

    def __init__(self, stream):
        self.stream, self.line = stream, ""

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.line += text
        if text.endswith("\n"):
            with tqdm.external_write_mode(sys.stderr):
                self.stream.write(self.line)
                self.stream.flush()
            self.line = ""
        return len(text)


def run_parts(names, runs, s):
    """Yield (name, its record), with a bar over the whole of it on a terminal."""
    with tqdm(names, desc="evaluation", unit="part", disable=None) as bar:
        out = sys.stdout if bar.disable else Above(sys.stdout)
        for name in bar:
            bar.set_postfix_str(name)
            with contextlib.redirect_stdout(out):
                record = PARTS[name].report(runs, s)
            yield name, record


def show(head, rows):
    """An aligned table: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def identity(run):
    return {"folder": run.name, "step": run.state["step"], "checkpoint": run.state["checkpoint"]}


def data(run):
    """The validation split: its place, the fingerprint of its tokenizer, its tokens, bytes and checksum; None: not read."""
    return run.split and {"dataset": run.dataset, "path": str(run.split.path), "fingerprint": run.meta["fingerprint"], **run.meta["val"]}


def in_json(record):
    """The record as JSON can hold it: that has no NaN, which becomes a word."""
    return json.loads(json.dumps(record), parse_constant=str)


def save(path, record):
    """Write eval.json; parts of earlier calls stay if they are of the same checkpoint."""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        same = all(old[name] == record[name] for name in ("step", "checkpoint"))
        record = {**record, "parts": {**(old["parts"] if same else {}), **record["parts"]}}
    except (OSError, ValueError, KeyError, TypeError):
        pass                                                  # none, or not one of ours: replaced
    try:
        write_whole(path, lambda file: file.write((json.dumps(record, indent=2) + "\n").encode("utf-8")))
    except UserError as error:                                # the numbers are on stdout already
        print(f"note: {error}", file=sys.stderr)


def parse(argv):
    alone = lambda word, after: word == "--full" and (after.startswith("--") or after in PARTS)               # --full is --full=true
    argv = [word + "=true" * alone(word, after) for word, after in zip(argv, [*argv[1:], "--"])]
    s = config.parse(argv, [EvalConfig], __doc__, words=("", len(argv)))
    for word in s.words:
        if word not in PARTS:
            run = Path(word).exists() and not word.endswith(".py")                            # a run has its config with it
            hint = f"; a run is --out_dir={word}" if run else near(word, PARTS) or f"; its parts are {', '.join(PARTS)}"
            raise UserError(f"command line: eval.py has no part {word!r}{hint}")
    check_ranges(s, RANGES)
    if "benchmarks" in s.words:
        task_names(s.tasks)                                   # before other parts take their time
    elif given := [name for name in OF_BENCHMARKS if s.origins[name] != "default"]:
        raise UserError(f"--{given[0]}={s.values[given[0]]} is for the part benchmarks, which runs by name alone: python eval.py benchmarks --tasks=...")
    for threshold in s.exit_thresholds:
        if not 0 <= threshold < math.inf:
            raise UserError(f"{s.origins['exit_thresholds']}: exit_thresholds={s.exit_thresholds}: {threshold} is out of range; give numbers from 0 up")
    for threshold in s.thresholds:
        if not 0 <= threshold <= 1:
            raise UserError(f"{s.origins['thresholds']}: thresholds={s.thresholds}: {threshold} is out of range; give numbers from 0 to 1")
    return s


def main(argv):
    s = parse(argv)
    folders = [Path(s.out_dir) if s.out_dir is not None else newest_run(), *map(Path, s.compare)]
    states = [read_state(folder) for folder in folders]
    s.values["dtype"] = s.dtype or states[0]["settings"]["dtype"]
    device, dtype, autocast = pick_device(s)
    runs = [open_run(folder, state, s, device, autocast) for folder, state in zip(folders, states)]
    names, made = parts_for(s.words, runs[0]), made_from(runs[0], s, device, dtype)
    for run in runs:
        cfg = run.model.cfg
        print(f"{run.name}: {cfg.layout} update={cfg.update}, step {run.state['step']}{f', data {run.split.path}' if run.split else ''}; {device} {dtype}", file=sys.stderr)
    record = {**identity(runs[0]), "parts": (parts := {})}
    try:
        for name, part in run_parts(names, runs, s):
            parts[name] = {**made, **part}
    finally:                                                  # Ctrl-C or an error in a later part costs none of those that are there
        if parts:
            save(runs[0].home / "eval.json", in_json(record))
    if claims := [claim for part in parts.values() for claim in part.get("claims", ())]:
        show_claims(runs[0], claims)
    print(json.dumps(in_json(record)), flush=True)
    if failed := [line for part in parts.values() for line in failures(part)]:
        raise UserError(f"not all could be run: {'; '.join(failed)}; what could is kept")


if __name__ == "__main__":
    config.run(main)
