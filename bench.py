"""Time configurations side by side: interleaved in one process, so that a machine that drifts drifts for all of them.

    python bench.py train config/grt_tiny.py config/gpt_tiny.py             # training step: time ratio beside FLOPs ratio
    python bench.py generate config/grt_tiny.py --batch_size=4              # cached generation over uncached

Random weights and random tokens. A table and one JSON line, the last, go to stdout; progress goes to stderr. Ratios are
medians over the repeats of CPU time (CUDA: wall time) against the first column's configuration in the same repeat.
"""
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import config  # before torch: see the top of config/__init__.py
import torch
from tqdm import tqdm

from config import UserError, key
from model import FOLDS, GPT, GPTConfig, param_groups
from train import TrainConfig, check_ranges, clip_gradients, commit, compile_parts, pick_device, step_gradients, want_compile

MODES = ("train", "generate")
RANGES = {"vocab_size": (1, math.inf), "batch_size": (1, math.inf), "repeats": (1, math.inf), "seq_len": (1, math.inf),
          "depth": (0, math.inf), "prompt_tokens": (1, math.inf), "new_tokens": (1, math.inf), "threads": (1, math.inf)}


@dataclass
class BenchConfig:
    """Measuring"""
    vocab_size: int | None = key(None, "rows of the token table; None = 320, the byte tokenizer's")
    batch_size: int = key(8, "rows")
    repeats: int = key(9, "interleaved repeats; the median counts")
    seq_len: int | None = key(None, "train: tokens per row; None = block_size")
    depth: int | None = key(None, "steps to run; None = n_recur, also in training")
    prompt_tokens: int = key(1, "generate: tokens of the prompt")
    new_tokens: int = key(256, "generate: tokens to write")
    cache: str = key("full", "generate: K/V kept of the looped core", choices=tuple(FOLDS))
    threads: int = key(1, "CPU threads")


def clock(device):
    """CPU time of this process; on a GPU, wall time once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def train_step(cfg, s, device, autocast, compiled):
    """A function that runs one optimizer step, its FLOPs (forward and backward count three forwards) and its tokens."""
    T = s.seq_len or cfg.block_size
    if T > cfg.block_size:
        raise ValueError(f"seq_len={T} is more than block_size={cfg.block_size}")
    model = GPT(cfg).to(device).train()
    if compiled:
        compile_parts(model)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-4, fused=True)
    ids_BT = torch.randint(cfg.vocab_size, (s.batch_size, T + 1), device=device)
    depth, batch = cfg.n_recur if s.depth is None else model.check_depth(s.depth), [(ids_BT[:, :-1], ids_BT[:, 1:])]
    at_depth = lambda ids_BT, targets_BT, seed: model(ids_BT, targets_BT, depth=depth, seed=seed)

    def step():
        step_gradients(at_depth, batch, [(0, 0)], autocast)
        clip_gradients(model, s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, 3 * s.batch_size * T * cfg.flops_per_token(T, depth=depth), s.batch_size * T


def generate_step(cfg, s, device, autocast, use_cache):
    """A function that writes new_tokens for every row, its FLOPs (one pass over all tokens with a cache: causal attention
    adds up the same token by token; one pass over the whole context per token without) and its new tokens."""
    if s.prompt_tokens + s.new_tokens - 1 > cfg.block_size:
        raise ValueError(f"prompt_tokens={s.prompt_tokens} and new_tokens={s.new_tokens} do not fit block_size={cfg.block_size}; "
                         f"together they may be {cfg.block_size + 1}")
    model = GPT(cfg).to(device).eval()
    model.check_depth(s.depth)
    cfg.check_cache(s.cache)
    ids_BT = torch.randint(cfg.vocab_size, (s.batch_size, s.prompt_tokens), device=device)

    def step():
        with autocast:
            model.generate(ids_BT, s.new_tokens, temperature=0, depth=s.depth, cache=s.cache, use_cache=use_cache)

    last = s.prompt_tokens + s.new_tokens - 1
    head, whole = 2 * cfg.vocab_size * cfg.n_embd, lambda n: n * cfg.flops_per_token(n, depth=s.depth)
    passes = [last] if use_cache else range(s.prompt_tokens, last + 1)
    unused_heads = sum(passes) - s.new_tokens                 # logits are made only where a token is drawn
    return step, s.batch_size * (sum(map(whole, passes)) - unused_heads * head), s.batch_size * s.new_tokens


def interleave(steps, repeats, device):
    """seconds[name][repeat] after one warm-up round; and the seconds of that round (set-up, compilation)."""
    seconds, warm = {name: [] for name in steps}, {}
    rounds = [(i, name) for i in range(-1, repeats) for name in steps]
    for i, name in tqdm(rounds, disable=None, leave=False):
        start = clock(device)
        steps[name]()
        took = clock(device) - start
        if i < 0:
            warm[name] = took
        else:
            seconds[name].append(took)
    return seconds, warm


def table(names, seconds, flops, tokens):
    """One row per name: median ms, spread, tokens/s, time ratio and FLOPs ratio to the first name."""
    first, rows = names[0], []
    for name in names:
        median = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds[first])]
        rows.append({"name": name, "ms": median * 1e3, "spread_ms": (max(seconds[name]) - min(seconds[name])) * 1e3,
                     "tokens_per_second": tokens[name] / median, "time_ratio": statistics.median(ratios),
                     "flops_ratio": flops[name] / flops[first]})
        rows[-1]["time_over_flops"] = rows[-1]["time_ratio"] / rows[-1]["flops_ratio"]
    width = max(len(name) for name in names)
    print(f"{'':{width}} {'ms':>10} {'spread':>8} {'tokens/s':>10} {'time':>7} {'FLOPs':>7} {'time/FLOPs':>10}")
    for r in rows:
        print(f"{r['name']:{width}} {r['ms']:10.1f} {r['spread_ms']:8.1f} {r['tokens_per_second']:10,.0f} {r['time_ratio']:7.3f} "
              f"{r['flops_ratio']:7.3f} {r['time_over_flops']:10.3f}")
    return rows


def settings_of(argv):
    """(mode, one Settings for each config file, each with the same flags)."""
    schema, words = [GPTConfig, TrainConfig, BenchConfig], "MODE (" + " or ".join(MODES) + ")"
    s = config.parse(argv, schema, __doc__, words=words)
    if len(s.words) != 1 or s.words[0] not in MODES:
        raise UserError(f"bench.py takes one mode, {' or '.join(MODES)}, got {' '.join(s.words) or 'none'}")
    if not s.files:
        raise UserError(f"bench.py {s.words[0]} needs config files, for example config/grt_tiny.py")
    flags, all_settings = [arg for arg in argv if arg not in s.files], {}
    for path in s.files:
        name = Path(path).stem
        while name in all_settings:                           # a config beside itself shows how much the machine varies
            name += "'"
        all_settings[name] = config.parse([*flags, path], schema, __doc__, words=words)
        check_ranges(all_settings[name], RANGES)
    return s.words[0], all_settings


def main(argv):
    mode, all_settings = settings_of(argv)
    s = next(iter(all_settings.values()))
    device, dtype, autocast = pick_device(s)
    torch.set_num_threads(s.threads)
    torch.manual_seed(0)
    cfgs = {name: one.build(GPTConfig, vocab_size=one.vocab_size or 320) for name, one in all_settings.items()}
    compiled = mode == "train" and want_compile(s.compile, device)
    if s.compile is True and not compiled:
        print(f"note: bench.py {mode} runs eagerly", file=sys.stderr)
    try:
        if mode == "train":
            made = {name: train_step(cfg, all_settings[name], device, autocast, compiled) for name, cfg in cfgs.items()}
        else:
            made = {f"{name} {how}": generate_step(cfg, all_settings[name], device, autocast, how == "cached")
                    for name, cfg in cfgs.items() for how in ("cached", "uncached")}
    except ValueError as error:
        raise UserError(str(error))
    steps, flops, tokens = ({name: parts[i] for name, parts in made.items()} for i in range(3))
    print(f"{mode}: {', '.join(f'{name} {cfg.layout} ({all_settings[name].batch_size} rows)' for name, cfg in cfgs.items())}; "
          f"{f'{s.new_tokens} tokens after {s.prompt_tokens}; ' if mode == 'generate' else ''}{device} {dtype}"
          f"{' compiled' if compiled else ''}, {s.threads} threads, torch {torch.__version__}, commit {commit()}")
    seconds, warm = interleave(steps, s.repeats, device)
    rows = table(list(made), seconds, flops, tokens)
    print(json.dumps({"mode": mode, "rows": rows, "first_round_seconds": warm, "repeats": s.repeats, "threads": s.threads, "device": str(device),
                      "dtype": dtype, "compiled": compiled, "torch": str(torch.__version__), "python": platform.python_version(),
                      "commit": commit()}), flush=True)


if __name__ == "__main__":
    config.run(main)
