"""Transformers that reuse their depth: a prelude, a core applied n_recur times with the same weights, and a coda.

    python model.py config/grt_small.py        # depth plan, parameters, FLOPs, cache and shapes, in a second

One picture, one loop. Everything that a configuration can ask for is a choice about it:

    ids_BT -> [start: embed, prelude] -> h, e -> { read -> core -> write -> look -> who goes on? } x depth -> [finish: coda, norm, head] -> logits_BTV

`h` is the state that the loop rewrites; `e`, the anchor, is the prelude's output, which stays. A layout is written
n_prelude + n_core x n_recur + n_coda: GPT-2 Small is 0+12x1+0, GRT Medium is 2+5x4+2. A *block* is a set of weights,
a *step* is one pass through the core (steps count from 0), *depth* is how many steps are run. While decoding, each
executed block has a *slot*, a store with one *place* per token for its K and V.

The rooms, each built from those before it. Every choice of the config is a row in a table of the room that it belongs to:
    1 config   2 small parts   3 K/V cache   4 attention, MLP, block   5 depth plan   6 routers   7 state updates
    8 depth and noise   9 Recursion and GPT: start, step, finish   10 use: generate and counts   11 optimizer groups

The alphabet. A tensor that carries data through the model has a name that ends in its shape; a plain list with one
number per row ends in _B:
    B batch rows      T new tokens      S stored tokens     C chosen tokens     N flattened B x T    1 a broadcast axis
    D n_embd          H query heads     G key/value heads   K head width        F MLP width          V vocabulary
    E 2 D: state beside anchor          P places of a cache slot, over all its rows          n some of the N
    A rows with a token in the step     L, M those of the A and C who continue  R steps (n_recur)
    Q R x N: what is read of every step
Papers: GRT = Gated Recurrent Transformers (arXiv 2608.15062); MoR = Mixture-of-Recursions (Bae et al. 2025);
Huginn = Geiping et al. 2025; RRT = Relaxed Recursive Transformers (Bae et al. 2024); Ouro = Zhu et al. 2025;
GPT-2 = Radford et al. 2019; Llama = Touvron et al. 2023.
"""
import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    raise SystemExit(f"torch {torch.__version__} is too old: 2.11 or newer is needed (pip install --upgrade torch)")
try:  # optional: PyTorch's own attention gives the same answers
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
except ImportError:
    flash_attn_func = flash_attn_with_kvcache = None

# -------------------------------------------------------------------------------------------------------------- 1 config


def key(default, help):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class GPTConfig:
    """The model: shape, layout and the choices about the loop"""
    block: str = key("gpt2", "block type: gpt2 (LayerNorm, learned positions, GELU) or llama (RMSNorm, RoPE, SwiGLU)")
    vocab_size: int = key(50304, "rows of the token table")
    block_size: int = key(1024, "longest context in tokens")
    n_embd: int = key(768, "width of the residual stream (D)")
    n_head: int = key(12, "query heads (H)")
    n_kv_head: int | None = key(None, "key/value heads (G), each serving n_head / n_kv_head query heads; None = n_head")
    n_ffn: int | None = key(None, "MLP width (F); None = 4 n_embd (llama: 8/3 n_embd, up to a multiple of 8)")
    bias: bool = key(False, "biases in linear layers and LayerNorms, as GPT-2 has (the gate's b2 is always there)")
    dropout: float = key(0.0, "dropout on embeddings, attention weights and residual branches")
    n_prelude: int = key(0, "blocks before the loop, each run once")
    n_core: int = key(12, "blocks run in one step of the loop")
    n_recur: int = key(1, "steps of the loop (R) at full depth; 1 = a plain transformer")
    n_coda: int = key(0, "blocks after the loop, each run once")
    sharing: str | None = key(None, "which core block runs when: cycle, sequence, with a prelude or coda middle_cycle, middle_sequence; None = (middle_)cycle")
    update: str = key("replace", "what a step reads and leaves: replace, inject (concat adapter), gate (GRT)")
    router: str = key("none", "who continues to the next step: none = every token; expert = a step chooses tokens; token = a token its depth")
    router_kind: str = key("linear", "router's function of a token's state: linear, or mlp with one hidden layer")
    router_width: int | None = key(None, "hidden width of an mlp router; None = 2 n_embd")
    router_score: str | None = key(None, "score of a logit: sigmoid, tanh, none, add = 1 (expert); softmax, sigmoid (token); None = sigmoid, softmax")
    router_alpha: float | None = key(None, "factor on the score; None = 0.1 for expert, 1 for token, for add and beside a gate")
    router_choice: str = key("score", "expert: who goes on: by score, or random: by one lot for each position and step, fixed for good; the floor that a router has to beat")
    capacity: list[float] | None = key(None, "expert: share of all tokens that each step takes; None = (n_recur - step) / n_recur")
    threshold: float = key(0.5, "expert, outside training: a token goes on if sigmoid(its logit) is at least this")
    router_loss: float | None = key(None, "weight of the router's own loss beside the mean loss of language; None = 0.016 (expert), 0.1 (token)")
    router_balance: str = key("loss", "token: depths are evened out by a loss, or by a bias on the choice (loss-free)")
    router_z_loss: float | None = key(None, "weight of the mean squared logsumexp of the router's logits; None = 0 (expert), 1e-5 (token)")
    aux_router: bool = key(False, "expert: routers of their own learn the choice from detached states, in place of a loss, and decide outside training")
    kv: str = key("own", "whose K/V a step attends to: own = made in the same step; share = made at step 0, read at every step; share_k, share_v = one of the two")
    lora_rank: int = key(0, "rank of what every step adds to every linear of the core's blocks, weights of its own (RRT: 8); 0 = nothing")
    state_init: str = key("anchor", "state before step 0: anchor = the prelude's output; random = noise, and only the adapter brings the text in (Huginn)")
    state_std: float | None = key(None, "random first state: its std; None = the embeddings' at the start; Huginn's, for embeddings sqrt(n_embd) as large: (2/5)**.5")
    state_seed: int = key(0, "random first state outside training: a function of this and of the position alone")
    depth_sampling: str = key("fixed", "depth of a training micro-batch: fixed (n_recur), uniform (min_depth..n_recur), poisson (heavy tail, mean poisson_mean + 1)")
    min_depth: int = key(1, "smallest depth that uniform sampling draws")
    poisson_mean: float | None = key(None, "poisson: the mean of what is added to one step; None = n_recur - 1, so that the mean depth is n_recur")
    bptt: int | None = key(None, "steps that gradients go back through, the last ones; None = all (Huginn: 8)")
    loss: str = key("last", "which steps are supervised: last = one cross-entropy after the final step; every = each step's, weighed by an exit gate (Ouro)")
    exit_entropy: float = key(0.1, "loss=every: weight of the entropy of the exit distribution, which keeps it from settling on one step")
    fused_loss: bool = key(False, "with targets: head and loss in chunks of tokens, so all logits are never there at once (logits: None)")
    state_noise: float = key(0.0, "std of the noise on the state that a step reads, training only (GRT: 0.1)")
    gate_noise: float = key(0.0, "std of the per-token noise inside the gate's sigmoid, training only (GRT: 0.1)")
    gate_bias: float = key(4.0, "initial b2 of the gate: +4 keeps .982 of the old state at every step")
    gate_temperature: float = key(1.0, "tau: the gate's logit is divided by it, before the noise")
    proj_init: str = key("normal", "adapter's start: normal = N(0, 0.02) at any width (GRT); scaled = N(0, 1 / sqrt(2 n_embd)), which lets small widths through as "
                         "0.02 does at 1250; identity = reads the state and ignores the anchor")
    sandwich_norm: bool = key(False, "a norm after each residual sum too (Huginn)")
    loop_norm: bool = key(False, "a norm of the state after every step (Ouro); without a coda it is the final norm as well, and depth 0 has none")
    rope_theta: float = key(10000.0, "RoPE's base period (llama blocks)")
    norm_eps: float = key(1e-5, "epsilon of every norm")

    def __post_init__(self):
        for name, table in (("block", KINDS), ("sharing", SHARINGS), ("update", UPDATES), ("router", ROUTERS), ("kv", SLOTS),
                            ("state_init", STATES), ("depth_sampling", DEPTHS), ("loss", LOSSES), ("proj_init", PROJ_INITS)):
            value = getattr(self, name)
            if value not in table and not (name == "sharing" and value is None):
                raise ValueError(f"{name}={value!r} is not one of {', '.join(table)}")
        for name, least in (("block_size", 1), ("n_embd", 1), ("n_head", 1), ("n_core", 1), ("n_recur", 1),
                            ("n_prelude", 0), ("n_coda", 0), ("vocab_size", 1), ("lora_rank", 0), ("state_seed", 0),
                            ("n_kv_head", 1), ("n_ffn", 1), ("bptt", 1)):
            value = getattr(self, name)
            if value is None and name not in ("n_kv_head", "n_ffn", "bptt"):
                raise ValueError(f"{name}=None is not a number; a model needs one")
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is too small; it must be at least {least}")
        for name in ("router_width", "router_alpha", "router_loss", "router_z_loss", "state_std", "poisson_mean"):
            value, zero = getattr(self, name), "loss" in name
            if value is not None and not (0 < value < math.inf or zero and value == 0):
                raise ValueError(f"{name}={value} must be positive and finite" + zero * "; 0 turns it off")
        for name in ("dropout", "state_noise", "gate_noise", "exit_entropy"):
            if not 0 <= getattr(self, name) < (1 if name == "dropout" else math.inf):
                raise ValueError(f"{name}={getattr(self, name)} is out of range; 0 turns it off")
        for name in ("gate_temperature", "rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        self._check_shape()
        self._check_loop()
        self._check_router()
        self._check_training()

    def _check_shape(self):
        if self.n_embd % self.n_head:
            fits = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - self.n_head))[:2])
            raise ValueError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}; try {' or '.join(map(str, near))}")
        if self.n_head % self.kv_heads:
            fits = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}; try one of {fits}")
        if self.block == "llama" and self.head_width % 2:
            raise ValueError(f"n_head={self.n_head} gives heads of odd width {self.head_width}, and RoPE turns pairs; "
                             f"choose n_embd / n_head even")
        if self.block == "llama" and self.bias:
            raise ValueError("bias=True is a GPT-2 option; llama blocks have no biases")

    def _check_loop(self):
        middle, rule = bool(self.n_prelude or self.n_coda), self.sharing_rule
        if rule.middle not in (None, middle):
            raise ValueError(f"sharing={self.sharing!r} contradicts the layout {self.layout}: a name with middle_ has a "
                             f"prelude or coda, one without has neither")
        if not 1 <= self.min_depth <= self.n_recur:
            raise ValueError(f"min_depth={self.min_depth} is outside 1..n_recur={self.n_recur}")
        if not rule.any_depth:
            for name, only in (("update", "replace"), ("depth_sampling", "fixed"), ("router", "none"), ("kv", "own")):
                if getattr(self, name) != only:
                    raise ValueError(f"{name}={getattr(self, name)!r} does not go with sharing={self.sharing!r}, whose steps "
                                     f"differ from each other; use {only!r}, or sharing {'middle_' * middle}cycle")
        if self.executed_blocks() > 10_000:
            raise ValueError(f"n_recur={self.n_recur} unrolls to {self.executed_blocks()} blocks; that is surely a slip")

    def _check_router(self):
        for name, known in (("router_kind", ("linear", "mlp")), ("router_choice", ("score", "random")), ("router_balance", ("loss", "bias"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        for name, off, needs in (("router_choice", "score", "expert"), ("aux_router", False, "expert"), ("router_balance", "loss", "token")):
            if getattr(self, name) != off and self.router != needs:
                raise ValueError(f"{name}={getattr(self, name)!r} belongs to router={needs!r}, and this is router={self.router!r}; leave it out")
        if self.aux_router and self.router_choice == "random":
            raise ValueError("aux_router=True would learn a random choice; use router_choice='score', or leave it out")
        scores = {"none": (None,), "expert": (None, "sigmoid", "tanh", "none", "add"), "token": (None, "softmax", "sigmoid")}[self.router]
        if self.router_score not in scores:
            raise ValueError(f"router_score={self.router_score!r} does not go with router={self.router!r}; it is one of {', '.join(map(str, scores))}")
        if self.router_score == "add" and self.router_choice == "score" and (self.aux_router or not self.router_weight):
            why = "aux_router=True teaches to others" if self.aux_router else "router_loss=0 turns off"
            raise ValueError(f"router_score='add' leaves a router its own loss to learn its choice from, which {why}; use another score, or leave that out")
        if self.router == "token" and self.update == "gate":
            raise ValueError("router='token' does not go with update='gate', whose last step is no whole output; use router='expert'")
        if self.router_balance == "bias" and self.depth_sampling != "fixed":
            raise ValueError(f"router_balance='bias' counts who chose which depth, which depth_sampling={self.depth_sampling!r} cuts short; use fixed")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} is outside 0..1")
        shares = self.capacity
        if shares is not None and (self.router != "expert" or len(shares) != self.n_recur or not all(0 < c <= 1 for c in shares)):
            raise ValueError(f"capacity={shares} must be one share of the tokens in (0, 1] for each of the n_recur={self.n_recur} steps of an "
                             f"expert-choice model")
        for step in range(1, len(shares or ())):
            if shares[step] > shares[step - 1]:
                raise ValueError(f"capacity={shares} rises at step {step}, which can only choose among those who took the step before; let no share "
                                 f"be larger than the one before it")
        if self.kv != "own" and self.router == "expert" and self.capacities[0] < 1:
            raise ValueError(f"kv={self.kv!r} is made at step 0 by all tokens, so capacity must begin with 1, not {self.capacities[0]}")

    def _check_training(self):
        every = self.loss == "every"
        for name, asked, other, allowed, why in (
                ("state_init", self.state_init == "random", "update", ("inject", "gate"), "nothing else brings the text to the loop"),
                ("state_init", self.state_init == "random", "router", ("none", "expert"), "a token's depth is chosen from its anchor"),
                ("depth_sampling", self.depth_sampling == "poisson", "router", ("none",), "it draws more than n_recur steps, and a router has n_recur"),
                ("depth_sampling", self.depth_sampling == "poisson", "lora_rank", (0,), "it draws more than n_recur steps, and low-rank additions are for n_recur"),
                ("bptt", self.bptt, "update", ("inject", "gate"), "the prelude learns through the anchor alone"),
                ("bptt", self.bptt, "router", ("none",), "the routers of earlier steps would not learn"),
                ("bptt", self.bptt, "lora_rank", (0,), "the low-rank additions of earlier steps would not learn"),
                ("bptt", self.bptt, "loss", ("last",), "every step is supervised"),
                ("bptt", self.bptt, "kv", ("own",), "what is made at step 0 and kept would not learn"),
                ("loss", every, "router", ("none",), "the steps of a routed model are not for all tokens"),
                ("loss", every, "sharing_name", ("cycle", "middle_cycle"), "a part of the loop has no meaning there"),
                ("loop_norm", self.loop_norm, "router", ("none",), "it norms what a step leaves of every token")):
            if asked and getattr(self, other) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} does not go with {other.removesuffix('_name')}={getattr(self, other)!r} ({why}); "
                                 f"use {' or '.join(map(repr, allowed))}")
        if self.depth_sampling == "poisson" and self.n_recur == 1 and self.poisson_mean is None:
            raise ValueError("depth_sampling='poisson' adds n_recur - 1 = 0 steps to one; give a larger n_recur, or poisson_mean")

    def unused(self):
        """Sentences about keys that were changed but cannot matter beside the others."""
        default = {f.name: f.default for f in fields(self)}
        rules = [(self.update != "gate", "update is not gate", ("gate_noise", "gate_bias", "gate_temperature")),
                 (self.update == "replace", "update='replace' has no adapter", ("proj_init",)),
                 (self.depth_sampling != "uniform", f"depth_sampling={self.depth_sampling!r}", ("min_depth",)),
                 (self.depth_sampling != "poisson", "depth_sampling is not poisson", ("poisson_mean",)),
                 (self.bptt is not None and self.bptt >= self.trained_depths[1], "training takes no more steps", ("bptt",)),
                 (self.state_init == "anchor", "the first state is the anchor", ("state_std", "state_seed")),
                 (self.loss == "last", "one step is supervised", ("exit_entropy",)),
                 (self.n_recur == 1, "there is one step, and nothing to choose from", ("loss",)),
                 (self.block != "llama", "only llama blocks rotate", ("rope_theta",)),
                 (self.router == "none", "there is no router", ("router_kind", "router_width", "router_alpha", "router_loss", "router_z_loss")),
                 (self.router != "expert", "router is not expert", ("threshold",)),
                 (self.router_balance == "bias", "router_balance='bias' has no loss", ("router_loss",)),
                 (self.router_choice == "random", "router_choice='random' asks nobody and teaches nothing", ("threshold", "router_loss")),
                 (self.router_choice == "random" and self.router_score == "add", "a random choice and no score need no router",
                  ("router_kind", "router_width", "router_z_loss")),
                 (self.router != "none" and self.router_kind == "linear", "router_kind='linear'", ("router_width",))]
        return [f"{name}={getattr(self, name)} has no effect: {why}" for holds, why, names in rules if holds
                for name in names if getattr(self, name) != default[name]]

    # What follows from the keys.
    layout = property(lambda self: f"{self.n_prelude}+{self.n_core}x{self.n_recur}+{self.n_coda}")
    kv_heads = property(lambda self: self.n_kv_head or self.n_head)
    head_width = property(lambda self: self.n_embd // self.n_head)
    sharing_name = property(lambda self: self.sharing or ("middle_cycle" if self.n_prelude or self.n_coda else "cycle"))
    sharing_rule = property(lambda self: SHARINGS[self.sharing_name])
    any_depth = property(lambda self: self.sharing_rule.any_depth)
    score_name = property(lambda self: self.router_score or {"expert": "sigmoid", "token": "softmax"}.get(self.router))
    first_std = property(lambda self: self.state_std or 0.02 * (2 if self.block == "gpt2" else 1) ** 0.5)        # of one table, or of two
    poisson_rate = property(lambda self: self.n_recur - 1 if self.poisson_mean is None else self.poisson_mean)
    mean_depth = property(lambda self: {"uniform": (self.min_depth + self.n_recur) / 2, "poisson": self.poisson_rate + 1}.get(self.depth_sampling, self.n_recur))
    random = property(lambda self: self.state_noise > 0 or self.gate_noise > 0 or self.state_init == "random")      # does a training step draw anything?
    own_steps = property(lambda self: (self.router != "none") * "a router" or (self.lora_rank > 0) * "low-rank additions")
    router_weight = property(lambda self: 0.0 if self.router_choice == "random" else {"expert": 0.016, "token": 0.1}.get(self.router, 0.0)
                             if self.router_loss is None else self.router_loss)
    z_weight = property(lambda self: {"token": 1e-5}.get(self.router, 0.0) if self.router_z_loss is None else self.router_z_loss)
    capacities = property(lambda self: self.capacity or [(self.n_recur - step) / self.n_recur for step in range(self.n_recur)])

    @property
    def trained_depths(self):
        """(least, most) that training knows: a poisson draw has no end."""
        least = 1 if self.loss == "every" else {"fixed": self.n_recur, "uniform": self.min_depth, "poisson": 1}[self.depth_sampling]
        return least, math.inf if self.depth_sampling == "poisson" else self.n_recur

    @property
    def trained(self):
        """How deep training goes, and what it supervises and learns from, in words."""
        drawn = {"uniform": f"uniform {self.min_depth}..{self.n_recur}", "poisson": f"poisson, {self.mean_depth:g} on average"}
        return (drawn.get(self.depth_sampling, f"fixed {self.n_recur}") + (f", gradients through the last {self.bptt}" if self.bptt else "")
                + ", every step supervised" * (self.loss == "every"))

    def unrouted(self):
        """The same model without a router: every token takes every step."""
        return replace(self, **{f.name: f.default for f in fields(self) if "router" in f.name or f.name == "capacity"})

    @property
    def ffn_width(self):
        return self.n_ffn or (4 * self.n_embd if self.block == "gpt2" else 8 * math.ceil(self.n_embd / 3))

    def executed_blocks(self, depth=None):
        """Blocks that a token passes at `depth` (None: n_recur)."""
        return self.n_prelude + self.n_coda + self.n_core * (self.n_recur if depth is None else depth)

    # Counts (room 10 computes them; none of them allocates a model).
    def n_params(self, embeddings=True):
        """Unique parameters, the tied head counted once. embeddings=False leaves out token and position tables."""
        return count_params(self, embeddings)

    def flops_per_token(self, seq_len, convention="exact", depth=None, exit=None):
        """FLOPs of one forward pass per token, at context `seq_len`. depth: None = n_recur; may be fractional.

        exact: the matrix products that are executed: causal attention as S/2 keys, true GQA and MLP widths, head, gate,
        adapter (the anchor's half once per forward), low-rank additions; with an exit rule coda and score after every step.
        paper: the formula of the MoR paper: blocks alone, causal, K and V counted at full width, head left out.
        grt: the formula of the GRT paper: no causal halving, head left out, the adapter's two halves at every step."""
        for name, value, table in (("convention", convention, FLOPS), ("exit", exit, EXITS)):
            if value not in table:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, table))}")
        depth = self.n_recur if depth is None else depth
        score = 0 if exit is None else depth * EXITS[exit].flops(self) + (readings(depth, exit) - 1) * self.n_coda * block_flops(self, seq_len / 2)
        return FLOPS[convention](self, seq_len, depth) + score

    def train_flops_per_token(self, seq_len, depth=None):
        """Exact FLOPs of a training micro-batch's forward pass per token at `depth` (None: the mean of what is drawn): as
        flops_per_token, and with loss="every" coda, head and exit gate at every step."""
        depth = self.mean_depth if depth is None else depth
        n, one = readings(depth, "every"), self.n_coda * block_flops(self, seq_len / 2) + 2 * self.vocab_size * self.n_embd
        more = n * 2 * self.n_embd + (n - 1) * one
        return self.flops_per_token(seq_len, depth=depth) + (more if self.loss == "every" else 0)

    def kv_bytes(self, seq_len, batch_size, dtype, cache="full", depth=None, exit=None):
        """Bytes of K and V for `batch_size` rows of `seq_len` tokens; prelude, coda (with an exit rule of every step) and scratch
        entries included."""
        return count_kv_bytes(self, seq_len, batch_size, dtype, cache, depth, exit)

    def kv_io(self, seq_len, cache="full", depth=None, exit=None):
        """(K, V) entries read for one new token that takes `depth` steps in a row of `seq_len`: in each executed block those
        that its slot holds (routed, kv=own: by the capacities). Compressed caches store less, but every step still reads
        its entry, so they read as much; so does kv=share. With an exit rule the coda reads after every step."""
        self.check_cache(cache)
        depth = self.n_recur if depth is None else depth
        seen = lambda step: self.n_core * slot_places(self, step * self.n_core, seq_len)
        return seq_len * (self.n_prelude + self.n_coda * readings(depth, exit)) + over_steps(depth, seen)

    @property
    def compressible(self):
        """Whether one K and V per core block can stand for all steps: no step runs a block twice."""
        return self.router == "none" and self.kv == "own" and all(len(set(row)) == len(row) for row in block_table(self))

    def check_cache(self, cache):
        """Refuse a decode cache that this model cannot use."""
        if cache not in FOLDS:
            raise ValueError(f"cache={cache!r} is not one of {', '.join(FOLDS)}")
        if cache != "full" and not self.compressible:
            why = (f"router={self.router!r} sends tokens to different steps" if self.router != "none" else
                   {"own": f"sharing={self.sharing_name!r} runs a block twice in one step", "share": "kv='share' keeps no more already"}
                   .get(self.kv, f"kv={self.kv!r} keeps one of the two for all steps already, and needs every step's other"))
            raise ValueError(f"cache={cache!r} keeps one K and V per block, but {why}; use cache='full'")


# --------------------------------------------------------------------------------------------------------- 2 small parts


def at_least_fp32(x):
    """Half precision up to float32; float32 and float64 as they are."""
    return x.float() if x.dtype.itemsize < 4 else x


def fold_in(seed, *data):
    """A new 63-bit seed from a seed and integers or names: equal everywhere, and unrelated for neighbouring steps."""
    text = "/".join(map(str, (seed, *data)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


@functools.cache
def constant(numbers, device, dtype):
    """A tuple of numbers as a tensor, sent to the device once: a GPU would be waited for each time, and no CUDA graph could hold it."""
    return torch.tensor(numbers, device=device, dtype=dtype)


def make_norm(cfg, width=None):
    return KINDS[cfg.block].norm(cfg, width or cfg.n_embd)


class Linear(nn.Linear):
    """W x, or W x + B A x where the step at hand has a pair (A, B) of its own  [RRT]."""

    def forward(self, x, low=None):
        y = super().forward(x)
        return y if low is None else y + x @ low[0].mT @ low[1].mT


class Learned(nn.Module):
    """Learned absolute positions [GPT-2]: added once, to the embedding."""

    def __init__(self, cfg):
        super().__init__()
        self.table = nn.Embedding(cfg.block_size, cfg.n_embd)

    def add(self, x_BTD, position_BT):
        return x_BTD + self.table(position_BT)

    def tables(self, position_BT):
        return None, None


class Rotary(nn.Module):
    """RoPE [Su et al. 2021]: nothing is added; every query and key is turned by an angle that grows with its position."""

    def __init__(self, cfg):
        super().__init__()
        turns = [cfg.rope_theta ** (-2 * i / cfg.head_width) for i in range(cfg.head_width // 2)]
        self.turns = [-turn for turn in turns] + turns        # per position; both signs: see rotate

    def add(self, x_BTD, position_BT):
        return x_BTD

    def tables(self, position_BT):
        """cos and signed sin, (B or 1, T, 1, K) in float32; made once per forward, used by every block of every step."""
        angle = position_BT[..., None, None] * constant(tuple(self.turns), position_BT.device, torch.get_default_dtype())
        return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn the pairs (a, b) = (x_i, x_{i+K/2}) to (a cos - b sin, b cos + a sin): Hugging Face's order of Llama weights.
    roll gives each its partner, and the first half's sine is negative already.

    x: queries (B, T, H, K) or keys (B, T, G, K)."""
    if cos is None:
        return x
    turned = torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)
    return turned.to(x.dtype)


# ----------------------------------------------------------------------------------------------------------- 3 K/V cache


class Window(NamedTuple):
    """The places that a call's (or a step's) new tokens take in their rows, and what their queries may see."""
    place_C: torch.Tensor | None = None  # place of each real new token; None: nothing is written, this step reads alone
    real_C: torch.Tensor | None = None   # which of the A x T new tokens those are; None: all of them
    mask_A1TS: torch.Tensor | None = None            # what a query sees of its row's first S places; None: all of them
    n_seen: int = 0                      # S
    n_rows: int = 0                      # of the cache
    row_A: list | None = None            # the rows that take part; None: all rows, in order
    span_A: list | None = None           # (first, end) of the places that each of them reads; None: all rows' first S
    position_AT: torch.Tensor | None = None
    real_AT: torch.Tensor | None = None  # None: all of them
    n_made: int | None = None            # K and V are made of the first so many rows alone; None: of all
    reach: tuple | None = None           # span_A for kernels: (first place, how many, both (A,); the most there can be)
    causal: bool = False                 # everyone is here, in order, and sees who came before


HERE = Window(causal=True)               # without a seat


class Seat(NamedTuple):
    """Where one block's new K and V go and what its queries may see. A block never meets the cache.

    kv is the slot's store, (2, P, G, K), token-major: each row owns as many places as the next, one row after another."""
    kv: torch.Tensor
    window: Window

    def exchange(self, make):
        """Write the new entries that make_k and make_v give; give back the stored ones that are read, k and v: each row's first
        (B, S, G, K), or where rows read spans of their own the whole store (P, G, K)."""
        window = self.window
        if window.place_C is not None:
            new = torch.stack([part(window.n_made) for part in make]).flatten(1, 2)
            self.write(window.place_C, new if window.real_C is None else new[:, window.real_C])
        if window.span_A is not None or window.reach is not None:
            return self.kv.unbind()
        return self.kv.view(2, window.n_rows, -1, *self.kv.shape[2:])[:, :, : window.n_seen].unbind()

    def write(self, place_C, new):
        self.kv.index_copy_(1, place_C, new)


class Kept(NamedTuple):
    """A seat without a cache whose K and V outlive the step, with their gradient: those of kv=share are made at step 0, with
    early exit those of a token's last step stay."""
    store: list                          # this block's K and V of all tokens
    who: object                          # whose entries are new; None: nobody's
    row_L: torch.Tensor | None           # rows that take part; None: all
    window: Window                       # what is seen

    def exchange(self, make):
        if self.who is not None:
            new = [part() for part in make]
            self.store[:] = [self.who.put(old, x) for old, x in zip(self.store or new, new)]
        return self.store if self.row_L is None else [x[self.row_L] for x in self.store]


class HalfKept(NamedTuple):
    """Around a seat, for kv=share_k and share_v: one of K and V is what the same token made at step 0."""
    seat: Seat | None
    store: list                          # this block's
    half: int                            # 0: K, 1: V
    who: object                          # those who are in this step; None: step 0

    window = property(lambda self: HERE if self.seat is None else self.seat.window)

    def exchange(self, make):
        make = list(make)
        if self.who is None:
            self.store[:] = [make[self.half]()]
        kept = self.store[0] if self.who is None else self.who.take(self.store[0])
        make[self.half] = lambda n=None: kept
        return [part() for part in make] if self.seat is None else self.seat.exchange(make)


def sees(position_AT, n_seen):
    """The mask of queries at these positions over the first n_seen places of a row: those up to their own, (A or 1, 1, T, S)."""
    return (torch.arange(n_seen, device=position_AT.device) <= position_AT[..., None])[:, None]


class NoCache:
    """Training and full forwards: nothing is stored, a block's attention is causal over what is here."""
    depth, outer_window, exits = None, HERE, False

    def open(self, B, T, n_new_B, device):
        self.n_tokens = T
        return torch.arange(T, device=device)[None]

    def arrive(self, step, who):
        pass

    def seat(self, i):
        return None

    def core_seat(self, step, j):
        return None

    def coda_seat(self, i):
        return None

    def settle(self, step):
        pass


class KeptNoCache(NoCache):
    """NoCache for kv=share: what step 0 makes is kept."""

    def __init__(self):
        self.store = {}

    def writes(self, step):
        return step == 0

    def arrive(self, step, who):
        self.step_seat = kept_seat(who, self.writes(step), self.n_tokens)

    def core_seat(self, step, j):
        return self.step_seat(self.store.setdefault(j, []))


class StayNoCache(KeptNoCache):
    """NoCache for early exit: what a token made last is kept."""

    def writes(self, step):
        return True


def kept_seat(who, writes, n_tokens):
    """A block's store -> its Kept, for the tokens of `who`."""
    row_L = None if who.row_A is None else torch.tensor(who.row_A, dtype=torch.long, device=who.position_AC.device)
    window = HERE if who.index_AC is None else Window(mask_A1TS=sees(who.position_AC, n_tokens))
    return lambda store: Kept(store, who if writes else None, row_L, window)


class KVCache:
    """`full`, the exact cache: one slot per executed block, and a token's place in its row is its position.

    Rows may hold different numbers of tokens. One call brings T new tokens per row, of which the first n_new are real
    and the rest padding; padding is never stored. outer: slots of prelude and coda; core: those of the loop."""

    def __init__(self, cfg, n_rows, n_places, depth, dtype=torch.float32, device="cpu"):
        if n_places > cfg.block_size:
            raise ValueError(f"n_places={n_places} is more than block_size={cfg.block_size}, the positions that the model knows")
        self.cfg, self.n_rows, self.n_places, self.depth, self.exits = cfg, n_rows, n_places, depth, False
        self.length_B, self.dtype, self.device = [0] * n_rows, dtype, device
        self.outer = [self.new_slot(n_places) for _ in range(cfg.n_prelude + cfg.n_coda)]
        self.core = [self.new_slot(slot_places(cfg, slot, n_places)) for slot in range(n_slots(cfg, depth))]

    def new_slot(self, n_places):
        # zeros, not empty: a masked NaN would still poison the weighted sum of values
        return torch.zeros(2, self.n_rows * n_places, self.cfg.kv_heads, self.cfg.head_width, dtype=self.dtype, device=self.device)

    def core_slot(self, step, j):
        return SLOTS[self.cfg.kv](self.cfg, step, j)

    def nbytes(self):
        return sum(slot.nbytes for slot in self.outer + self.core)

    def open(self, B, T, n_new_B, device):
        """Take up the next tokens: fixes this call's places and mask, returns their positions (B or 1, T)."""
        n_new_B = n_new_B or [T] * B
        if not 1 <= min(n_new_B) <= max(n_new_B) <= T:
            raise ValueError(f"n_new={n_new_B}: every row brings 1 to {T} new tokens in a call of {T}")
        start_B, stop_B = self.length_B, [n + new for n, new in zip(self.length_B, n_new_B)]
        if B != self.n_rows or max(stop_B) > self.n_places:
            raise ValueError(f"the cache holds {self.n_rows} rows of {self.n_places} tokens, {max(start_B)} taken; "
                             f"{B} rows of {T} more do not fit; make a larger one")
        self.length_B, self.outer_window = stop_B, self.window(start_B, n_new_B, T, device, None, self.n_places)
        self.core_window = self.outer_window
        return self.outer_window.position_AT

    def window(self, start_A, n_new_A, T, device, row_A, n_places):
        """The places of T more tokens in rows that hold start_A of n_places, of which the first n_new_A are real, and what each
        sees. row_A: the rows that take part (None: all)."""
        n_A, level = [n + new for n, new in zip(start_A, n_new_A)], len(set(start_A)) == 1
        n_seen, span_A = max(n_A), None if row_A is None else [(row * n_places, row * n_places + n) for row, n in zip(row_A, n_A)]
        rows = zip(range(len(n_A)) if row_A is None else row_A, start_A, n_A)
        place_C = torch.tensor([row * n_places + place for row, start, stop in rows for place in range(start, stop)], device=device)
        position_AT = torch.tensor(start_A[:1] if level else start_A, device=device)[:, None]
        position_AT = position_AT if T == 1 else position_AT + torch.arange(T, device=device)
        real_AT = real_C = mask_A1TS = None
        if T > 1 or not (level or span_A):
            mask_A1TS = sees(position_AT, n_seen)
        if min(n_new_A) < T:
            real_AT = torch.arange(T, device=device) < torch.tensor(n_new_A, device=device)[:, None]
            real_C = real_AT.flatten().nonzero().squeeze(1)
            position_AT = position_AT.clamp(max=self.n_places - 1)               # padding may stand beyond
        return Window(place_C, real_C, mask_A1TS, n_seen, self.n_rows, row_A, span_A, position_AT, real_AT)

    def arrive(self, step, who):
        """The tokens of `who` go through a step: their places are their positions."""
        self.core_window = self.at_positions(who)

    def at_positions(self, who):
        """The window of those of this call's tokens, in places that are their positions."""
        if who.index_AC is None:
            return self.outer_window
        rows, span_A = range(self.n_rows), None
        if who.row_A is not None:
            rows, span_A = who.row_A, [(row * self.n_places, row * self.n_places + self.length_B[row]) for row in who.row_A]
        place_AC = torch.tensor(rows, dtype=torch.long, device=who.position_AC.device)[:, None] * self.n_places + who.position_AC
        real_n = None if who.real_AC is None else who.real_AC.flatten().nonzero().squeeze(1)
        n_seen, level = self.outer_window.n_seen, len(set(self.length_B)) == 1
        newest = self.outer_window.position_AT.size(1) == 1 and (span_A is not None or level)    # of a row: sees all of it
        mask_A1TS = None if newest else sees(who.position_AC, n_seen)
        return Window(place_AC.flatten() if real_n is None else place_AC.flatten()[real_n], real_n, mask_A1TS, n_seen, self.n_rows, who.row_A, span_A)

    def seat(self, i):
        return Seat(self.outer[i], self.outer_window)

    def coda_seat(self, i):
        return self.seat(self.cfg.n_prelude + i)

    def core_seat(self, step, j):
        return Seat(self.core[self.core_slot(step, j)], self.core_window)

    def settle(self, step):
        """A step is over. Exact slots stay as they are."""

    def carry(self, step, place_C):
        """What those places hold of the step before goes on to `step`, for tokens that have left (where a step has slots of its own)."""
        for j in range(self.cfg.n_core):
            slot, before = self.core_slot(step, j), self.core_slot(step - 1, j)
            if slot != before:
                self.core[slot][:, place_C] = self.core[before][:, place_C]

    def compress(self, how, taken_P=None):
        """A cache with one slot per core block, as `how` says, in place of this one, whose outer slots it takes over. taken_P: how
        many steps the token in each place took (None: all)."""
        return self if how == "full" else CompressedCache(self, how, taken_P)


class ArrivalCache(KVCache):
    """`full` for routed models with kv=own: at step r a token takes the next free place of that step in its row, so a
    row's slots hold what reached each step and no more. They begin at the declared capacities and grow when more come."""

    def __init__(self, cfg, n_rows, n_places, depth, dtype=torch.float32, device="cpu"):
        super().__init__(cfg, n_rows, n_places, depth, dtype, device)
        self.arrived = [[0] * n_rows for _ in range(depth)]                      # per step and row

    def arrive(self, step, who):
        C, row_A = who.position_AC.size(1), who.row_A
        rows = range(self.n_rows) if row_A is None else row_A
        n_new_A = [C] * len(rows) if who.real_AC is None else who.real_AC.sum(1).tolist()
        start_A, n_places = [self.arrived[step][row] for row in rows], self.core[self.core_slot(step, 0)].size(1) // self.n_rows
        for row, new in zip(rows, n_new_A):
            self.arrived[step][row] += new
        if max(self.arrived[step]) > n_places:
            n_places = self.grow(step, n_places)
        self.core_window = self.window(start_A, n_new_A, C, who.position_AC.device, row_A, n_places)

    def carry(self, step, place_C):
        """Who does not reach a step is not in it."""

    def grow(self, step, n_places):
        """Slots of `step` with a quarter more places than are needed now, and what is in the old ones."""
        most = max(self.arrived[step])
        n_more = min(self.n_places, most + most // 4)
        for j in range(self.cfg.n_core):
            slot, old = self.core_slot(step, j), self.core[self.core_slot(step, j)]
            self.core[slot] = self.new_slot(n_more)
            self.core[slot].view(2, self.n_rows, n_more, -1)[:, :, :n_places] = old.view(2, self.n_rows, n_places, -1)
        return n_more


class SharedCache(KVCache):
    """`full` for kv=share: one slot per core block, written at step 0 by every token at its position, read at every step."""

    def arrive(self, step, who):
        if step:
            self.core_window = self.at_positions(who)._replace(place_C=None, real_C=None)


class CompressedCache(KVCache):
    """`first`, `last`, `mean`: one slot per core block in place of one per (step, block)  [GRT, decoding].

    A new token's step r writes its K_r, V_r in place, attends to {compressed past, itself}, and settle() then replaces
    the entry by the first / last / running mean of its steps: right whenever a token stops. One token per row and call."""

    def __init__(self, full, how, taken_P=None):
        vars(self).update(vars(full))                         # same rows, places, lengths and outer slots
        self.core, self.share = [self.new_slot(self.n_places) for _ in range(self.cfg.n_core)], FOLDS[how]
        for step, row in enumerate(block_table(self.cfg, self.depth)):
            for j, block in enumerate(row):
                kept = torch.lerp(self.core[block], full.core[full.core_slot(step, j)], self.share(step))
                self.core[block].copy_(kept if taken_P is None else torch.where(taken_P[:, None, None] > step, kept, self.core[block]))
        # What is kept of the token at hand while its entry is in use; `last` keeps the entry itself.
        self.scratch = [] if how == "last" else [slot.new_zeros(2, self.n_rows, *slot.shape[2:]) for slot in self.core]

    def core_slot(self, step, j):
        return self.cfg.sharing_rule.block(step, j, self.cfg)

    def nbytes(self):
        return super().nbytes() + sum(kept.nbytes for kept in self.scratch)

    def open(self, B, T, n_new_B, device):
        if T != 1:
            raise ValueError(f"a compressed cache takes one new token per row, not {T}; feed the prompt first, then compress")
        return super().open(B, T, n_new_B, device)

    def settle(self, step):
        place_C, row_A = self.core_window.place_C, self.core_window.row_A
        rows = slice(None) if row_A is None else row_A
        for slot, kept in zip(self.core, self.scratch):
            slot[:, place_C] = kept[:, rows] = torch.lerp(kept[:, rows], slot[:, place_C], self.share(step))


def half_kept(base, half):
    """The cache `base` for kv=share_k (half 0) or share_v (1). It stores as much as own: each step's K beside each step's V."""

    class Halves(base):
        def arrive(self, step, who):
            super().arrive(step, who)
            self.who = who if step else None
            self.halves = self.halves if step else {}

        def core_seat(self, step, j):
            return HalfKept(super().core_seat(step, j), self.halves.setdefault(j, []), half, self.who)

    return Halves


class ExitNoCache:
    """Around a NoCache, for early exit: the coda runs after every step, on those who took it, and sees the others as it saw
    them last. What is not said here is the inner one's."""
    exits = True

    def __init__(self, inner):
        self.inner, self.coda = inner, {}

    def __getattr__(self, name):
        return getattr(self.__dict__.get("inner"), name)     # a copy in the making has none yet

    def arrive(self, step, who):
        self.inner.arrive(step, who)
        self.step_seat = kept_seat(who, True, self.n_tokens)

    def exit_seat(self, step, i):
        return self.step_seat(self.coda.setdefault(i, []))

    def close(self):
        pass


class ExitCache(ExitNoCache):
    """Around a decode cache, for early exit: the coda has a slot for each (step, block) as the core has, and a token that left
    stands in later slots with the K and V of its last step (routed, kv=own: in the coda's alone)."""

    def __init__(self, inner):
        self.inner, self.cfg = inner, inner.cfg
        self.inner.outer = inner.outer[: self.cfg.n_prelude]
        self.coda = [[inner.new_slot(inner.n_places) for _ in range(self.cfg.n_coda)] for _ in range(max(1, inner.depth))]
        self.taken_P = torch.zeros(inner.n_rows * inner.n_places, dtype=torch.long, device=inner.device)

    def open(self, B, T, n_new_B, device):
        self.last_step, position_BT = 0, self.inner.open(B, T, n_new_B, device)
        self.window = self.inner.outer_window
        return position_BT

    def arrive(self, step, who):
        if who.index_AC is not None:                          # some have left
            self.carry(step)
        self.last_step = step
        self.inner.arrive(step, who)
        self.window = self.inner.at_positions(who)
        self.taken_P[self.window.place_C] = step + 1

    def carry(self, step):
        place_C = self.inner.outer_window.place_C
        if step:
            for slot, before in zip(self.coda[step], self.coda[step - 1]):
                slot[:, place_C] = before[:, place_C]
            self.inner.carry(step, place_C)

    def close(self):
        """The loop is over: the steps that nobody took are filled too."""
        for step in range(self.last_step + 1, self.depth):
            self.carry(step)

    def exit_seat(self, step, i):
        return Seat(self.coda[step][i], self.window)

    def coda_seat(self, i):
        return self.exit_seat(0, i)                           # at depth 0

    def compress(self, how):
        self.inner = self.inner.compress(how, self.taken_P)
        return self

    def nbytes(self):
        return self.inner.nbytes() + sum(slot.nbytes for slots in self.coda for slot in slots)


# Which caches, (of full forwards, of decoding): by whose K/V a step attends to, and by what becomes of a token that stops: every =
# none does, stay = later steps see it as it was (early exit), gone = they do not (routers).
OWN_CACHES = {"every": (NoCache, KVCache), "stay": (StayNoCache, KVCache), "gone": (NoCache, ArrivalCache)}
CACHES = {("own", stops): pair for stops, pair in OWN_CACHES.items()} | {("share", stops): (KeptNoCache, SharedCache) for stops in OWN_CACHES} | {
    (f"share_{half}", stops): tuple(half_kept(base, i) for base in pair) for stops, pair in OWN_CACHES.items() for i, half in enumerate("kv")}


def stops(cfg, exit):
    return "gone" if cfg.router != "none" else "every" if exit is None else "stay"


def no_cache(cfg, exit=None):
    """For full forwards, with early exit or without."""
    inner = CACHES[cfg.kv, stops(cfg, exit)][0]()
    return inner if exit is None else ExitNoCache(inner)


# What a compressed slot takes of the entry of step r (from 0) in place of what it kept: the share of the new one.
FOLDS = {"full": None, "first": lambda step: 1.0 * (step == 0), "last": lambda step: 1.0 + 0.0 * step, "mean": lambda step: 1.0 / (step + 1)}

# --------------------------------------------------------------------------------------------- 4 attention, MLP, block


def attend(q_ATHK, make, seat, dropout):
    """Attention of T queries: causal over what is here without a seat, else over what the seat lets them see. make: two
    functions that make the new K and V."""
    k, v = [part() for part in make] if seat is None else seat.exchange(make)    # of rows, or of a store that rows read spans of
    window = HERE if seat is None else seat.window
    if window.span_A is None and window.reach is None:
        return weigh(q_ATHK, k, v, window.mask_A1TS, window.causal, dropout)
    if window.reach is not None:
        kernel = READERS["plain" if not flash_fits(q_ATHK) else "flash-attn" if flash_attn_with_kvcache else "torch"]
        return kernel(q_ATHK, k, v, *window.reach)
    # Rows that read spans of a store: each where it lies, for a copy would cost more than the attention.
    k_1GPK, v_1GPK = (x.transpose(0, 1)[None] for x in (k, v))
    masks = [None] * len(q_ATHK) if window.mask_A1TS is None else window.mask_A1TS.expand(len(q_ATHK), -1, -1, -1).split(1)
    y_AHTK = torch.cat([dot(q_1HTK, k_1GPK[:, :, first:end], v_1GPK[:, :, first:end], mask if mask is None else mask[..., : end - first], False, dropout)
                        for q_1HTK, (first, end), mask in zip(q_ATHK.transpose(1, 2).split(1), window.span_A, masks)])
    return y_AHTK.transpose(1, 2)


def weigh(q_BTHK, k_BSGK, v_BSGK, mask_B1TS, causal, dropout):
    if causal and flash_attn_func and flash_fits(q_BTHK):
        return flash_attn_func(q_BTHK, k_BSGK, v_BSGK, dropout_p=dropout, causal=True)
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    return dot(q_BHTK, k_BGSK, v_BGSK, mask_B1TS, causal, dropout).transpose(1, 2)


def flash_fits(q):
    return q.is_cuda and q.dtype.itemsize == 2 and q.size(-1) % 8 == 0 and q.size(-1) <= 256          # of either library's kernels


def dot(q_BHTK, k_BGSK, v_BGSK, mask_B1TS, causal=False, dropout=0.0):
    return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, dropout_p=dropout, is_causal=causal,
                                          enable_gqa=True if q_BHTK.size(1) != k_BGSK.size(1) else False)      # bare, != would break a dynamic graph


# One query a row, of a store the n_A places from first_A on, `most` at most: of fixed shapes, with no number on the host.


def read_plain(q_A1HK, k_PGK, v_PGK, first_A, n_A, most):
    """Anywhere; copies the places, and nothing of others' (a masked NaN would still poison the weighted sum)."""
    column_S = torch.arange(most, device=q_A1HK.device)
    there_AS = column_S < n_A[:, None]
    place_AS = (first_A[:, None] + column_S).where(there_AS, first_A[:, None])
    return weigh(q_A1HK, k_PGK[place_AS], v_PGK[place_AS], there_AS[:, None, None], False, 0.0)


def read_torch(q_A1HK, k_PGK, v_PGK, first_A, n_A, most):
    """PyTorch's variable-length kernel takes where rows begin and how much of them is used."""
    row_n = torch.arange(len(q_A1HK) + 1, dtype=torch.int32, device=q_A1HK.device)
    first_n = F.pad(first_A, (0, 1)).int()
    y_AHK = torch.ops.aten._flash_attention_forward(q_A1HK[:, 0], k_PGK, v_PGK, row_n, first_n, 1, most, 0.0, False, False, seqused_k=n_A.int())[0]
    return y_AHK[:, None]


def read_flash(q_A1HK, k_PGK, v_PGK, first_A, n_A, most):
    """flash-attn's decoding kernel: a row is one of the overlapping windows of `most` places that begin at every unit."""
    shape, strides = k_PGK.shape[1:], k_PGK.stride()
    k, v = (x.as_strided(((len(x) - most) // UNIT + 1, most, *shape), (UNIT * strides[0], *strides)) for x in (k_PGK, v_PGK))
    return flash_attn_with_kvcache(q_A1HK, k, v, cache_seqlens=n_A.int(), cache_batch_idx=(first_A // UNIT).int(), causal=True)


READERS = {"plain": read_plain, "torch": read_torch, "flash-attn": read_flash}
UNIT = 16                    # places by which windows are cut, and grow (sample.py)


def rows(tensors, n):
    """The first n rows of each that has rows; None: all."""
    return tensors and [x if x is None or x.dim() < 3 else x[:n] for x in tensors]


class Attention(nn.Module):
    """Causal self-attention; n_kv_head < n_head is grouped-query attention."""

    def __init__(self, cfg):
        super().__init__()
        D, K = cfg.n_embd, cfg.head_width
        self.query = Linear(D, D, bias=cfg.bias)
        self.key = Linear(D, cfg.kv_heads * K, bias=cfg.bias)
        self.value = Linear(D, cfg.kv_heads * K, bias=cfg.bias)
        self.output = Linear(D, D, bias=cfg.bias)
        self.head_width, self.dropout = K, cfg.dropout

    def forward(self, x_BTD, cos=None, sin=None, seat=None, low={}):
        B, T, D = x_BTD.shape
        q_BTHK = rotate(self.query(x_BTD, low.get("query")).view(B, T, -1, self.head_width), cos, sin)
        heads = lambda linear, name, n: linear(x_BTD[:n], rows(low.get(name), n)).unflatten(-1, (-1, self.head_width))
        make = (lambda n=None: rotate(heads(self.key, "key", n), *rows((cos, sin), n)), lambda n=None: heads(self.value, "value", n))
        y_BTHK = attend(q_BTHK, make, seat, self.dropout if self.training else 0.0)
        return self.output(y_BTHK.reshape(B, T, D), low.get("output"))


class GeluMLP(nn.Module):
    """down(gelu(up(x))), exact GELU  [GPT-2; its release has the tanh form]."""

    def __init__(self, cfg):
        super().__init__()
        self.up = Linear(cfg.n_embd, cfg.ffn_width, bias=cfg.bias)
        self.down = Linear(cfg.ffn_width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x_BTD, low={}):
        return self.down(F.gelu(self.up(x_BTD, low.get("up"))), low.get("down"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))  [Llama]."""

    def __init__(self, cfg):
        super().__init__()
        self.gate = Linear(cfg.n_embd, cfg.ffn_width, bias=False)
        self.up = Linear(cfg.n_embd, cfg.ffn_width, bias=False)
        self.down = Linear(cfg.ffn_width, cfg.n_embd, bias=False)

    def forward(self, x_BTD, low={}):
        return self.down(F.silu(self.gate(x_BTD, low.get("gate"))) * self.up(x_BTD, low.get("up")), low.get("down"))


class Kind(NamedTuple):
    norm: Callable      # (cfg, width) -> module
    mlp: type
    positions: type
    matrices: int       # n_embd x ffn_width matrices in the MLP


KINDS = {
    "gpt2": Kind(lambda cfg, width: nn.LayerNorm(width, cfg.norm_eps, bias=cfg.bias), GeluMLP, Learned, 2),
    "llama": Kind(lambda cfg, width: nn.RMSNorm(width, cfg.norm_eps), SwiGLU, Rotary, 3),
}


class Block(nn.Module):
    """A pre-norm transformer block, residuals inside: a function of tensors, x -> x, whose only trace is in its seat.

    cos, sin: rotary tables or None; seat: where K and V go, None = causal over what is here; low: the step's own additions
    to the linears, by name (room 7)."""

    def __init__(self, cfg):
        super().__init__()
        self.attention_norm, self.attention = make_norm(cfg), Attention(cfg)
        self.mlp_norm, self.mlp = make_norm(cfg), KINDS[cfg.block].mlp(cfg)
        self.dropout = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()
        after = lambda: make_norm(cfg) if cfg.sandwich_norm else nn.Identity()                # of the residual sum  [Huginn]
        self.attention_after, self.mlp_after = after(), after()

    def forward(self, x_BTD, cos=None, sin=None, seat=None, low={}):
        x_BTD = self.attention_after(x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos, sin, seat, low)))
        return self.mlp_after(x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD), low)))


# ---------------------------------------------------------------------------------------------------------- 5 depth plan


class Sharing(NamedTuple):
    """Which core block runs as the j-th of a step, and whether the loop may run another number of steps."""
    block: Callable                # (step, j, cfg) -> index of a core block
    any_depth: bool
    middle: bool | None = None     # must there be a prelude or coda? None: either way


def in_turn(step, j, cfg):
    """(0,1,2)(0,1,2)(0,1,2): the whole core, again and again."""
    return j


def in_sequence(step, j, cfg):
    """(0,0,0)(1,1,1)(2,2,2): each block n_recur times in a row, cut into steps of n_core."""
    return (step * cfg.n_core + j) // cfg.n_recur


# [MoR, table of sharing strategies]; norms are part of a block, so they are shared with it.
SHARINGS = {
    "cycle": Sharing(in_turn, any_depth=True, middle=False),
    "sequence": Sharing(in_sequence, any_depth=False, middle=False),
    "middle_cycle": Sharing(in_turn, any_depth=True, middle=True),
    "middle_sequence": Sharing(in_sequence, any_depth=False, middle=True),
}

# Slot of the core's K and V at (step, j).
OWN = lambda cfg, step, j: step * cfg.n_core + j  # noqa: E731
SLOTS = {"own": OWN, "share": lambda cfg, step, j: j, "share_k": OWN, "share_v": OWN}


def n_slots(cfg, depth):
    return len({SLOTS[cfg.kv](cfg, step, j) for step in range(depth) for j in range(cfg.n_core)})


def n_chosen(share, n_tokens, whole=int):
    """How many of n_tokens a capacity lets in: never fewer than one. Truncated; the FLOPs of the MoR paper round."""
    return max(1, whole(share * n_tokens))


def slot_places(cfg, slot, n_tokens):
    """Places per row of a slot for n_tokens: as many as the step's capacity lets in."""
    return n_tokens if cfg.router == "none" or cfg.kv == "share" else n_chosen(cfg.capacities[slot // cfg.n_core], n_tokens)


def block_table(cfg, depth=None):
    """The plan as steps x blocks: row r lists the core blocks that step r runs."""
    rule = cfg.sharing_rule.block
    return [[rule(step, j, cfg) for j in range(cfg.n_core)] for step in range(cfg.n_recur if depth is None else depth)]


# ------------------------------------------------------------------------------------------------------------- 6 routers
# A router says who continues to the next step, and how a chosen token takes up what the core made of it.


class Who(NamedTuple):
    """The tokens that go through the next step: where they stand, and what attention and the merge need of them."""
    position_AC: torch.Tensor                  # original positions of the chosen, in order
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    row_A: list | None = None                  # rows that have any, plain numbers; None: all of them
    index_AC: torch.Tensor | None = None       # which of the B x T tokens, counted through; None: all of them
    real_AC: torch.Tensor | None = None        # False: padding behind a row's last chosen token; None: all real
    choose: Callable | None = None             # expert-choice: topk, causal or flags
    tell: Callable | None = None               # how those who go on are told: compact, or flag
    threshold: float = 0.0                     # as a logit
    depth: int | torch.Tensor = 0              # steps taken: a number for all, or (B, T, 1)
    score_AC1: torch.Tensor | None = None      # the router's score of those who are in it
    wanted_BT1: torch.Tensor | None = None     # token-choice: the depth of every token, its score, and the state before step 0
    score_BT1: torch.Tensor | None = None
    e_BTD: torch.Tensor | None = None
    losses: dict = {}                          # the router's own terms, by name
    states: tuple = ()                         # loss=every: the state after each step

    def take(self, x):
        """Of x (B, T, any width) what belongs to the chosen, (A, C, width)."""
        return x if self.index_AC is None else x.flatten(0, 1)[self.index_AC]

    def put(self, x, y):
        """x (B, T, width) with y (A, C, width) in the places of the chosen; the others keep theirs, padding is dropped."""
        if self.index_AC is None:
            return y
        index, new = (self.index_AC, y) if self.real_AC is None else (self.index_AC[self.real_AC], y[self.real_AC])
        return x.flatten(0, 1).index_copy(0, index.flatten(), new.reshape(-1, *x.shape[2:]).to(x.dtype)).view(x.shape)

    def taken(self, B, T, step):
        """Steps taken by each token once these went through `step` of them."""
        if self.index_AC is None:
            return step
        before = self.depth if torch.is_tensor(self.depth) else torch.full((B, T, 1), self.depth, device=self.index_AC.device)
        now = step if torch.is_tensor(step) else torch.full((), step, device=self.index_AC.device)
        return self.put(before, now.expand(self.index_AC.shape)[..., None])

    def went(self, h_BTD, step):
        return self._replace(depth=self.taken(*h_BTD.shape[:2], step))

    def pick(self, picked, B, T):
        """Of these tokens those that compact() or flag() names."""
        if picked is None:
            return self
        keep, column_LM, real_LM = picked
        if column_LM is None:
            return self._replace(real_AC=real_LM)
        device = column_LM.device
        n_rows = B if self.row_A is None else len(self.row_A)
        rows_L1 = torch.tensor(range(n_rows) if keep is None else keep, dtype=torch.long, device=device)[:, None]
        index_AC = torch.arange(B * T, device=device).view(B, T) if self.index_AC is None else self.index_AC
        of = lambda x: x if x is None else x[0][column_LM] if len(x) == 1 else x[rows_L1, column_LM]           # one row for all
        return self._replace(position_AC=of(self.position_AC), cos=of(self.cos), sin=of(self.sin), score_AC1=of(self.score_AC1),
                             index_AC=index_AC[rows_L1, column_LM], real_AC=real_LM,
                             row_A=self.row_A if keep is None else keep if self.row_A is None else [self.row_A[i] for i in keep])

    def add(self, name, weight, loss):
        return self._replace(losses={**self.losses, name: self.losses.get(name, 0.0) + weight * loss}) if weight else self


def topk(by_AC, decided_AC, share, T, real_AC):
    """As many of T tokens as a share of them lets in, those that are first `by` the score of each row; ties go to the earlier
    token. Sees the whole row: not causal. Returns who is chosen as a mask, and as pick() takes it. Its sizes are known beforehand."""
    k = min(by_AC.size(1), n_chosen(share, T))
    column_LM = by_AC.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
    return torch.zeros_like(decided_AC).scatter(1, column_LM, True), (None, column_LM, None)


def causal(by_AC, decided_AC, share, T, real_AC):
    """Those who decided so, each for itself."""
    return decided_AC, compact(decided_AC, real_AC)


def flags(by_AC, decided_AC, share, T, real_AC):
    """As causal, but nobody moves and no size depends on the data: for serving, whose rows may be at steps of their own."""
    decided_AC = decided_AC | (share >= 1)
    return decided_AC, flag(decided_AC, real_AC)


def flag(keep_AC, real_AC=None):
    """As compact(): what is kept and real stays where it is and is the real part from now on."""
    return None, None, keep_AC if real_AC is None else keep_AC & real_AC


def compact(keep_AC, real_AC=None):
    """What is kept and real, as pick() takes it: (rows that have some, None: all; columns in order, padded to the longest
    row; which of them are real, None: all). None: everything is."""
    keep_AC = keep_AC if real_AC is None else keep_AC & real_AC
    n_A, device = keep_AC.sum(1).tolist(), keep_AC.device
    rows, n_L = None if all(n_A) else [i for i, n in enumerate(n_A) if n], [n for n in n_A if n]
    least, most = min(n_L, default=0), max(n_L, default=0)
    if rows is None and least == keep_AC.size(1):
        return None
    keep_LC = keep_AC if rows is None else keep_AC[rows]
    column_LM = (~keep_LC).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    real_LM = None if least == most else torch.arange(most, device=device) < torch.tensor(n_L, device=device)[:, None]
    return rows, column_LM, real_LM


# How those who go on to the next step are found, by name: (among experts' choices, elsewhere).
FORMS = {"topk": (topk, compact), "causal": (causal, compact), "flags": (flags, flag)}


def as_logit(p):
    """The logit whose sigmoid is p: -inf at 0, inf at 1."""
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


def lot(position_AC, step):
    """A number in [0, 1) for each position and step that looks like chance and is always the same."""
    step = step if isinstance(step, int) else step.double()
    x_AC = torch.sin(position_AC.double() * 12.9898 + step * 78.233) * 43758.5453
    return x_AC - x_AC.floor()


SCORES = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": torch.positive, "add": torch.ones_like, "softmax": functools.partial(torch.softmax, dim=-1)}


class RouterUnit(nn.Module):
    """Logits of a token's raw state, float32 whatever the autocast."""

    def __init__(self, cfg, n_out):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in self.shapes(cfg, n_out))

    @staticmethod
    def shapes(cfg, n_out):
        """(in, out) of its matrices."""
        width = cfg.router_width or 2 * cfg.n_embd
        return [(cfg.n_embd, n_out)] if cfg.router_kind == "linear" else [(cfg.n_embd, width), (width, n_out)]

    @staticmethod
    def flops(cfg, n_out):
        return sum(2 * n * m for n, m in RouterUnit.shapes(cfg, n_out))

    def forward(self, h_ACD):
        on = not h_ACD.is_meta and torch.is_autocast_enabled(h_ACD.device.type)
        with torch.autocast(h_ACD.device.type, enabled=False) if on else contextlib.nullcontext():
            x = at_least_fp32(h_ACD)
            for i, layer in enumerate(self.layers):
                x = F.linear(F.gelu(x) if i else x, at_least_fp32(layer.weight))
            return x


# A step is a number, or in serving one for each row, (A, 1): rows at different steps go through the core together.


def of_step(units, step, x_ACD):
    """What the router of each token's step says, (A, C, 1). One for each row: all are asked, so that no size depends on the data."""
    if isinstance(step, int):
        return units[step](x_ACD)
    return torch.cat([unit(x_ACD) for unit in units], -1).gather(-1, step[..., None].clamp(max=len(units) - 1))


def at_step(numbers, step):
    """The number of each row's step; beyond the last step the last one."""
    if isinstance(step, int):
        return numbers[step]
    return constant(tuple(numbers), step.device, torch.float64)[step.clamp(max=len(numbers) - 1)]


class Everyone(nn.Module):
    """In a router's place where a step takes all."""

    def forward(self, x_ACD):
        return torch.full_like(x_ACD[..., :1], math.inf)


def z_loss(logits):
    """Mean squared logsumexp over the last axis  [MoR, z-loss]."""
    return logits.logsumexp(-1).square().mean()


class NoRouter(nn.Module):
    """Every token takes every step."""

    def __init__(self, cfg):
        super().__init__()

    @staticmethod
    def flops(cfg):
        """FLOPs per token of the router: (once per forward, step -> those for each token that is asked about it)."""
        return 0, lambda step: 0

    def enter(self, e_BTD, who, depth):
        return who

    def narrow(self, h_BTD, who, step):
        return who

    def merge(self, h_ACD, y_ACD, write, who, step):
        return write(h_ACD, y_ACD)

    def warm(self, extra):
        """Expert-choice: how much of what a capacity leaves out is let in all the same, in training; 1 = all, 0 = none."""

    def rebalance(self, load_R, rate):
        """Token-choice with balance by bias: after an optimizer step in which load_R tokens chose depth 1..R."""


def by_score(router, logit_AC, x_ACD, who, step):
    return logit_AC, logit_AC >= who.threshold, logit_AC


def by_aux(router, logit_AC, x_ACD, who, step):
    aux_AC = of_step(router.aux_units, step, x_ACD.detach())[..., 0]
    return logit_AC, aux_AC >= who.threshold, aux_AC


def by_lot(router, logit_AC, x_ACD, who, step):
    shares = [1.0, *router.cfg.capacities]
    luck_AC = at_step(shares, step + 1) / at_step(shares, step) - lot(who.position_AC, step).expand(logit_AC.shape)
    return luck_AC, luck_AC >= 0, logit_AC                    # no threshold; and the loss has no weight


# Expert-choice: what top-k goes by, who goes on outside training, and the logits that learn from who did: three (A, C).
JUDGES = {"score": by_score, "aux": by_aux, "random": by_lot}


def add_whole(h_ACD, y_ACD, score_AC1, write):
    return h_ACD + score_AC1 * y_ACD


def add_change(h_ACD, y_ACD, score_AC1, write):
    return h_ACD + score_AC1 * (write(h_ACD, y_ACD) - h_ACD)


class Expert(NoRouter):
    """Expert-choice: every step has a router of its own that chooses among those who took the last one  [MoR, 2.2.1].
    H_S += g Core(H_S): the whole output, residual included [MoR eq. 2.1]. Beside a gate: h + s (1 - g) (o - h)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.cfg, self.extra, self.score = cfg, 0.0, SCORES[cfg.score_name]
        whole = cfg.update == "gate" or cfg.router_score == "add"
        self.alpha = (1.0 if whole else 0.1) if cfg.router_alpha is None else cfg.router_alpha
        self.blend = add_change if cfg.update == "gate" else add_whole
        self.judge = JUDGES["aux" if cfg.aux_router else cfg.router_choice]
        self.units = nn.ModuleList(RouterUnit(cfg, 1) for _ in range(cfg.n_recur))
        self.aux_units = nn.ModuleList(RouterUnit(cfg, 1) if share < 1 else Everyone() for share in cfg.capacities if cfg.aux_router)

    @property
    def deciding(self):
        """The routers whose logits decide outside training, one per step."""
        return self.aux_units or self.units

    @staticmethod
    def flops(cfg):
        unit = RouterUnit.flops(cfg, 1)
        return 0, lambda step: unit * (2 if cfg.aux_router and cfg.capacities[step] < 1 else 1)

    def warm(self, extra):
        self.extra = extra

    def enter(self, e_BTD, who, depth):
        if self.training:                 # a shallow pass asks few routers: all have a gradient, or ranks would wait for the others'
            who = who.add("router", 1.0, sum(0.0 * p.sum() for p in self.parameters()))
        return self.narrow(e_BTD, who, 0)

    def narrow(self, h_BTD, who, step):
        B, T, _ = h_BTD.shape
        if isinstance(step, int) and step == self.cfg.n_recur:
            return who
        x_ACD, share = who.take(h_BTD), at_step(self.cfg.capacities, step)
        logit_AC1 = of_step(self.units, step, x_ACD)
        who = who._replace(score_AC1=self.alpha * self.score(logit_AC1))
        share = share + (1 - share) * self.extra * self.training
        if isinstance(step, int) and share >= 1:
            return who
        by_AC, decided_AC, taught_AC = self.judge(self, logit_AC1[..., 0], x_ACD, who, step)
        chosen_AC, picked = who.choose(by_AC, decided_AC, share, T, who.real_AC)
        if self.training:
            aux = F.binary_cross_entropy_with_logits(taught_AC, chosen_AC.to(taught_AC.dtype))                   # [MoR, aux loss]
            who = who.add("router", self.cfg.router_weight, aux).add("router_z", self.cfg.z_weight, z_loss(logit_AC1))
        return who.pick(picked, B, T)

    def merge(self, h_ACD, y_ACD, write, who, step):
        return self.blend(h_ACD, y_ACD, who.score_AC1.to(h_ACD.dtype), write)


class Token(NoRouter):
    """Token-choice: after the prelude every token is given its depth  [MoR, 2.2.1; its code where it differs from eq. 2.2].
    Before a token's last step h <- y; at its last e + p y, p the probability of the depth that it chose."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.cfg, self.score = cfg, SCORES[cfg.score_name]
        self.alpha, self.unit = 1.0 if cfg.router_alpha is None else cfg.router_alpha, RouterUnit(cfg, cfg.n_recur)
        self.biased = cfg.router_balance == "bias"            # else the bias stays 0, and the balancing loss has a weight
        self.balance_weight = 0.0 if self.biased else cfg.router_weight
        self.register_buffer("bias_R", torch.zeros(cfg.n_recur), persistent=self.biased)

    @staticmethod
    def flops(cfg):
        return RouterUnit.flops(cfg, cfg.n_recur), lambda step: 0

    def rebalance(self, load_R, rate):
        bias_R, few_R = self.bias_R, torch.sign(load_R.double().mean() - load_R)          # [Wang et al. 2024, loss-free balancing]
        bias_R += self.biased * rate * few_R.to(bias_R)

    def enter(self, e_BTD, who, depth):
        logit_BTR = self.unit(e_BTD)
        p_BTR = self.score(logit_BTR)
        best_BT1 = (p_BTR + self.bias_R).argmax(-1, keepdim=True)                # the bias is for the choice alone
        if self.training:
            share_BR = F.one_hot(best_BT1[..., 0], self.cfg.n_recur).to(p_BTR.dtype).mean(1)
            balance = self.cfg.n_recur * (share_BR * p_BTR.mean(1)).sum(-1).mean()   # N sum_i f_i P_i, per sequence  [MoR, balancing loss]
            who = who.add("router", self.balance_weight, balance).add("router_z", self.cfg.z_weight, z_loss(logit_BTR))
        return who._replace(wanted_BT1=(best_BT1 + 1).clamp(max=depth), score_BT1=self.alpha * p_BTR.gather(-1, best_BT1), e_BTD=e_BTD)

    def narrow(self, h_BTD, who, step):
        B, T, _ = h_BTD.shape
        return who.pick(who.tell(who.take(who.wanted_BT1)[..., 0] > step, who.real_AC), B, T)

    def merge(self, h_ACD, y_ACD, write, who, step):
        last_AC1 = (who.take(who.wanted_BT1)[..., 0] == step + 1)[..., None]
        return torch.where(last_AC1, who.take(who.e_BTD) + who.take(who.score_BT1).to(h_ACD.dtype) * y_ACD, y_ACD)


ROUTERS = {"none": NoRouter, "expert": Expert, "token": Token}

# ------------------------------------------------------------------------------------------------------- 7 state updates


class FromAnchor(nn.Module):
    """h_0 = e"""

    def __init__(self, cfg):
        super().__init__()

    def forward(self, e_BTD, position_BT, noise):
        return e_BTD


class FromNoise(FromAnchor):
    """h_0: a normal draw cut at three sigma, the call's own in training; else one for each position, which is kept here  [Huginn]."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.std, self.seed = cfg.first_std, cfg.state_seed
        self.register_buffer("still", torch.empty(cfg.block_size, cfg.n_embd), persistent=False)

    def fill(self):
        self.still.copy_(truncated_normal(self.still.shape, self.std, fold_in(self.seed, "first state")))

    def forward(self, e_BTD, position_BT, noise):
        return noise.on_first(self.still[position_BT].to(e_BTD.dtype).expand_as(e_BTD), self.std)


STATES = {"anchor": FromAnchor, "random": FromNoise}


class NoLoRA(nn.Module):
    def __init__(self, cfg):
        super().__init__()

    def at(self, step, j):
        """What `step` adds to the linears of the j-th block that it runs: (A, B) by name, for rows at steps of their own stacked."""
        return {}

    @staticmethod
    def flops(cfg, made):
        return 0


class LoRA(NoLoRA):
    """Low-rank additions of their own for each step and core position: y = W x + B A x, B = 0 at the start  [RRT, Bae et al. 2024].
    Query, key and value are one linear here. Stacked over steps, so that a vector of steps indexes as well as one."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.split = [cfg.n_embd] + 2 * [cfg.kv_heads * cfg.head_width]
        stack = lambda of: nn.ModuleList(nn.ParameterDict({name: nn.Parameter(torch.empty(cfg.n_recur, *of(*shape))) for name, shape in
                                                           self.shapes(cfg).items()}) for _ in range(cfg.n_core))
        self.down, self.up = stack(lambda n, m: (cfg.lora_rank, n)), stack(lambda n, m: (m, cfg.lora_rank))          # A, B

    @staticmethod
    def shapes(cfg):
        """(in, out) of every linear of a block."""
        D, wide, kv = cfg.n_embd, cfg.ffn_width, cfg.kv_heads * cfg.head_width
        names = ("up",) if KINDS[cfg.block].matrices == 2 else ("gate", "up")
        return {"qkv": (D, D + 2 * kv), "output": (D, D), **dict.fromkeys(names, (D, wide)), "down": (wide, D)}

    def at(self, step, j):
        step = step if isinstance(step, int) else step[:, 0]
        pairs = {name: (self.down[j][name][step], self.up[j][name][step]) for name in self.down[j]}
        A, B = pairs.pop("qkv")
        return pairs | {name: (A, part) for name, part in zip(("query", "key", "value"), B.split(self.split, -2))}

    @staticmethod
    def flops(cfg, made):
        """Per token of one block; made: how much of K and V is made."""
        shapes = LoRA.shapes(cfg)
        (D, _), kv = shapes.pop("qkv"), cfg.kv_heads * cfg.head_width
        return 2 * cfg.lora_rank * (sum(n + m for n, m in shapes.values()) + 2 * D + 2 * made * (D + kv))


# An update says what a step reads and what it leaves. `anchor` makes, once per forward, what does not change over steps.
# Merge rules: replace and inject leave y, gate leaves g h + (1 - g) y.


class Replace(nn.Module):
    """h <- core(h): the plain recursive transformer."""

    def __init__(self, cfg):
        super().__init__()

    def anchor(self, e_BTD):
        return ()

    def read(self, h_BTD, anchor):
        return h_BTD

    def write(self, h_BTD, y_BTD, anchor, noise_BT1):
        return y_BTD

    @staticmethod
    def flops(cfg):
        """FLOPs per token of the update's own matrices: (once per forward, at every step)."""
        return 0, 0


PROJ_INITS = ("normal", "scaled", "identity")


class Inject(Replace):
    """h <- core(W_proj [h ; e]): the anchor is read again at every step. Between state and core: no norm, no bias.

    W_proj (D x 2D, state first) is stored as its two halves, so that the anchor's share is computed once."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.from_state = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.from_anchor = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def anchor(self, e_BTD):
        return (self.from_anchor(e_BTD),)

    def read(self, h_BTD, anchor):
        u_BTD = self.from_state(h_BTD) + anchor[0]            # u = W_proj [h ; e]
        return u_BTD.to(h_BTD.dtype)                          # under autocast the residual stream stays float32

    @staticmethod
    def flops(cfg):
        return 2 * cfg.n_embd**2, 2 * cfg.n_embd**2


class GateUnit(nn.Module):
    """How much of the old state a token keeps, feature by feature, g in (0, 1):
    g = sigmoid(z / tau + eps_g),  z = W2 silu(W1 LN_c([LN_h(h) ; LN_e(e)])) + b2                                     [GRT]
    LN_c is in the released weights, not in the paper's formula. b2 starts at gate_bias."""

    def __init__(self, cfg):
        super().__init__()
        D = cfg.n_embd
        self.state_norm, self.anchor_norm, self.joint_norm = make_norm(cfg), make_norm(cfg), make_norm(cfg, 2 * D)
        self.up, self.down = nn.Linear(2 * D, D, bias=False), nn.Linear(D, D, bias=True)
        self.temperature = cfg.gate_temperature

    def forward(self, h_BTD, e_BTD, noise_BT1):
        """h: the state without noise; e: LN_e of the anchor, made once per forward; noise: eps_g, one draw per token."""
        x_BTE = self.joint_norm(torch.cat((self.state_norm(h_BTD), e_BTD), -1))
        z_BTD = self.down(F.silu(self.up(x_BTE)))
        return torch.add(noise_BT1, at_least_fp32(z_BTD), alpha=1 / self.temperature).sigmoid_()          # eps_g + z / tau


class Gate(Inject):
    """h <- g h + (1 - g) core(W_proj [h ; e])                                                                        [GRT]
    The core's output is a whole proposal, not a delta, and gets no residual beyond those inside its blocks."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = GateUnit(cfg)

    def anchor(self, e_BTD):
        return self.from_anchor(e_BTD), self.gate.anchor_norm(e_BTD)

    def write(self, h_BTD, y_BTD, anchor, noise_BT1):
        g_BTD = self.gate(h_BTD, anchor[1], noise_BT1)
        h_new_BTD = torch.lerp(y_BTD.to(g_BTD.dtype), h_BTD.to(g_BTD.dtype), g_BTD)            # y + g (h - y)
        return h_new_BTD.to(h_BTD.dtype)

    @staticmethod
    def flops(cfg):
        return 2 * cfg.n_embd**2, 8 * cfg.n_embd**2


UPDATES = {"replace": Replace, "inject": Inject, "gate": Gate}

# ----------------------------------------------------------------------------------------------------- 8 depth and noise
# Training depth of a micro-batch, from a generator that the caller gives the same seed on all ranks.
def poisson_depth(cfg, rng):
    """Heavy tail: tau ~ N(ln rbar - s^2 / 2, s), depth ~ Poisson(e^tau) + 1, s = .5; the mean is rbar + 1  [Huginn, Geiping et al. 2025]."""
    tau = math.log(cfg.poisson_rate) - 0.5**2 / 2 + 0.5 * torch.randn((), generator=rng)
    return int(torch.poisson(tau.exp(), generator=rng)) + 1


DEPTHS = {
    "fixed": lambda cfg, rng: cfg.n_recur,
    "uniform": lambda cfg, rng: int(torch.randint(cfg.min_depth, cfg.n_recur + 1, (), generator=rng)),
    "poisson": poisson_depth,
}


def truncated_normal(shape, std, seed, device="cpu"):
    return nn.init.trunc_normal_(torch.empty(shape, device=device), 0, std, -3 * std, 3 * std, generator=generator(seed, device))


class Silence:
    """Evaluation, and models without noise."""

    def on_first(self, still_BTD, std):
        return still_BTD

    def on_state(self, h_BTD, step):
        return h_BTD

    def on_gate(self, h_BTD, step):
        return h_BTD.new_zeros(*h_BTD.shape[:2], 1)


class Noise:
    """Training noise of one call, a function of (seed, step) alone: a step that is computed again draws the same."""

    def __init__(self, cfg, seed):
        self.state_std, self.gate_std, self.seed = cfg.state_noise, cfg.gate_noise, seed

    def draw(self, x, shape, std, *where):
        rng = generator(fold_in(self.seed, *where), x.device)
        return torch.empty(shape, device=x.device, dtype=x.dtype).normal_(0, std, generator=rng)

    def on_first(self, still_BTD, std):
        """A random first state, in place of evaluation's."""
        return truncated_normal(still_BTD.shape, std, fold_in(self.seed, "first state"), still_BTD.device).to(still_BTD.dtype)

    def on_state(self, h_BTD, step):
        """h + eps_x, redrawn at every step; the gate and the write see h without it."""
        return self.draw(h_BTD, h_BTD.shape, self.state_std, "state", step).add_(h_BTD) if self.state_std else h_BTD

    def on_gate(self, h_BTD, step):
        """eps_g, one draw per token, the same for all its features."""
        return self.draw(h_BTD, (*h_BTD.shape[:2], 1), self.gate_std, "gate", step)


# --------------------------------------------------------------------------------------------------- 9 Recursion and GPT


class Recursion(nn.Module):
    """The loop. A module of its own, so that whoever shards weights can gather the core once for all steps."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.block_at = cfg, cfg.sharing_rule.block
        self.core = nn.ModuleList(Block(cfg) for _ in range(cfg.n_core))
        self.first_state, self.update, self.router = STATES[cfg.state_init](cfg), UPDATES[cfg.update](cfg), ROUTERS[cfg.router](cfg)
        self.lora = LoRA(cfg) if cfg.lora_rank else NoLoRA(cfg)
        self.norm = make_norm(cfg) if cfg.loop_norm else nn.Identity()
        self.bptt = cfg.bptt or math.inf

    def forward(self, e_BTD, who, depth, noise, cache, watch):
        h_BTD, anchor, who = self.enter(e_BTD, who, depth, noise)
        for step in range(depth):
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= depth - self.bptt):
                h_BTD, who = self.step(h_BTD, anchor, who, step, noise, cache, watch)
        return h_BTD, who

    def enter(self, e_BTD, who, depth, noise):
        """The first state, what the update needs of the anchor at every step, and who takes step 0."""
        h_BTD = self.first_state(e_BTD, who.position_AC, noise)
        return h_BTD, self.update.anchor(e_BTD), self.router.enter(h_BTD, who, depth)

    def step(self, h_BTD, anchor, who, step, noise, cache, watch):
        """One pass of the core for those who are in it: read -> core -> write -> who continues?"""
        if not who.position_AC.numel():                       # nobody is
            return h_BTD, who
        h_ACD, chosen_anchor = who.take(h_BTD), anchor if who.index_AC is None else [who.take(x_BTD) for x_BTD in anchor]
        x_ACD = self.update.read(noise.on_state(h_ACD, step), chosen_anchor)
        cache.arrive(step, who)
        for j in range(len(self.core)):
            block = self.core[self.block_at(step, j, self.cfg)]
            x_ACD = block(x_ACD, who.cos, who.sin, cache.core_seat(step, j), self.lora.at(step, j))
        cache.settle(step)
        write = lambda h_ACD, y_ACD: self.update.write(h_ACD, y_ACD, chosen_anchor, noise.on_gate(h_ACD, step))
        h_BTD = who.put(h_BTD, self.norm(self.router.merge(h_ACD, x_ACD, write, who, step)))
        who = watch.look(h_BTD, who.went(h_BTD, step + 1), step + 1)
        return h_BTD, self.router.narrow(h_BTD, who, step + 1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy, a weighted sum over tokens, a few of them at a time. The gradient of a sum is known as soon as its
    logits are, so it is made on the spot and nothing is computed twice; backward only scales it.

    x may hold a multiple of the targets, one pass through them after another. Returns (sum, cross-entropy of each token)."""

    @staticmethod
    def forward(ctx, x_QD, table_VD, target_N, weight_Q, learn):
        V, n = len(table_VD), max(256, 2**20 // len(table_VD), len(target_N) // 16)                    # tokens at a time
        Q, target_Q, ce_Q = len(x_QD), target_N.repeat(len(x_QD) // len(target_N)), weight_Q.new_empty(len(x_QD))
        ctx.grads = dx_QD, dtable_VD = [torch.zeros_like(w) if learn else w for w in (x_QD, table_VD)]
        low = F.linear(x_QD[:1], table_VD[:1]).dtype                     # of a matrix product: autocast's where it is on
        x_QD, table_VD, store_nV = x_QD.to(low), table_VD.to(low), x_QD.new_empty(min(n, Q), V, dtype=low)
        for x_nD, dx_nD, target_n, weight_n, ce_n in zip(*(t.split(n) for t in (x_QD, dx_QD, target_Q, weight_Q, ce_Q))):
            index_n1 = target_n.where(target_n != -100, 0)[:, None]
            z_nV = at_least_fp32(torch.mm(x_nD, table_VD.T, out=store_nV[: len(x_nD)]))
            z_nV -= z_nV.amax(-1, keepdim=True)
            z_n1 = z_nV.gather(1, index_n1)
            sum_n1 = z_nV.exp_().sum(-1, keepdim=True)
            ce_n.copy_((sum_n1.log() - z_n1)[:, 0])
            if learn:          # d CE / dz = softmax - one-hot = (exp z - sum one-hot) / sum, divided where it is narrow
                d_nV, share_n1 = z_nV.scatter_add_(1, index_n1, -sum_n1).to(low), weight_n[:, None] / sum_n1
                dx_nD.copy_(d_nV @ table_VD).mul_(share_n1)
                x_nD = (x_nD * share_n1).to(low)
                dtable_VD.addmm_(d_nV.T, x_nD) if low == dtable_VD.dtype else dtable_VD.add_(d_nV.T @ x_nD)
        ctx.ce_Q = ce_Q
        ctx.mark_non_differentiable(ce_Q)
        return (ce_Q * weight_Q).sum(), ce_Q

    @staticmethod
    def backward(ctx, scale, _):
        if ctx.grads is None:
            raise RuntimeError("a loss whose logits are never all there can be differentiated once; use fused_loss=False (and loss='last') for more")
        grads, ctx.grads = ctx.grads, None                               # handed over, not kept alive
        return *(grad.mul_(scale) for grad in grads), None, scale * ctx.ce_Q if ctx.needs_input_grad[3] else None, None


def chunked(x_QD, table_VD, target_N, weight_Q):
    return ChunkedCrossEntropy.apply(x_QD, table_VD, target_N, weight_Q, torch.is_grad_enabled())


# A loss makes, from the model, the features that were read, logits (or None) and targets (-100 does not count), the named
# terms whose sum training minimises. Means over the targets that count, 0 when none does; float32 or better.


def last_loss(model, x_BTD, logits_BTV, targets_BT):
    """Plain cross-entropy. logits: None = chunked."""
    target_N = targets_BT.flatten()
    counts_N = at_least_fp32((target_N != -100).to(x_BTD.dtype))
    if logits_BTV is None:
        total = chunked(x_BTD.flatten(0, 1), model.embed.weight, target_N, counts_N)[0]
    else:
        total = F.cross_entropy(at_least_fp32(logits_BTV).flatten(0, 1), target_N, ignore_index=-100, reduction="sum")
    return {"ce": total / counts_N.sum().clamp(min=1)}


def every_loss(model, x_RBTD, logits_BTV, targets_BT):
    """The expected cross-entropy over the steps that a token may leave after, sum_t p_t CE_t, less beta times the entropy of p  [Ouro].
    ce: of the last step, for the eye; early: what the expectation differs by, which carries the gradient of both."""
    R, target_N = len(x_RBTD), targets_BT.flatten()
    log_p_RN = log_exits(model.exit_gate(x_RBTD).flatten(1))
    p_RN, counts_N = log_p_RN.exp(), (target_N != -100).to(log_p_RN.dtype)
    total, ce_Q = chunked(x_RBTD.flatten(0, 2), model.embed.weight, target_N, (p_RN * counts_N).flatten())
    mean = lambda x_N: (x_N * counts_N).sum() / counts_N.sum().clamp(min=1)
    ce = mean(ce_Q.view(R, -1)[-1])
    return {"ce": ce, "early": total / counts_N.sum().clamp(min=1) - ce, "entropy": model.cfg.exit_entropy * mean((p_RN * log_p_RN).sum(0))}


def log_exits(z_RN):
    """log p_t of the exit gate's logits: p_t = lambda_t prod_{j<t} (1 - lambda_j), lambda = sigmoid(z); the last step takes what is left."""
    stay_RN = F.logsigmoid(-z_RN)
    before_RN = stay_RN.cumsum(0) - stay_RN
    return torch.cat((before_RN[:-1] + F.logsigmoid(z_RN[:-1]), before_RN[-1:]))


LOSSES = {"last": last_loss, "every": every_loss}


class ExitGate(Linear):
    """The logit of lambda_t, a token's chance to leave after step t, from the step's normed features  [Ouro]. float32."""

    def __init__(self, cfg):
        super().__init__(cfg.n_embd, 1, bias=True)

    def forward(self, x):
        """x (..., D) -> (...)"""
        return (at_least_fp32(x) * self.weight[0]).sum(-1) + self.bias


# What is read of the state, and when. A watch looks at it after every step, may let tokens go, and has the features in the end.


class AtEnd:
    """The state is read once, after the last step."""

    def __init__(self, model, outer, cache, threshold=None):
        self.model, self.outer, self.cache, self.threshold = model, outer, cache, threshold

    def look(self, h_BTD, who, step):
        """After `step` steps: who still goes on."""
        return who

    def features(self, h_BTD, who, pick=slice(None)):
        """After the loop: what the head reads, (B, T, D), or those that `pick` indexes."""
        return self.model.finish(h_BTD, self.outer, self.cache.coda_seat, pick)


class AtEvery(AtEnd):
    """loss=every: each step's state is read, features (steps run, B, T, D). The coda's insides are computed again in backward: kept for
    every step they would be as much as the core's."""

    def __init__(self, model, outer, cache, threshold=None):
        super().__init__(model, outer, cache)
        again = len(model.coda) and torch.is_grad_enabled()
        self.finish = functools.partial(checkpoint, model.finish, use_reentrant=False) if again else model.finish

    def look(self, h_BTD, who, step):
        return who._replace(states=(*who.states, h_BTD))      # with who, so that they leave the loop where its gradients come in

    def features(self, h_BTD, who, pick=slice(None)):
        return torch.stack([self.finish(x_BTD, self.outer, self.cache.coda_seat, pick) for x_BTD in who.states or (h_BTD,)])


class Exit(AtEnd):
    """A token is read after every step that it takes, and leaves the loop when its own score says so. The coda of a step sees the
    tokens that left before as they were read last."""
    x_BTD = past = None                                   # what was read; what the score keeps from one step to the next

    def make_room(self, n_rows):
        """For tokens that stand at steps of their own (serving), in place of the first step's."""
        like = self.model.embed.weight
        self.x_BTD = like.new_zeros(n_rows, 1, self.model.cfg.n_embd)
        self.past = at_least_fp32(like.new_full((n_rows, 1, self.width(self.model.cfg)), self.fresh))

    def forget(self, row_n):
        """These rows have another token now."""
        self.past.index_fill_(0, row_n, self.fresh)       # an assigned number would be sent over

    def look(self, h_BTD, who, step):
        x_ACD = self.model.finish(who.take(h_BTD), who, functools.partial(self.cache.exit_seat, step - 1))
        self.x_BTD = who.put(self.x_BTD, x_ACD)               # at the first step everyone is there, and nothing to put it into
        return who.pick(who.tell(~self.leaves(x_ACD, who), who.real_AC), *h_BTD.shape[:2])

    def features(self, h_BTD, who, pick=slice(None)):
        self.cache.close()
        return super().features(h_BTD, who, pick) if self.x_BTD is None else self.x_BTD[pick]


class ByKL(Exit):
    """Leave when KL(p_t || p_{t-1}) of the predictions after two steps in a row is below the threshold  [Huginn]."""
    default, fresh, width = 5e-4, -math.inf, staticmethod(lambda cfg: cfg.vocab_size)            # nobody leaves after one step: KL from nothing

    def leaves(self, x_ACD, who):
        log_p_ACV = at_least_fp32(self.model.head(x_ACD)).log_softmax(-1)
        last, self.past = self.past, who.put(self.past, log_p_ACV)
        if last is None:
            return torch.zeros_like(log_p_ACV[..., 0], dtype=torch.bool)
        kl_AC = (log_p_ACV.exp() * (log_p_ACV - who.take(last))).sum(-1).clamp(min=0)              # rounding may take it below
        return kl_AC < self.threshold

    @staticmethod
    def flops(cfg):
        """Of the score, per token and step, the coda apart."""
        return 2 * cfg.vocab_size * cfg.n_embd


class ByCDF(Exit):
    """Leave at the first step by which the exit gate has let go of the threshold's share: 1 - prod (1 - lambda) >= q  [Ouro]."""
    default, fresh, width = 0.5, 0.0, staticmethod(lambda cfg: 1)

    def leaves(self, x_ACD, who):
        log_stay_AC1 = F.logsigmoid(-self.model.exit_gate(x_ACD))[..., None]
        if self.past is not None:
            log_stay_AC1 = log_stay_AC1 + who.take(self.past)
        self.past = who.put(self.past, log_stay_AC1)
        return -log_stay_AC1[..., 0].expm1() >= self.threshold

    @staticmethod
    def flops(cfg):
        return 2 * cfg.n_embd


WATCHES = {"last": AtEnd, "every": AtEvery}
EXITS = {None: AtEnd, "kl": ByKL, "cdf": ByCDF}


class Output(NamedTuple):
    """What a call gives back."""
    logits: torch.Tensor | None          # (B, T, V); None: targets given and cfg.fused_loss
    loss: torch.Tensor | None            # training: the sum of `losses`; evaluation: losses["ce"]; None without targets
    losses: dict                         # named terms; "ce" is the plain cross-entropy, in nats per token
    depth_BT: torch.Tensor               # how many steps each token took


def steps_taken(who, ids_BT):
    """How many steps each token took, (B, T)."""
    return who.depth[..., 0] if torch.is_tensor(who.depth) else torch.full_like(ids_BT, who.depth)


class GPT(nn.Module):
    """The whole model. start, step and finish are the only places where a token is computed: training, evaluation and
    cached decoding all run them."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.positions = KINDS[cfg.block].positions(cfg)
        self.dropout = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()
        self.prelude = nn.ModuleList(Block(cfg) for _ in range(cfg.n_prelude))
        self.recursion = Recursion(cfg)
        self.coda = nn.ModuleList(Block(cfg) for _ in range(cfg.n_coda))
        self.norm = make_norm(cfg) if cfg.n_coda or not cfg.loop_norm else nn.Identity()         # the loop has normed it
        self.exit_gate = ExitGate(cfg) if cfg.loss == "every" else nn.Identity()
        self.init_weights()

    # ---- the three verbs (step is Recursion's)

    def start(self, ids_BT, cache, n_new_B=None, routing="causal", threshold=None):
        """Embed and run the prelude. Returns the anchor e, which the first state comes from, and who goes on."""
        position_BT = cache.open(*ids_BT.shape, n_new_B, ids_BT.device)
        who = Who(position_BT, *self.positions.tables(position_BT), real_AC=cache.outer_window.real_AT, choose=FORMS[routing][0],
                  tell=FORMS[routing][1], threshold=as_logit(self.cfg.threshold if threshold is None else threshold))
        h_BTD = self.dropout(self.positions.add(self.embed(ids_BT), position_BT))
        for i, block in enumerate(self.prelude):
            h_BTD = block(h_BTD, who.cos, who.sin, cache.seat(i))
        return h_BTD, who

    def finish(self, h_BTD, who, coda_seat, pick=slice(None)):
        """Coda and norm: the features that the head reads. coda_seat: number of a coda block -> its seat. pick: an index into (B, T)
        for the tokens that are wanted."""
        for i, block in enumerate(self.coda):
            h_BTD = block(h_BTD, who.cos, who.sin, coda_seat(i))
        return self.norm(h_BTD[pick])

    def head(self, x_BTD):
        """Logits; the weights are the token table (tied)."""
        return F.linear(x_BTD, self.embed.weight)

    # ---- public calls

    def forward(self, ids_BT, targets_BT=None, depth=None, routing=None, seed=None, exit=None, exit_threshold=None):
        """ids (B, T) integers -> Output. targets: the token after each position, -100 where it does not count.

        depth: steps to run, 0 = coda on the prelude's output; None = sampled in training, n_recur in evaluation.
        routing: expert-choice routers: "topk", which sees the whole row and is not causal, or "causal", each token by the
        threshold; None = topk in training, causal in evaluation. seed: training only, a pair of ints
        (shared, own): depth comes from shared, noise and a random first state from own; None = both from torch's global generator, as
        dropout. exit: outside training, how a token leaves the loop early: kl or cdf (room 9), with its threshold (None: the rule's).
        Raises ValueError on more than block_size tokens, none at all, or a depth that this model cannot run."""
        if not 0 < ids_BT.size(1) <= self.cfg.block_size:
            raise ValueError(f"{ids_BT.size(1)} tokens given; this model takes 1 to block_size={self.cfg.block_size}")
        if routing not in (None, "topk", "causal"):
            raise ValueError(f"routing={routing!r} is not one of None, 'topk', 'causal'")
        if exit is not None and routing == "topk":
            raise ValueError(f"exit={exit!r} does not go with routing='topk', which counts on all who took a step; use 'causal'")
        exit_threshold, noise, kind = self.check_exit(exit, exit_threshold), Silence(), "last"
        if self.training:
            kind = self.cfg.loss if targets_BT is not None else "last"
            shared, own = torch.randint(2**62, (2,)).tolist() if seed is None else seed
            depth = DEPTHS[self.cfg.depth_sampling](self.cfg, generator(shared)) if depth is None else depth
            noise = Noise(self.cfg, own) if self.cfg.random else Silence()
        depth, cache = self.check_depth(depth), no_cache(self.cfg, exit)
        e_BTD, outer = self.start(ids_BT, cache, routing=routing or ("topk" if self.training else "causal"))
        watch = (EXITS[exit] if exit else WATCHES[kind])(self, outer, cache, exit_threshold)
        h_BTD, who = self.recursion(e_BTD, outer, depth, noise, cache, watch)
        x = watch.features(h_BTD, who)                                                # loss=every: of every step
        logits_BTV = None if self.cfg.fused_loss and targets_BT is not None else self.head(x if x.dim() == 3 else x[-1])
        loss, losses = None, {}
        if targets_BT is not None:
            losses = LOSSES[kind](self, x, logits_BTV, targets_BT) | who.losses
            loss = sum(losses.values()) if self.training else losses["ce"]
        return Output(logits_BTV, loss, losses, steps_taken(who, ids_BT))

    @torch.inference_mode()
    def feed(self, ids_BT, cache, depth=None, n_new_B=None, every=False, threshold=None, exit=None, exit_threshold=None):
        """Decode: take up the next tokens of each row with a cache (room 3), which remembers them.

        ids (B, T), the first n_new_B[b] of row b real and the rest padding (None: all real). depth: None = the cache's.
        Returns logits after each row's last real token, (B, 1, V); with every=True after all T, (B, T, V). The steps that each
        token took are in cache.taken_BT. exit, exit_threshold: early exit, with a cache that was made for it."""
        check_threshold(threshold)
        exit_threshold = self.check_exit(exit, exit_threshold)
        if cache.exits != (exit is not None):
            raise ValueError(f"exit={exit!r}, but the cache was made {'for' if cache.exits else 'without'} early exit; make another one")
        depth = self.check_depth(cache.depth if depth is None else depth)
        if cache.depth not in (None, depth):
            raise ValueError(f"depth={depth}, but the cache was made for depth {cache.depth}; make another one")
        pick = slice(None)
        if not every and ids_BT.size(1) > 1:
            last_B = [n - 1 for n in n_new_B or [ids_BT.size(1)] * ids_BT.size(0)]
            pick = (torch.arange(len(last_B), device=ids_BT.device)[:, None], torch.tensor(last_B, device=ids_BT.device)[:, None])
        e_BTD, outer = self.start(ids_BT, cache, n_new_B, threshold=threshold)
        watch = EXITS[exit](self, outer, cache, exit_threshold)
        h_BTD, who = self.recursion(e_BTD, outer, depth, Silence(), cache, watch)
        cache.taken_BT = steps_taken(who, ids_BT)
        return self.head(watch.features(h_BTD, who, pick))

    def check_depth(self, depth):
        """`depth` as an int this model can run (None: n_recur), or ValueError."""
        if depth is None:
            return self.cfg.n_recur
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth={depth!r} is not a number of steps; give an integer from 0 up")
        if depth > self.cfg.n_recur and self.cfg.own_steps:
            raise ValueError(f"depth={depth} is more than n_recur={self.cfg.n_recur}, and every step of this model has {self.cfg.own_steps} of its own")
        if depth != self.cfg.n_recur and not self.cfg.any_depth:
            raise ValueError(f"depth={depth} cannot be run: with sharing={self.cfg.sharing!r} the depth is always "
                             f"n_recur={self.cfg.n_recur}")
        return depth

    def check_exit(self, exit, threshold):
        """The threshold of an exit rule (None: the rule's own), or ValueError."""
        cfg = self.cfg
        if exit is None:
            if threshold is not None:
                raise ValueError(f"exit_threshold={threshold} belongs to an exit rule; give exit={' or '.join(repr(e) for e in EXITS if e)} too")
            return None
        if exit not in EXITS:
            raise ValueError(f"exit={exit!r} is not one of {', '.join(map(repr, EXITS))}")
        why = ("exit is for evaluation and decoding" if self.training else "it has one step" if cfg.n_recur == 1
               else f"sharing={cfg.sharing_name!r} always runs all steps" if not cfg.any_depth
               else "router='token' has given every token its depth" if cfg.router == "token"
               else "not all tokens take step 0" if cfg.router == "expert" and cfg.capacities[0] < 1
               else "it has no exit gate, which loss='every' trains" if exit == "cdf" and cfg.loss != "every" else None)
        if why:
            raise ValueError(f"exit={exit!r} does not go with this model: {why}")
        threshold = EXITS[exit].default if threshold is None else threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= (1 if exit == "cdf" else math.inf):
            raise ValueError(f"exit_threshold={threshold!r} is out of range; {exit} takes " + ("0 to 1" if exit == "cdf" else "0 or more"))
        return threshold

    def blocks(self):
        """Every unique block: the unit that train.py compiles."""
        return [*self.prelude, *self.recursion.core, *self.coda]

    # ---- initial weights

    @torch.no_grad()
    def init_weights(self):
        """Every tensor gets its start value here, so a model made on the meta device can be filled by one call.

        N(0, 0.02), biases 0, norms 1. GPT-2 blocks divide the std of residual outputs by sqrt(2 x executed blocks)."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
            for buffer in module.buffers(recurse=False):      # the balancing bias of a token-choice router
                nn.init.zeros_(buffer)
            if isinstance(module, FromNoise):
                module.fill()
        for name, p in self.recursion.lora.named_parameters():
            nn.init.normal_(p, std=0.02) if name.startswith("down") else nn.init.zeros_(p)
        if self.cfg.block == "gpt2":
            for block in self.blocks():
                for linear in (block.attention.output, block.mlp.down):
                    nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.cfg.executed_blocks()))
        update = self.recursion.update
        if self.cfg.proj_init == "scaled" and isinstance(update, Inject):
            for linear in (update.from_state, update.from_anchor):
                nn.init.normal_(linear.weight, std=(2 * self.cfg.n_embd) ** -0.5)
        if self.cfg.proj_init == "identity" and isinstance(update, Inject):
            nn.init.eye_(update.from_state.weight)
            nn.init.zeros_(update.from_anchor.weight)
        if isinstance(update, Gate):
            nn.init.constant_(update.gate.down.bias, self.cfg.gate_bias)      # after the loop that zeroed it

    # ---- generate: room 10's stream, collected

    def generate(self, ids_BT, max_new_tokens, temperature=1.0, top_k=None, top_p=None, depth=None, cache="full", stop=None,
                 threshold=None, exit=None, exit_threshold=None, use_cache=True, generator=None):
        """Continue prompts. ids: (B, T) -> (B, T + max_new_tokens), rows that stopped padded with `stop`; or a list of
        1-D tensors -> a list, each prompt + new tokens, cut after its stop id.

        temperature 0 = greedy; top_k None or 0 = off; top_p in (0, 1]; cache: full (exact), first, last, mean.
        A row that holds more than block_size tokens drops all but its newest block_size // 2, and the batch is read again
        from what each row still holds (so with a compressed cache the others' K/V are made anew). Raises ValueError."""
        if threshold is not None and self.cfg.router != "expert":
            raise ValueError(f"threshold={threshold} given, but this model has no expert-choice router")
        if isinstance(ids_BT, torch.Tensor) and ids_BT.dim() != 2:
            raise ValueError(f"ids of shape {tuple(ids_BT.shape)} given; generate takes (B, T) or a list of 1-D tensors")
        prompts = list(ids_BT)
        device = prompts[0].device if prompts else self.embed.weight.device
        rows, done = [p.tolist() for p in prompts], [False] * len(prompts)
        for next_B in stream(self, rows, max_new_tokens, temperature, top_k, top_p, depth, cache, use_cache, generator, threshold, None,
                             exit, exit_threshold):
            rows = [row if over else row + [new] for row, new, over in zip(rows, next_B, done)]
            done = [over or new == stop for over, new in zip(done, next_B)]
            if all(done):
                break
        if isinstance(ids_BT, torch.Tensor):
            width = ids_BT.size(1) + max_new_tokens
            return torch.tensor([row + [stop] * (width - len(row)) for row in rows], device=device)
        return [torch.tensor(row, device=device) for row in rows]


# ---------------------------------------------------------------------------------------------------------------- 10 use


def check_sampling(temperature, top_k, top_p):
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} is not 0 (greedy) or a positive number")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k} is negative; 0 or None turns it off")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is outside (0, 1]; None or 1 turns it off")


def check_threshold(threshold):
    if threshold is not None and not (isinstance(threshold, (int, float)) and 0 <= threshold <= 1):
        raise ValueError(f"threshold={threshold!r} is not a number from 0 (everyone goes on) to 1 (nobody); None is the model's own")


def sample(logits_BV, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Next token of each row, a list of ints. top_k keeps the k likeliest; top_p then the smallest set that holds p."""
    logits_BV = at_least_fp32(logits_BV)
    if not torch.isfinite(logits_BV).all():
        raise ValueError(NOT_FINITE)
    return draw(logits_BV, temperature, top_k, top_p, generator).tolist()


NOT_FINITE = "the logits are not finite: the weights are damaged or training diverged"


def draw(logits_BV, temperature=1.0, top_k=None, top_p=None, generator=None):
    """As sample, of float32 logits that are known to be finite: a tensor (B,)."""
    if temperature < 1e-6:
        return logits_BV.argmax(-1)
    p_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k or top_p is not None:
        sorted_BV, index_BV = p_BV.sort(dim=-1, descending=True, stable=True)
        sorted_BV[:, top_k or sorted_BV.size(-1):] = 0
        likelier_BV = sorted_BV.cumsum(-1) - sorted_BV                # mass of the tokens before each one
        kept_BV = sorted_BV * (likelier_BV < (top_p or 1) * sorted_BV.sum(-1, keepdim=True))
        p_BV = torch.zeros_like(p_BV).scatter(-1, index_BV, kept_BV)
    # What torch.multinomial does, draw for draw, without its checks of p, which wait for the device.
    return (p_BV / torch.empty_like(p_BV).exponential_(generator=generator)).argmax(-1)


@torch.inference_mode()
def stream(model, rows, max_new_tokens, temperature=1.0, top_k=None, top_p=None, depth=None, cache="full", use_cache=True,
           generator=None, threshold=None, taken=None, exit=None, exit_threshold=None):
    """Yield the next token of every row (a list of ints), max_new_tokens times. rows: lists of token ids, any lengths.

    In evaluation mode while it runs. With use_cache=False every token reads its whole context again. taken: a list with a
    list for each row, which grows by the steps that each token took once it is read; the last one drawn never is."""
    check_sampling(temperature, top_k, top_p)
    model.cfg.check_cache(cache)
    depth, device, was_training = model.check_depth(depth), model.embed.weight.device, model.training
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    if not rows or not all(rows):
        raise ValueError("an empty prompt has nothing to continue; begin with one token, for example end-of-text")
    context, store = [list(row) for row in rows], None
    try:
        model.eval().check_exit(exit, exit_threshold)
        for i in range(max_new_tokens):
            if max(map(len, context)) > model.cfg.block_size:
                context, store = [keep_newer_half(row, model.cfg.block_size) for row in context], None
            fresh = store is None
            fed = context if fresh else [row[-1:] for row in context]
            if fresh:
                n_places = min(model.cfg.block_size, max(map(len, context)) + max_new_tokens - i - 1)
                store = make_cache(model, len(rows), n_places, depth, exit) if use_cache else no_cache(model.cfg, exit)
            ids_BT = torch.tensor([row + [0] * (max(map(len, fed)) - len(row)) for row in fed], device=device)
            logits_BV = model.feed(ids_BT, store, depth, [len(row) for row in fed], False, threshold, exit, exit_threshold)[:, 0]
            for known, prompt, row, steps in zip(taken, rows, fed, store.taken_BT.tolist()) if taken is not None else ():
                n_new = len(prompt) + i - len(known)                             # None: dropped before it was read
                known += [None] * (n_new - len(row)) + steps[: len(row)][-n_new:]
            if fresh:
                store = store.compress(cache) if use_cache else None
            next_B = sample(logits_BV, temperature, top_k, top_p, generator)
            context = [row + [new] for row, new in zip(context, next_B)]
            yield next_B
    finally:
        model.train(was_training)


def keep_newer_half(row, block_size):
    return row if len(row) <= block_size else row[-max(1, block_size // 2):]


def cache_dtype(model):
    """The dtype that keys have here: autocast's where it is on, else the weights'."""
    device = model.embed.weight.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else model.embed.weight.dtype


def make_cache(model, n_rows, n_places, depth=None, exit=None):
    """An empty exact cache for `n_rows` rows of `n_places` tokens, on the weights' device and of the keys' dtype."""
    cfg = model.cfg
    inner = CACHES[cfg.kv, stops(cfg, exit)][1](cfg, n_rows, n_places, model.check_depth(depth), cache_dtype(model), model.embed.weight.device)
    return inner if exit is None else ExitCache(inner)


def count_params(cfg, embeddings=True):
    with torch.device("meta"):
        model = GPT(cfg)
    tables = [model.embed, model.positions]
    left_out = 0 if embeddings else sum(p.numel() for table in tables for p in table.parameters())
    return sum(p.numel() for p in model.parameters()) - left_out


def block_flops(cfg, keys, made=1):
    """FLOPs per token of one block whose queries see `keys` keys: 2 per weight, 4 D per key (scores and sum). made: how much
    of its K and V it makes."""
    D, kv = cfg.n_embd, cfg.kv_heads * cfg.head_width * made
    return 2 * (2 * D * D + 2 * D * kv + KINDS[cfg.block].matrices * D * cfg.ffn_width) + 4 * D * keys


def step_shares(cfg, seq_len, whole):
    """Share of all tokens that takes each step: what the capacities choose (token-choice: as if balanced)."""
    if cfg.router == "none":
        return lambda step: 1.0
    return lambda step: n_chosen(cfg.capacities[step], seq_len, whole) / seq_len


def over_steps(depth, of):
    """Sum of of(step) over a number of steps that may be fractional."""
    return sum(of(step) * min(1, depth - step) for step in range(math.ceil(depth)))


def readings(depth, exit):
    """How often the coda reads a token's state: once, or after every step (at depth 0 once all the same)."""
    return 1 if exit is None else max(1, depth)


def core_flops(cfg, seq_len, depth, share):
    """The loop's blocks: a step's queries see half of those who take it, with kv=share half of all."""
    keys = lambda step: seq_len / 2 if cfg.kv == "share" else share(step) * seq_len / 2
    made = {"own": 1, "share": 0, "share_k": 0.5, "share_v": 0.5}[cfg.kv]            # of K and V, after step 0
    low = (LoRA if cfg.lora_rank else NoLoRA).flops
    of = lambda step, made: share(step) * cfg.n_core * (block_flops(cfg, keys(step), made) + low(cfg, made))
    return over_steps(depth, lambda step: of(step, made if step else 1))


def exact_flops(cfg, seq_len, depth, share=None):
    """share: step -> share of all tokens that takes it; None = what the capacities choose."""
    once, per_step = UPDATES[cfg.update].flops(cfg)
    share, outer = share or step_shares(cfg, seq_len, int), (cfg.n_prelude + cfg.n_coda) * block_flops(cfg, seq_len / 2)
    router_once, router_step = ROUTERS[cfg.router].flops(cfg)
    asked = lambda step: share(step - 1) if step else 1.0                        # who took the step before; after a shallow pass's last step too
    scored = over_steps(min(depth + 1, cfg.n_recur), lambda step: asked(step) * router_step(step))
    core = core_flops(cfg, seq_len, depth, share) + over_steps(depth, lambda step: share(step) * per_step)
    return outer + core + once + router_once + scored + 2 * cfg.vocab_size * cfg.n_embd


def grt_flops(cfg, seq_len, depth):
    # (n_prelude + n_core R + n_coda)(24 d^2 + 4 S d) + R 10 d^2, 24 d^2 being GPT-2's widths             [GRT, FLOPs per token]
    return cfg.executed_blocks(depth) * block_flops(cfg, seq_len) + depth * sum(UPDATES[cfg.update].flops(cfg))


def paper_flops(cfg, seq_len, depth):
    # F = 2 k (2 d^2 + 2 d d_kv + 3 d ffn) + 2 k m d per layer, d_kv = d, k = round(c S), m = k or S              [MoR, FLOPs]
    wide = replace(cfg, n_kv_head=None)
    return (cfg.n_prelude + cfg.n_coda) * block_flops(wide, seq_len / 2) + core_flops(wide, seq_len, depth, step_shares(wide, seq_len, round))


FLOPS = {"exact": exact_flops, "paper": paper_flops, "grt": grt_flops}


def count_kv_bytes(cfg, seq_len, batch_size, dtype, cache="full", depth=None, exit=None):
    cfg.check_cache(cache)
    depth = cfg.n_recur if depth is None else depth
    core = sum(slot_places(cfg, slot, seq_len) for slot in range(n_slots(cfg, depth))) if cache == "full" else cfg.n_core * seq_len
    scratch = cfg.n_core if cache in ("first", "mean") else 0
    entries = (cfg.n_prelude + cfg.n_coda * readings(depth, exit)) * seq_len + core + scratch
    return 2 * batch_size * entries * cfg.kv_heads * cfg.head_width * dtype.itemsize


# --------------------------------------------------------------------------------------------------- 11 optimizer groups


def param_groups(model, weight_decay, aux_lr_scale=1.0):
    """AdamW's groups: matrices and tables decay; norms, biases (fewer than two axes) and low-rank additions do not; then the
    auxiliary routers, if there are any, whose learning rate is aux_lr_scale times the others'."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    aux, plain = [p for name, p in named if ".aux_units." in name], [(name, p) for name, p in named if ".aux_units." not in name]
    decays = lambda name, p: p.dim() >= 2 and ".lora." not in name
    groups = [{"params": [p for name, p in plain if decays(name, p)], "weight_decay": weight_decay, "lr_scale": 1.0},
              {"params": [p for name, p in plain if not decays(name, p)], "weight_decay": 0.0, "lr_scale": 1.0},
              {"params": aux, "weight_decay": weight_decay, "lr_scale": aux_lr_scale}]
    return [group for i, group in enumerate(groups) if i < 2 or group["params"]]


# ------------------------------------------------------------------------------------------------- python model.py [CONFIG]


def describe(cfg):
    """The page that `python model.py` prints: plan, counts and one forward with its shapes (on the meta device)."""
    R, S = cfg.n_recur, cfg.block_size
    lines = [f"layout {cfg.layout}: {cfg.n_prelude} prelude + {cfg.n_core} core x {R} steps + {cfg.n_coda} coda; "
             f"block={cfg.block} sharing={cfg.sharing_name} update={cfg.update} router={cfg.router} kv={cfg.kv}", "", "depth plan (core block @ K/V slot)"]
    for step, row in enumerate(block_table(cfg)):
        if step < 3 or step == R - 1:
            cells = [f"{block:>3}@{SLOTS[cfg.kv](cfg, step, j):<4}" for j, block in enumerate(row)]
            lines.append(f"  step {step}: " + " ".join(cells[:12]) + (" ..." if len(cells) > 12 else ""))
        elif step == 3:
            lines.append("  ...")
    full, bare = cfg.n_params(), cfg.n_params(embeddings=False)
    chosen = [S * step_shares(cfg, S, int)(step) for step in range(R)]
    mean = f" at most, {cfg.executed_blocks(sum(chosen) / S):,.1f} on average" if cfg.router != "none" else ""
    lines += ["", f"parameters  {full:,} unique ({bare:,} without token and position tables), vocabulary {cfg.vocab_size:,}",
              f"executed    {cfg.executed_blocks()} blocks{mean} from {cfg.n_prelude + cfg.n_core + cfg.n_coda} sets of weights"]
    if cfg.lora_rank:
        low = R * cfg.n_core * cfg.lora_rank * sum(n + m for n, m in LoRA.shapes(cfg).values())
        lines.append(f"low rank    {low:,} of the parameters: rank {cfg.lora_rank}, a pair for each step and linear of the core")
    if R > 1:
        lines.append(f"training    depth {cfg.trained}; first state {cfg.state_init}"
                     f"{f' (std {cfg.first_std:.3g})' if cfg.state_init == 'random' else ''}; "
                     f"{cfg.train_flops_per_token(S) / 1e6:,.1f} MFLOP/token forward")
    if cfg.router != "none":
        lines.append(f"routing     {', '.join(f'{n:,.0f}' for n in chosen)} of {S:,} tokens take step 0, 1, ... ({'by capacity' if cfg.router == 'expert' else 'if balanced'})")
    flops = [f"depth {d}: {cfg.flops_per_token(S, depth=d) / 1e6:,.1f}" for d in sorted({0, 1, R}) if cfg.any_depth or d == R]
    lines.append(f"MFLOP/token {'   '.join(flops)}   (forward, context {S}, exact)")
    caches = [c for c in FOLDS if c == "full" or cfg.compressible and R > 1]
    sizes = [f"{c}: {cfg.kv_bytes(S, 1, torch.bfloat16, c) / 2**20:,.1f}" for c in caches]
    lines += [f"cache MiB   {'   '.join(sizes)}   (one row of {S} tokens, bfloat16)", "", "one forward, 2 rows of 8 tokens"]
    static = cfg.unrouted() if cfg.router == "token" else cfg                    # who continues is data, and here is none
    with torch.device("meta"):
        model, ids_BT = GPT(static).eval(), torch.zeros(2, min(8, S), dtype=torch.long)
        shapes = []

        def hook(name):
            return lambda module, args, out: shapes.append((name, tuple(out.shape)))

        model.embed.register_forward_hook(hook("embed"))
        for name in ("prelude", "recursion.core", "coda"):
            for i, block in enumerate(model.get_submodule(name)):
                block.register_forward_hook(hook(f"{name}.{i}"))
        shapes.append(("logits_BTV", tuple(model(ids_BT, routing="topk").logits.shape)))
    runs = []                                       # equal neighbours on one line: name ... name (shape)
    for name, shape in [("ids_BT", tuple(ids_BT.shape))] + shapes:
        if runs and runs[-1][2] == shape:
            runs[-1][1], runs[-1][3] = name, runs[-1][3] + 1
        else:
            runs.append([name, name, shape, 1])
    names = [first if n == 1 else f"{first} ... {last} ({n} calls)" for first, last, _, n in runs]
    lines += [f"  {name:<{max(map(len, names))}}  {shape}" for name, (_, _, shape, _) in zip(names, runs)]
    if cfg != static:
        lines.append("  (as if every token took every step: token-choice decides by the data, and there is none here)")
    return "\n".join(lines + [f"note: {sentence}" for sentence in cfg.unused()])


def main(argv):
    import config
    from train import TrainConfig, resolve_vocab            # so that every training config is also a plan
    settings = config.parse(argv, [GPTConfig, TrainConfig], __doc__)
    print(describe(settings.build(GPTConfig, vocab_size=resolve_vocab(settings))))


if __name__ == "__main__":
    import config
    import model          # the same classes for everyone: run as a script, this file would exist twice
    config.run(model.main)
