"""Measure trained runs: the loss of the whole validation split, and the loss at every depth against what it costs.

    python eval.py                                                # every part, for the newest run in out/
    python eval.py loss --out_dir=out/grt_tiny --compare=out/gpt_tiny       # side by side, with a paired difference
    python eval.py depth --out_dir=out/grt_tiny --compare=out/gpt_tiny --compare=out/recursive_tiny     # and out/grt_tiny/depth.png

Parts: loss, depth; none = all. Tables and one JSON line, the last, go to stdout; progress goes to stderr. The JSON is also
in OUT_DIR/eval.json, where the parts of earlier calls stay while the checkpoint is the same.
"""
import hashlib
import json
import math
import platform
import sys
import zipfile
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
from model import GPT, NO_CACHES, Silence, at_least_fp32
from sample import load_run, newest_run
from train import Split, check_ranges, checkpoint_of, commit, evaluate, fitting, fixed_windows, load_checkpoint, pick_device, write_whole

RANGES = {"eval_tokens": (1, math.inf), "batch_size": (1, math.inf)}
LOGITS = 2**24                # made at a time: 64 MiB in float32
TOLERANCE = 1e-6              # nats per token between the loss that train.py stored and the same one measured again


@dataclass
class EvalConfig:
    """Evaluation"""
    out_dir: str | None = key(None, "folder of the run, or one of its checkpoints; None = the newest run in out/")
    compare: list[str] = key([], "a further run (folder or checkpoint) to set beside it; may be repeated")
    dataset: str | None = key(None, "data set whose validation split is read; None = each run's own")
    data_dir: str | None = key(None, "folder of the data sets; None = the one that each run was trained from")
    eval_tokens: int = key(65536, "depth: validation tokens, in fixed windows, evenly spaced (loss always reads the whole split)")
    batch_size: int | None = key(None, "windows at a time, which changes no result; None = the run's own")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps ...")
    dtype: str | None = key(None, "auto = bfloat16 autocast on CUDA, float32 elsewhere; None = the run's own", choices=("auto", "float32", "bfloat16"))


# -------------------------------------------------------------------------------------------------------------- the runs


class Run(NamedTuple):
    """A trained model beside the validation split that it is measured on."""
    folder: Path                  # or one of its checkpoints
    model: GPT                    # in evaluation mode: no dropout, no noise
    state: dict                   # the checkpoint without its tensors
    dataset: str
    meta: dict                    # the data set's meta.json
    split: Split
    batch_size: int
    device: torch.device
    autocast: object

    name = property(lambda self: str(self.folder))
    home = property(lambda self: checkpoint_of(self.folder).parent)
    bits = property(lambda self: bits_per_nat(self.meta["val"]))


def bits_per_nat(part):
    """Nats per token times this are bits per byte: x tokens / bytes / ln 2. `part` is a split's entry in meta.json."""
    return part["tokens"] / part["bytes"] / math.log(2)


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
    own, (model, _, about) = state["settings"], load_run(folder, device)
    if about["step"] != state["step"]:                        # a run that is still trained
        raise UserError(f"{checkpoint_of(folder)} was saved anew while it was read; run the command again")
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
    split = Split(data_dir, dataset, "val", meta, model.cfg.block_size)
    split.check_ids(model.cfg.vocab_size)
    return Run(folder, model, state, dataset, meta, split, s.batch_size or own["batch_size"], device, autocast)


# ----------------------------------------------------------------------------------------------- nats, window by window


def is_plain(cfg):
    """No loop and no rule of update: a dense transformer, which can be left after any of its blocks."""
    return cfg.n_recur == 1 and cfg.update == "replace"


def exit_depths(cfg):
    """Where a model can be left, ascending: after each step, twice as deep as n_recur too; dense: after each core block,
    as fractions of its one step; the depth that it has, where every step has blocks of its own."""
    if is_plain(cfg):
        return [k / cfg.n_core for k in range(cfg.n_core + 1)]
    if not cfg.any_depth or cfg.router == "token":            # a token-choice model ends every token's last step in its own way
        return [cfg.n_recur]
    return list(range((2 if cfg.router == "none" else 1) * cfg.n_recur + 1))


def features_at(model, ids_BT, depths):
    """Yield what the head reads after each of `depths` (ascending) in one pass: a deeper state goes on from a shallower."""
    cfg, cache, noise, done = model.cfg, NO_CACHES[model.cfg.kv](), Silence(), 0
    h_BTD, e_BTD, outer = model.start(ids_BT, cache)
    anchor, who = model.recursion.update.anchor(e_BTD), model.recursion.router.enter(e_BTD, outer, cfg.n_recur)
    for depth in depths:
        wanted = round(depth * cfg.n_core) if is_plain(cfg) else depth          # blocks, or steps
        for i in range(done, wanted):
            if is_plain(cfg):
                h_BTD = model.recursion.core[cfg.sharing_rule.block(0, i, cfg)](h_BTD, who.cos, who.sin, cache.core_seat(0, i))
            else:
                h_BTD, who = model.recursion.step(h_BTD, anchor, who, i, noise, cache)
        done = wanted
        yield model.finish(h_BTD, outer, cache)


def row_nats(model, x_BTD, targets_BT):
    """Summed nats of each row and how many targets they are of (-100 is none), float64 on the CPU; few logits at a time."""
    n = max(1, LOGITS // model.cfg.vocab_size)                # tokens at a time
    pieces = zip(x_BTD.flatten(0, 1).split(n), targets_BT.flatten().split(n))
    nats_N = torch.cat([F.cross_entropy(at_least_fp32(model.head(x_nD)), target_n, reduction="none") for x_nD, target_n in pieces])
    return nats_N.view(targets_BT.shape).cpu().double().sum(1), (targets_BT != -100).cpu().double().sum(1)


def whole_split(split):
    """Starts of consecutive windows: every token but the very first is predicted once; the last window may be short."""
    return range(0, split.n_tokens - 1, split.width - 1)


def batches(run, starts):
    """(ids, targets) of these windows, batch_size at a time; a window that the end of the data cuts comes alone."""
    starts = [int(start) for start in starts]
    whole = [start for start in starts if start + run.split.width <= run.split.n_tokens]
    for i in tqdm(range(0, len(whole), run.batch_size), desc=run.name, disable=None, leave=False):
        yield run.split.batch(whole[i : i + run.batch_size], run.device)
    for start in starts[len(whole) :]:
        row_1T = torch.from_numpy(run.split.read(start, run.split.width))[None].to(run.device)
        yield row_1T[:, :-1], row_1T[:, 1:]


@torch.no_grad()
def window_nats(run, starts, depths):
    """(nats, counts) as float64 arrays: nats[i, w] of window w at depths[i], and counts[w] targets."""
    nats, counts = [], []
    for ids_BT, targets_BT in batches(run, starts):
        with run.autocast:
            rows = [row_nats(run.model, x_BTD, targets_BT) for x_BTD in features_at(run.model, ids_BT, depths)]
        nats.append(torch.stack([nats_B for nats_B, _ in rows]))
        counts.append(rows[0][1])
    return torch.cat(nats, 1).numpy(), torch.cat(counts).numpy()


def bootstrap(nats, counts, seed=0, resamples=1000):
    """The mean per token of as many windows drawn with replacement, again and again: how much it depends on the windows
    that happen to be there. (Windows are taken as independent; neighbours from one document are less than that.)"""
    if len(nats) == 1:
        return np.full(resamples, np.nan)                     # one window says nothing about others
    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(nats), size=len(nats)) for _ in range(resamples))
    return np.array([nats[draw].sum() / counts[draw].sum() for draw in draws])


def interval(means):
    """The middle 95%; None where the resampled means have none."""
    return None if np.isnan(means).any() else np.quantile(means, (0.025, 0.975)).tolist()


# ------------------------------------------------------------------------------------------------------------- part: loss


def measure_loss(run):
    """(numbers for the record, nats of each window, counts): the whole split once, at full depth."""
    depths = [run.model.cfg.n_recur]
    (nats,), counts = window_nats(run, whole_split(run.split), depths)
    mean = nats.sum() / counts.sum()
    numbers = {"tokens": int(counts.sum()), "windows": len(counts), "block_size": run.split.width - 1, "nats_per_token": mean,
               "interval": interval(bootstrap(nats, counts)), "bits_per_byte": mean * run.bits,
               "perplexity": math.inf if mean > 700 else math.exp(mean)}
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
        unit, value = "nats/token", (other_nats - nats).sum() / counts.sum()
        means = bootstrap(other_nats - nats, counts)
    else:
        unit, value = "bits/byte", other_nats.sum() / other_counts.sum() * other.bits - nats.sum() / counts.sum() * run.bits
        means = bootstrap(other_nats, other_counts, seed=1) * other.bits - bootstrap(nats, counts) * run.bits
    return {"unit": unit, "value": value, "interval": interval(means), "paired": not why, "why": why}


def show_interval(pair, form):
    return "-" if pair is None else f"{pair[0]:{form}} .. {pair[1]:{form}}"


def report_loss(runs, s):
    """Nats per token, bits per byte and perplexity of every run; differences to the first one."""
    measured = [(run, *measure_loss(run)) for run in runs]
    print("loss: the whole validation split at full depth")
    show(("run", "step", "nats/token", "95% interval", "bits/byte", "perplexity", "tokens", "windows"),
         [(run.name, str(run.state["step"]), f"{n['nats_per_token']:.4f}", show_interval(n["interval"], ".4f"), f"{n['bits_per_byte']:.4f}",
           f"{n['perplexity']:,.2f}", f"{n['tokens']:,}", f"{n['windows']:,}") for run, n, *_ in measured])
    for run, n, *_ in measured:
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


def measure_depth(run, eval_tokens):
    cfg, depths, starts = run.model.cfg, exit_depths(run.model.cfg), fixed_windows(run.split, eval_tokens)
    nats, counts = window_nats(run, starts, depths)
    means = nats.sum(1) / counts.sum()
    points = [{"depth": depth, "flops_per_token": cfg.flops_per_token(cfg.block_size, depth=depth), "nats_per_token": mean,
               "bits_per_byte": mean * run.bits, "training": training_at(cfg, depth)} for depth, mean in zip(depths, means.tolist())]
    return {"windows": len(starts), "tokens": int(counts.sum()), "layout": cfg.layout, "update": cfg.update, "points": points}


def training_at(cfg, depth):
    """What training knew of a depth. A model does best where it was trained; elsewhere expect worse."""
    low = cfg.min_depth if cfg.depth_sampling == "uniform" else cfg.n_recur
    return "full depth" if depth == cfg.n_recur else "trained" if low <= depth < cfg.n_recur else "never trained"


def report_depth(runs, s):
    """Loss after every step (dense: every core block) against FLOPs; one picture for all runs."""
    measured = [(run, measure_depth(run, s.eval_tokens)) for run in runs]
    print(f"depth: loss after each step against FLOPs of a forward pass, on {measured[0][1]['windows']:,} fixed windows "
          f"({measured[0][1]['tokens']:,} tokens); k/L = a dense model left after k of its L core blocks")
    for run in runs[1:]:
        if why := why_unpaired(runs[0], run):
            print(f"{run.name}: not the windows of {runs[0].name}, as {why}" + ("; compare bits/byte alone" if "tokenizers" in why else ""))
    rows = []
    for run, n in measured:
        cfg = run.model.cfg
        if len(n["points"]) == 1:
            why = f"sharing={cfg.sharing_name!r}" if not cfg.any_depth else f"router={cfg.router!r}"
            print(f"{run.name}: {why} has one depth only, n_recur={cfg.n_recur}")
        for p in n["points"]:
            where = f"{round(p['depth'] * cfg.n_core)}/{cfg.n_core}" if is_plain(cfg) else str(p["depth"])
            rows.append((run.name, where, f"{p['flops_per_token'] / 1e6:,.3f}", f"{p['nats_per_token']:.4f}", f"{p['bits_per_byte']:.4f}", p["training"]))
    show(("run", "depth", "MFLOP/token", "nats/token", "bits/byte", ""), rows)
    others = [{**identity(run), "data": data(run), **n} for run, n in measured[1:]]
    return {**measured[0][1], "picture": draw(measured), "compare": others}


def draw(measured):
    """OUT_DIR/depth.png: one line per run, a ring around its full depth; what is far above all rings leaves the frame, or
    nobody could tell those apart. Returns the path, or None, and says why."""
    try:
        from matplotlib.figure import Figure                  # not pyplot: no display, no global state, PNG is drawn by Agg
    except ImportError:
        print("note: no picture, as matplotlib is not here (pip install matplotlib)", file=sys.stderr)
        return None
    first, path = measured[0][0], measured[0][0].home / "depth.png"
    unit = "nats_per_token" if all(run.meta["fingerprint"] == first.meta["fingerprint"] for run, _ in measured) else "bits_per_byte"
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    for run, n in measured:
        cfg, x, y = run.model.cfg, [p["flops_per_token"] for p in n["points"]], [p[unit] for p in n["points"]]
        label = f"{n['layout']} {n['update']} ({run.name})".replace("$", r"\$")
        (line,) = axes.plot(x, y, marker="o", markersize=4, linewidth=1.5, label=label)
        for p, x_p, y_p in zip(n["points"], x, y):
            if p["depth"] == cfg.n_recur:
                axes.plot(x_p, y_p, "o", markersize=11, fillstyle="none", color=line.get_color())
            if not is_plain(cfg):
                axes.annotate(str(p["depth"]), (x_p, y_p), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8, color=line.get_color())
    every = [p[unit] for _, n in measured for p in n["points"] if math.isfinite(p[unit])]
    top = 1.5 * max(p[unit] for _, n in measured for p in n["points"] if p["training"] == "full depth")
    if every and max(every) > top:
        axes.set_ylim(min(every) - (top - min(every)) / 20, top)
    axes.set(xscale="log", xlabel="FLOPs per token, one forward pass", ylabel=f"validation loss, {unit.replace('_', ' ')}",
             title="Loss at every depth (number: steps; ring: full depth; a dense model: after each block)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
        print(f"picture: {path}")
        return str(path)
    except UserError as error:                                # the numbers are worth more than the picture
        print(f"note: no picture: {error}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------- tables, the record


# A part takes the runs, the first one in front, and the settings; it prints and returns its record.
PARTS = {"loss": report_loss, "depth": report_depth}


def show(head, rows):
    """An aligned table: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def identity(run):
    return {"folder": run.name, "step": run.state["step"], "checkpoint": run.state["checkpoint"]}


def data(run):
    """The validation split: its place, the fingerprint of its tokenizer, its tokens, bytes and checksum."""
    return {"dataset": run.dataset, "path": str(run.split.path), "fingerprint": run.meta["fingerprint"], **run.meta["val"]}


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
    s = config.parse(argv, [EvalConfig], __doc__, words=("", len(argv)))
    for word in s.words:
        if word not in PARTS:
            hint = f"; a run is --out_dir={word}" if Path(word).exists() else near(word, PARTS) or f"; its parts are {', '.join(PARTS)}"
            raise UserError(f"command line: eval.py has no part {word!r}{hint}")
    check_ranges(s, RANGES)
    return s


def main(argv):
    s = parse(argv)
    folders = [Path(s.out_dir) if s.out_dir is not None else newest_run(), *map(Path, s.compare)]
    states = [read_state(folder) for folder in folders]
    s.values["dtype"] = s.dtype or states[0]["settings"]["dtype"]
    device, dtype, autocast = pick_device(s)
    runs = [open_run(folder, state, s, device, autocast) for folder, state in zip(folders, states)]
    made = {"commit": commit(), "torch": str(torch.__version__), "python": platform.python_version(), "device": str(device), "dtype": dtype,
            "data": data(runs[0])}
    for run in runs:
        cfg = run.model.cfg
        print(f"{run.name}: {cfg.layout} update={cfg.update}, step {run.state['step']}, data {run.split.path}; {device} {dtype}", file=sys.stderr)
    parts = {name: {**made, **PARTS[name](runs, s)} for name in dict.fromkeys(s.words or PARTS)}
    record = {**identity(runs[0]), "parts": parts}
    record = json.loads(json.dumps(record), parse_constant=str)                 # JSON has no NaN: it becomes a word
    print(json.dumps(record), flush=True)
    save(runs[0].home / "eval.json", record)


if __name__ == "__main__":
    config.run(main)
