"""Transformers that reuse their depth: a prelude, a core applied n_recur times with the same weights, and a coda.

    python model.py config/grt_small.py        # depth plan, parameters, FLOPs, cache and shapes, in a second

One picture, one loop. Everything that a configuration can ask for is a choice about it:

    ids_BT -> [start: embed, prelude] -> h, e -> { read -> core -> write } x depth -> [finish: coda, norm, head] -> logits_BTV

`h` is the state that the loop rewrites; `e`, the anchor, is the prelude's output, which stays. A layout is written
n_prelude + n_core x n_recur + n_coda: GPT-2 Small is 0+12x1+0, GRT Medium is 2+5x4+2. A *block* is a set of weights,
a *step* is one pass through the core (steps count from 0), *depth* is how many steps are run. While decoding, each
executed block has a *slot*, a store with one *place* per token for its K and V.

The rooms, each built from those before it (6 is kept for routers). Every choice of the config is a row in a table of
the room that it belongs to:
    1 config   2 small parts   3 K/V cache   4 attention, MLP, block   5 depth plan   7 state updates
    8 depth and noise   9 Recursion and GPT: start, step, finish   10 use: generate and counts   11 optimizer groups

The alphabet. A tensor that carries data through the model has a name that ends in its shape; a plain list with one
number per row ends in _B:
    B batch rows      T new tokens      S stored tokens     C chosen tokens     N flattened B x T    1 a broadcast axis
    D n_embd          H query heads     G key/value heads   K head width        F MLP width          V vocabulary
    E 2 D: state beside anchor          P places of a cache slot, over all its rows          n some of the N
Papers: GRT = Gated Recurrent Transformers (arXiv 2608.15062); MoR = Mixture-of-Recursions (Bae et al. 2025);
GPT-2 = Radford et al. 2019; Llama = Touvron et al. 2023.
"""
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    raise SystemExit(f"torch {torch.__version__} is too old: 2.11 or newer is needed (pip install --upgrade torch)")
try:  # optional: PyTorch's own attention gives the same answers
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

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
    router: str = key("none", "who continues to the next step: none = every token")
    kv: str = key("own", "whose K/V a step attends to: own = made in the same step")
    depth_sampling: str = key("fixed", "depth of a training micro-batch: fixed (n_recur) or uniform (min_depth..n_recur)")
    min_depth: int = key(1, "smallest depth that uniform sampling draws")
    loss: str = key("last", "which steps are supervised: last = one cross-entropy after the final step")
    fused_loss: bool = key(False, "with targets: head and loss in chunks of tokens, so all logits are never there at once (logits: None)")
    state_noise: float = key(0.0, "std of the noise on the state that a step reads, training only (GRT: 0.1)")
    gate_noise: float = key(0.0, "std of the per-token noise inside the gate's sigmoid, training only (GRT: 0.1)")
    gate_bias: float = key(4.0, "initial b2 of the gate: +4 keeps .982 of the old state at every step")
    gate_temperature: float = key(1.0, "tau: the gate's logit is divided by it, before the noise")
    proj_init: str = key("normal", "adapter's start: normal = N(0, 0.02), identity = reads the state and ignores the anchor")
    rope_theta: float = key(10000.0, "RoPE's base period (llama blocks)")
    norm_eps: float = key(1e-5, "epsilon of every norm")

    def __post_init__(self):
        for name, table in (("block", KINDS), ("sharing", SHARINGS), ("update", UPDATES), ("router", ROUTERS), ("kv", SLOTS),
                            ("depth_sampling", DEPTHS), ("loss", LOSSES), ("proj_init", PROJ_INITS)):
            value = getattr(self, name)
            if value not in table and not (name == "sharing" and value is None):
                raise ValueError(f"{name}={value!r} is not one of {', '.join(table)}")
        for name, least in (("block_size", 1), ("n_embd", 1), ("n_head", 1), ("n_core", 1), ("n_recur", 1),
                            ("n_prelude", 0), ("n_coda", 0), ("vocab_size", 1), ("n_kv_head", 1), ("n_ffn", 1)):
            value = getattr(self, name)
            if value is None and name not in ("n_kv_head", "n_ffn"):
                raise ValueError(f"{name}=None is not a number; a model needs one")
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is too small; it must be at least {least}")
        for name in ("dropout", "state_noise", "gate_noise"):
            if not 0 <= getattr(self, name) < (1 if name == "dropout" else math.inf):
                raise ValueError(f"{name}={getattr(self, name)} is out of range; 0 turns it off")
        for name in ("gate_temperature", "rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        self._check_shape()
        self._check_loop()

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

    def unused(self):
        """Sentences about keys that were changed but cannot matter beside the others."""
        default = {f.name: f.default for f in fields(self)}
        rules = [(self.update != "gate", "update is not gate", ("gate_noise", "gate_bias", "gate_temperature")),
                 (self.update == "replace", "update='replace' has no adapter", ("proj_init",)),
                 (self.depth_sampling == "fixed", "depth_sampling='fixed'", ("min_depth",)),
                 (self.block != "llama", "only llama blocks rotate", ("rope_theta",))]
        return [f"{name}={getattr(self, name)} has no effect: {why}" for holds, why, names in rules if holds
                for name in names if getattr(self, name) != default[name]]

    # What follows from the keys.
    layout = property(lambda self: f"{self.n_prelude}+{self.n_core}x{self.n_recur}+{self.n_coda}")
    kv_heads = property(lambda self: self.n_kv_head or self.n_head)
    head_width = property(lambda self: self.n_embd // self.n_head)
    sharing_name = property(lambda self: self.sharing or ("middle_cycle" if self.n_prelude or self.n_coda else "cycle"))
    sharing_rule = property(lambda self: SHARINGS[self.sharing_name])
    any_depth = property(lambda self: self.sharing_rule.any_depth)

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

    def flops_per_token(self, seq_len, convention="exact", depth=None):
        """FLOPs of one forward pass per token, at context `seq_len`. depth: None = n_recur; may be fractional.

        exact: the matrix products that are executed: causal attention as S/2 keys, true GQA and MLP widths, head, gate
        and adapter (the anchor's half once per forward).
        paper: the formula of the MoR paper: blocks alone, causal, K and V counted at full width, head left out.
        grt: the formula of the GRT paper: no causal halving, head left out, the adapter's two halves at every step."""
        if convention not in FLOPS:
            raise ValueError(f"convention={convention!r} is not one of {', '.join(FLOPS)}")
        return FLOPS[convention](self, seq_len, self.n_recur if depth is None else depth)

    def kv_bytes(self, seq_len, batch_size, dtype, cache="full", depth=None):
        """Bytes of K and V for `batch_size` rows of `seq_len` tokens; prelude, coda and scratch entries included."""
        return count_kv_bytes(self, seq_len, batch_size, dtype, cache, depth)

    def kv_io(self, seq_len, cache="full", depth=None):
        """(K, V) entries read for one new token that sees `seq_len` stored ones: one per executed block and token.
        Compressed caches store less, but every step still reads its entry, so they read as much."""
        self.check_cache(cache)
        return seq_len * self.executed_blocks(depth)

    @property
    def compressible(self):
        """Whether one K and V per core block can stand for all steps: no step runs a block twice."""
        return all(len(set(row)) == len(row) for row in block_table(self))

    def check_cache(self, cache):
        """Refuse a decode cache that this model cannot use."""
        if cache not in FOLDS:
            raise ValueError(f"cache={cache!r} is not one of {', '.join(FOLDS)}")
        if cache != "full" and not self.compressible:
            raise ValueError(f"cache={cache!r} keeps one K and V per block, but sharing={self.sharing_name!r} runs a block "
                             f"twice in one step; use cache='full'")


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


def make_norm(cfg, width=None):
    return KINDS[cfg.block].norm(cfg, width or cfg.n_embd)


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
        angle = position_BT[..., None, None] * torch.tensor(self.turns, device=position_BT.device)
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


class Seat(NamedTuple):
    """Where one block's new K and V go and what its queries may see. Tensors only: a block never meets the cache.

    kv is the slot's store, (2, P, G, K), token-major: row b owns the P/B places from b P/B on."""
    kv: torch.Tensor
    place_C: torch.Tensor                # place of each real new token
    real_C: torch.Tensor | None          # which of the B x T new tokens those are; None: all of them
    mask_B1TS: torch.Tensor | None       # what a query sees of its row's first S places; None: all of them
    n_seen: int                          # S

    def exchange(self, k_BTGK, v_BTGK):
        """Write the new entries, give back each row's window of stored ones: k and v, (B, S, G, K)."""
        new = torch.stack((k_BTGK, v_BTGK)).flatten(1, 2)
        self.kv.index_copy_(1, self.place_C, new if self.real_C is None else new[:, self.real_C])
        return self.kv.view(2, k_BTGK.size(0), -1, *k_BTGK.shape[2:])[:, :, : self.n_seen].unbind()


class NoCache:
    """Training and full forwards: nothing is stored, a block's attention is causal over what is here."""
    depth = None

    def open(self, B, T, n_new_B, device):
        return torch.arange(T, device=device)[None]

    def seat(self, i):
        return None

    def core_seat(self, step, j):
        return None

    def settle(self, step):
        pass


class KVCache:
    """`full`, the exact cache: one slot per executed block, and a token's place in its row is its position.

    Rows may hold different numbers of tokens. One call brings T new tokens per row, of which the first n_new are real
    and the rest padding; padding is never stored. outer: slots of prelude and coda; core: those of the loop."""

    def __init__(self, cfg, n_rows, n_places, depth, dtype=torch.float32, device="cpu"):
        if n_places > cfg.block_size:
            raise ValueError(f"n_places={n_places} is more than block_size={cfg.block_size}, the positions that the model knows")
        self.cfg, self.n_rows, self.n_places, self.depth = cfg, n_rows, n_places, depth
        self.length_B = [0] * n_rows
        self.shape, self.dtype, self.device = (2, n_rows * n_places, cfg.kv_heads, cfg.head_width), dtype, device    # 2 P G K
        self.outer = self.new_slots(cfg.n_prelude + cfg.n_coda)
        self.core = self.new_slots(SLOTS[cfg.kv](cfg, depth, 0))

    def new_slots(self, n):
        # zeros, not empty: a masked NaN would still poison the weighted sum of values
        return [torch.zeros(self.shape, dtype=self.dtype, device=self.device) for _ in range(n)]

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
        self.length_B, self.n_seen = stop_B, max(stop_B)
        level = len(set(start_B)) == 1
        position_BT = torch.tensor(start_B[:1] if level else start_B, device=device)[:, None] + torch.arange(T, device=device)
        place_BT = position_BT + self.n_places * torch.arange(B, device=device)[:, None]
        self.real_C = None
        if min(n_new_B) < T:
            real_BT = torch.arange(T, device=device) < torch.tensor(n_new_B, device=device)[:, None]
            self.real_C = real_BT.flatten().nonzero().squeeze(1)
        self.place_C = place_BT.flatten() if self.real_C is None else place_BT.flatten()[self.real_C]
        self.mask_B1TS = None
        if T > 1 or not level:
            self.mask_B1TS = (torch.arange(self.n_seen, device=device) <= position_BT[..., None])[:, None]
        return position_BT if self.real_C is None else position_BT.clamp(max=self.n_places - 1)      # padding may stand beyond

    def seat(self, i):
        return self.seat_at(self.outer[i])

    def core_seat(self, step, j):
        return self.seat_at(self.core[self.core_slot(step, j)])

    def seat_at(self, slot):
        return Seat(slot, self.place_C, self.real_C, self.mask_B1TS, self.n_seen)

    def settle(self, step):
        """A step is over. Exact slots stay as they are."""

    def compress(self, how):
        """A cache with one slot per core block, as `how` says, in place of this one, whose outer slots it takes over."""
        return self if how == "full" else CompressedCache(self, how)


class CompressedCache(KVCache):
    """`first`, `last`, `mean`: one slot per core block in place of one per (step, block)  [GRT, decoding].

    A new token's step r writes its K_r, V_r in place, attends to {compressed past, itself}, and settle() then replaces
    the entry by the first / last / running mean of its steps: right whenever a token stops. One token per row and call."""

    def __init__(self, full, how):
        vars(self).update(vars(full))                         # same rows, places, lengths and outer slots
        self.core, self.fold = self.new_slots(self.cfg.n_core), FOLDS[how]
        for step, row in enumerate(block_table(self.cfg, self.depth)):
            for j, block in enumerate(row):
                self.core[block].copy_(self.fold(self.core[block], full.core[full.core_slot(step, j)], step))
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
        for slot, kept in zip(self.core, self.scratch):
            kept.copy_(self.fold(kept, slot[:, self.place_C], step))
            slot[:, self.place_C] = kept


# How a compressed slot takes up step r (from 0): what was kept, the new entry -> what is kept.
FOLDS = {
    "full": None,
    "first": lambda kept, new, step: kept if step else new,
    "last": lambda kept, new, step: new,
    "mean": lambda kept, new, step: torch.lerp(kept, new, 1 / (step + 1)),
}

# --------------------------------------------------------------------------------------------- 4 attention, MLP, block


def attend(q_BTHK, k_BTGK, v_BTGK, seat, dropout):
    """Attention of T queries: causal over what is here without a seat, else over what the seat lets them see."""
    if seat is None and flash_attn_func and q_BTHK.is_cuda and q_BTHK.dtype.itemsize == 2:
        return flash_attn_func(q_BTHK, k_BTGK, v_BTGK, dropout_p=dropout, causal=True)
    k_BSGK, v_BSGK = (k_BTGK, v_BTGK) if seat is None else seat.exchange(k_BTGK, v_BTGK)
    mask_B1TS = None if seat is None else seat.mask_B1TS
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, dropout_p=dropout,
                                            is_causal=seat is None, enable_gqa=q_BHTK.size(1) != k_BGSK.size(1))
    return y_BHTK.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention; n_kv_head < n_head is grouped-query attention."""

    def __init__(self, cfg):
        super().__init__()
        D, K = cfg.n_embd, cfg.head_width
        self.query = nn.Linear(D, D, bias=cfg.bias)
        self.key = nn.Linear(D, cfg.kv_heads * K, bias=cfg.bias)
        self.value = nn.Linear(D, cfg.kv_heads * K, bias=cfg.bias)
        self.output = nn.Linear(D, D, bias=cfg.bias)
        self.head_width, self.dropout = K, cfg.dropout

    def forward(self, x_BTD, cos, sin, seat):
        B, T, D = x_BTD.shape
        q_BTHK = rotate(self.query(x_BTD).view(B, T, -1, self.head_width), cos, sin)
        k_BTGK = rotate(self.key(x_BTD).view(B, T, -1, self.head_width), cos, sin)
        v_BTGK = self.value(x_BTD).view(B, T, -1, self.head_width)
        y_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, seat, self.dropout if self.training else 0.0)
        return self.output(y_BTHK.reshape(B, T, D))


class GeluMLP(nn.Module):
    """down(gelu(up(x))), exact GELU  [GPT-2; its release has the tanh form]."""

    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, cfg.ffn_width, bias=cfg.bias)
        self.down = nn.Linear(cfg.ffn_width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x_BTD):
        return self.down(F.gelu(self.up(x_BTD)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))  [Llama]."""

    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.ffn_width, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.ffn_width, bias=False)
        self.down = nn.Linear(cfg.ffn_width, cfg.n_embd, bias=False)

    def forward(self, x_BTD):
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


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

    cos, sin: rotary tables or None; seat: where K and V go, None = causal over what is here."""

    def __init__(self, cfg):
        super().__init__()
        self.attention_norm, self.attention = make_norm(cfg), Attention(cfg)
        self.mlp_norm, self.mlp = make_norm(cfg), KINDS[cfg.block].mlp(cfg)
        self.dropout = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()

    def forward(self, x_BTD, cos=None, sin=None, seat=None):
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos, sin, seat))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


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

# Slot of the core's K and V at (step, j); asked for (depth, 0) it is the number of slots.
SLOTS = {"own": lambda cfg, step, j: step * cfg.n_core + j}

ROUTERS = ("none",)


def block_table(cfg, depth=None):
    """The plan as steps x blocks: row r lists the core blocks that step r runs."""
    rule = cfg.sharing_rule.block
    return [[rule(step, j, cfg) for j in range(cfg.n_core)] for step in range(cfg.n_recur if depth is None else depth)]


# ------------------------------------------------------------------------------------------------------- 7 state updates
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


PROJ_INITS = ("normal", "identity")


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
DEPTHS = {
    "fixed": lambda cfg, rng: cfg.n_recur,
    "uniform": lambda cfg, rng: int(torch.randint(cfg.min_depth, cfg.n_recur + 1, (), generator=rng)),
}


class Silence:
    """Evaluation, and models without noise."""

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

    def on_state(self, h_BTD, step):
        """h + eps_x, redrawn at every step; the gate and the write see h without it."""
        return self.draw(h_BTD, h_BTD.shape, self.state_std, "state", step).add_(h_BTD) if self.state_std else h_BTD

    def on_gate(self, h_BTD, step):
        """eps_g, one draw per token, the same for all its features."""
        return self.draw(h_BTD, (*h_BTD.shape[:2], 1), self.gate_std, "gate", step)


# --------------------------------------------------------------------------------------------------- 9 Recursion and GPT


class Who(NamedTuple):
    """The tokens that go through the next step: their original positions and what attention needs of them."""
    position_BT: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None


class Recursion(nn.Module):
    """The loop. A module of its own, so that whoever shards weights can gather the core once for all steps."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.block_at = cfg, cfg.sharing_rule.block
        self.core = nn.ModuleList(Block(cfg) for _ in range(cfg.n_core))
        self.update = UPDATES[cfg.update](cfg)

    def forward(self, h_BTD, e_BTD, who, depth, noise, cache):
        anchor = self.update.anchor(e_BTD)
        for step in range(depth):
            h_BTD, who = self.step(h_BTD, anchor, who, step, noise, cache)
        return h_BTD, who

    def step(self, h_BTD, anchor, who, step, noise, cache):
        """One pass of the core: read -> core -> write."""
        x_BTD = self.update.read(noise.on_state(h_BTD, step), anchor)
        for j in range(len(self.core)):
            x_BTD = self.core[self.block_at(step, j, self.cfg)](x_BTD, who.cos, who.sin, cache.core_seat(step, j))
        cache.settle(step)
        return self.update.write(h_BTD, x_BTD, anchor, noise.on_gate(h_BTD, step)), who


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy, summed over the targets that count, a few tokens at a time. The gradient of a sum is known
    as soon as its logits are, so it is made on the spot and nothing is computed twice; backward only scales it."""

    @staticmethod
    def forward(ctx, x_ND, table_VD, target_N, learn):
        N, V = len(x_ND), len(table_VD)
        sums, n = [], max(256, 2**20 // V, N // 16)                      # tokens at a time
        ctx.grads = dx_ND, dtable_VD = [torch.zeros_like(w) if learn else w for w in (x_ND, table_VD)]
        low = F.linear(x_ND[:1], table_VD[:1]).dtype                     # of a matrix product: autocast's where it is on
        x_ND, table_VD, store_nV = x_ND.to(low), table_VD.to(low), x_ND.new_empty(min(n, N), V, dtype=low)
        for x_nD, dx_nD, target_n in zip(x_ND.split(n), dx_ND.split(n), target_N.split(n)):
            counts_n1 = (target_n != -100)[:, None]
            index_n1 = target_n[:, None].where(counts_n1, 0)
            z_nV = at_least_fp32(torch.mm(x_nD, table_VD.T, out=store_nV[: len(x_nD)]))
            z_nV -= z_nV.amax(-1, keepdim=True)
            z_n1 = z_nV.gather(1, index_n1)
            sum_n1 = z_nV.exp_().sum(-1, keepdim=True)
            sums.append(((sum_n1.log() - z_n1) * counts_n1).sum())
            if learn:          # d CE / dz = softmax - one-hot = (exp z - sum one-hot) / sum, divided where it is narrow
                d_nV, share_n1 = z_nV.scatter_add_(1, index_n1, -sum_n1).to(low), counts_n1 / sum_n1
                dx_nD.copy_(d_nV @ table_VD).mul_(share_n1)
                x_nD = (x_nD * share_n1).to(low)
                dtable_VD.addmm_(d_nV.T, x_nD) if low == dtable_VD.dtype else dtable_VD.add_(d_nV.T @ x_nD)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx, scale):
        if ctx.grads is None:
            raise RuntimeError("a fused loss can be differentiated once; use fused_loss=False for more")
        grads, ctx.grads = ctx.grads, None                               # handed over, not kept alive
        return *(grad.mul_(scale) for grad in grads), None, None


def cross_entropy(x_BTD, table_VD, logits_BTV, targets_BT):
    """Mean over the targets that count (-100 does not); 0 when none does. float32 or better. logits: None = chunked."""
    target_N = targets_BT.flatten()
    if logits_BTV is None:
        total = ChunkedCrossEntropy.apply(x_BTD.flatten(0, 1), table_VD, target_N, torch.is_grad_enabled())
    else:
        total = F.cross_entropy(at_least_fp32(logits_BTV).flatten(0, 1), target_N, ignore_index=-100, reduction="sum")
    return total / (target_N != -100).sum().clamp(min=1)


# From the last features, the head's table, logits (or None) and targets: the named terms whose sum training minimises.
LOSSES = {"last": lambda *where: {"ce": cross_entropy(*where)}}


class Output(NamedTuple):
    """What a call gives back."""
    logits: torch.Tensor | None          # (B, T, V); None: targets given and cfg.fused_loss
    loss: torch.Tensor | None            # training: the sum of `losses`; evaluation: losses["ce"]; None without targets
    losses: dict                         # named terms; "ce" is the plain cross-entropy, in nats per token
    depth_BT: torch.Tensor               # how many steps each token took


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
        self.norm = make_norm(cfg)
        self.init_weights()

    # ---- the three verbs (step is Recursion's)

    def start(self, ids_BT, cache, n_new_B=None):
        """Embed and run the prelude. Returns the state h, the anchor e (equal at first) and who goes on."""
        position_BT = cache.open(*ids_BT.shape, n_new_B, ids_BT.device)
        who = Who(position_BT, *self.positions.tables(position_BT))
        h_BTD = self.dropout(self.positions.add(self.embed(ids_BT), position_BT))
        for i, block in enumerate(self.prelude):
            h_BTD = block(h_BTD, who.cos, who.sin, cache.seat(i))
        return h_BTD, h_BTD, who

    def finish(self, h_BTD, who, cache, pick=slice(None)):
        """Coda and norm: the features that the head reads. pick: an index into (B, T) for the tokens that are wanted."""
        for i, block in enumerate(self.coda):
            h_BTD = block(h_BTD, who.cos, who.sin, cache.seat(len(self.prelude) + i))
        return self.norm(h_BTD[pick])

    def head(self, x_BTD):
        """Logits; the weights are the token table (tied)."""
        return F.linear(x_BTD, self.embed.weight)

    # ---- public calls

    def forward(self, ids_BT, targets_BT=None, depth=None, routing=None, seed=None):
        """ids (B, T) integers -> Output. targets: the token after each position, -100 where it does not count.

        depth: steps to run, 0 = coda on the prelude's output; None = sampled in training, n_recur in evaluation.
        routing: None, "topk" or "causal"; matters only to expert-choice routers. seed: training only, a pair of ints
        (shared, own): depth comes from shared, noise from own; None = both from torch's global generator, as dropout.
        Raises ValueError on more than block_size tokens, none at all, or a depth that this model cannot run."""
        if not 0 < ids_BT.size(1) <= self.cfg.block_size:
            raise ValueError(f"{ids_BT.size(1)} tokens given; this model takes 1 to block_size={self.cfg.block_size}")
        if routing not in (None, "topk", "causal"):
            raise ValueError(f"routing={routing!r} is not one of None, 'topk', 'causal'")
        cache, noise = NoCache(), Silence()
        if self.training:
            shared, own = torch.randint(2**62, (2,)).tolist() if seed is None else seed
            depth = DEPTHS[self.cfg.depth_sampling](self.cfg, generator(shared)) if depth is None else depth
            noise = Noise(self.cfg, own) if self.cfg.state_noise or self.cfg.gate_noise else Silence()
        depth = self.check_depth(depth)
        h_BTD, e_BTD, who = self.start(ids_BT, cache)
        h_BTD, who = self.recursion(h_BTD, e_BTD, who, depth, noise, cache)
        x_BTD = self.finish(h_BTD, who, cache)
        logits_BTV = None if self.cfg.fused_loss and targets_BT is not None else self.head(x_BTD)
        loss, losses = None, {}
        if targets_BT is not None:
            losses = LOSSES[self.cfg.loss](x_BTD, self.embed.weight, logits_BTV, targets_BT)
            loss = sum(losses.values()) if self.training else losses["ce"]
        return Output(logits_BTV, loss, losses, torch.full_like(ids_BT, depth))

    @torch.inference_mode()
    def feed(self, ids_BT, cache, depth=None, n_new_B=None, every=False):
        """Decode: take up the next tokens of each row with a cache (room 3), which remembers them.

        ids (B, T), the first n_new_B[b] of row b real and the rest padding (None: all real). depth: None = the cache's.
        Returns logits after each row's last real token, (B, 1, V); with every=True after all T, (B, T, V)."""
        depth = self.check_depth(cache.depth if depth is None else depth)
        if cache.depth not in (None, depth):
            raise ValueError(f"depth={depth}, but the cache was made for depth {cache.depth}; make another one")
        pick = slice(None)
        if not every and ids_BT.size(1) > 1:
            last_B = [n - 1 for n in n_new_B or [ids_BT.size(1)] * ids_BT.size(0)]
            pick = (torch.arange(len(last_B), device=ids_BT.device)[:, None], torch.tensor(last_B, device=ids_BT.device)[:, None])
        h_BTD, e_BTD, who = self.start(ids_BT, cache, n_new_B)
        h_BTD, who = self.recursion(h_BTD, e_BTD, who, depth, Silence(), cache)
        return self.head(self.finish(h_BTD, who, cache, pick))

    def check_depth(self, depth):
        """`depth` as an int this model can run (None: n_recur), or ValueError."""
        if depth is None:
            return self.cfg.n_recur
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth={depth!r} is not a number of steps; give an integer from 0 up")
        if depth != self.cfg.n_recur and not self.cfg.any_depth:
            raise ValueError(f"depth={depth} cannot be run: with sharing={self.cfg.sharing!r} the depth is always "
                             f"n_recur={self.cfg.n_recur}")
        return depth

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
        if self.cfg.block == "gpt2":
            for block in self.blocks():
                for linear in (block.attention.output, block.mlp.down):
                    nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.cfg.executed_blocks()))
        update = self.recursion.update
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
        for name, value in (("threshold", threshold), ("exit", exit), ("exit_threshold", exit_threshold)):
            if value is not None:
                raise ValueError(f"{name}={value} given, but this model has no {'router' if name == 'threshold' else 'exit rule'}")
        if isinstance(ids_BT, torch.Tensor) and ids_BT.dim() != 2:
            raise ValueError(f"ids of shape {tuple(ids_BT.shape)} given; generate takes (B, T) or a list of 1-D tensors")
        prompts = list(ids_BT)
        device = prompts[0].device if prompts else self.embed.weight.device
        rows, done = [p.tolist() for p in prompts], [False] * len(prompts)
        for next_B in stream(self, rows, max_new_tokens, temperature, top_k, top_p, depth, cache, use_cache, generator):
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


def sample(logits_BV, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Next token of each row, a list of ints. top_k keeps the k likeliest; top_p then the smallest set that holds p."""
    logits_BV = at_least_fp32(logits_BV)
    if not torch.isfinite(logits_BV).all():
        raise ValueError("the logits are not finite: the weights are damaged or training diverged")
    if temperature < 1e-6:
        return logits_BV.argmax(-1).tolist()
    p_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k or top_p is not None:
        sorted_BV, index_BV = p_BV.sort(dim=-1, descending=True, stable=True)
        sorted_BV[:, top_k or sorted_BV.size(-1):] = 0
        likelier_BV = sorted_BV.cumsum(-1) - sorted_BV                # mass of the tokens before each one
        kept_BV = sorted_BV * (likelier_BV < (top_p or 1) * sorted_BV.sum(-1, keepdim=True))
        p_BV = torch.zeros_like(p_BV).scatter(-1, index_BV, kept_BV)
    return torch.multinomial(p_BV, 1, generator=generator).squeeze(-1).tolist()


@torch.inference_mode()
def stream(model, rows, max_new_tokens, temperature=1.0, top_k=None, top_p=None, depth=None, cache="full", use_cache=True,
           generator=None):
    """Yield the next token of every row (a list of ints), max_new_tokens times. rows: lists of token ids, any lengths.

    In evaluation mode while it runs. With use_cache=False every token reads its whole context again."""
    check_sampling(temperature, top_k, top_p)
    model.cfg.check_cache(cache)
    depth, device, was_training = model.check_depth(depth), model.embed.weight.device, model.training
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    if not rows or not all(rows):
        raise ValueError("an empty prompt has nothing to continue; begin with one token, for example end-of-text")
    context, store = [list(row) for row in rows], None
    try:
        model.eval()
        for i in range(max_new_tokens):
            if max(map(len, context)) > model.cfg.block_size:
                context, store = [keep_newer_half(row, model.cfg.block_size) for row in context], None
            fresh = store is None
            fed = context if fresh else [row[-1:] for row in context]
            if fresh:
                n_places = min(model.cfg.block_size, max(map(len, context)) + max_new_tokens - i - 1)
                store = make_cache(model, len(rows), n_places, depth) if use_cache else NoCache()
            ids_BT = torch.tensor([row + [0] * (max(map(len, fed)) - len(row)) for row in fed], device=device)
            logits_BV = model.feed(ids_BT, store, depth, [len(row) for row in fed])[:, 0]
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
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.embed.weight.dtype


def make_cache(model, n_rows, n_places, depth=None):
    """An empty exact cache for `n_rows` rows of `n_places` tokens, on the weights' device and of the keys' dtype."""
    return KVCache(model.cfg, n_rows, n_places, model.check_depth(depth), cache_dtype(model), model.embed.weight.device)


def count_params(cfg, embeddings=True):
    with torch.device("meta"):
        model = GPT(cfg)
    tables = [model.embed, model.positions]
    left_out = 0 if embeddings else sum(p.numel() for table in tables for p in table.parameters())
    return sum(p.numel() for p in model.parameters()) - left_out


def block_flops(cfg, keys):
    """FLOPs per token of one block whose queries see `keys` keys: 2 per weight, 4 D per key (scores and sum)."""
    D, kv = cfg.n_embd, cfg.kv_heads * cfg.head_width
    return 2 * (2 * D * D + 2 * D * kv + KINDS[cfg.block].matrices * D * cfg.ffn_width) + 4 * D * keys


def exact_flops(cfg, seq_len, depth):
    once, per_step = UPDATES[cfg.update].flops(cfg)
    head = 2 * cfg.vocab_size * cfg.n_embd
    return cfg.executed_blocks(depth) * block_flops(cfg, seq_len / 2) + once + depth * per_step + head


def grt_flops(cfg, seq_len, depth):
    # (n_prelude + n_core R + n_coda)(24 d^2 + 4 S d) + R 10 d^2, 24 d^2 being GPT-2's widths             [GRT, FLOPs per token]
    return cfg.executed_blocks(depth) * block_flops(cfg, seq_len) + depth * sum(UPDATES[cfg.update].flops(cfg))


def paper_flops(cfg, seq_len, depth):
    # F = 2 k (2 d^2 + 2 d d_kv + 3 d ffn) + 2 k m d per layer, d_kv = d, k = m = S here                          [MoR, FLOPs]
    return cfg.executed_blocks(depth) * block_flops(replace(cfg, n_kv_head=None), seq_len / 2)


FLOPS = {"exact": exact_flops, "paper": paper_flops, "grt": grt_flops}


def count_kv_bytes(cfg, seq_len, batch_size, dtype, cache="full", depth=None):
    cfg.check_cache(cache)
    depth = cfg.n_recur if depth is None else depth
    core = SLOTS[cfg.kv](cfg, depth, 0) if cache == "full" else cfg.n_core
    scratch = cfg.n_core if cache in ("first", "mean") else 0
    entries = (cfg.n_prelude + cfg.n_coda + core) * seq_len + scratch
    return 2 * batch_size * entries * cfg.kv_heads * cfg.head_width * dtype.itemsize


# --------------------------------------------------------------------------------------------------- 11 optimizer groups


def param_groups(model, weight_decay):
    """AdamW's groups: matrices and tables decay; norms and biases (fewer than two axes) do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]


# ------------------------------------------------------------------------------------------------- python model.py [CONFIG]


def describe(cfg):
    """The page that `python model.py` prints: plan, counts and one forward with its shapes (on the meta device)."""
    R, S = cfg.n_recur, cfg.block_size
    lines = [f"layout {cfg.layout}: {cfg.n_prelude} prelude + {cfg.n_core} core x {R} steps + {cfg.n_coda} coda; "
             f"block={cfg.block} sharing={cfg.sharing_name} update={cfg.update}", "", "depth plan (core block @ K/V slot)"]
    for step, row in enumerate(block_table(cfg)):
        if step < 3 or step == R - 1:
            cells = [f"{block:>3}@{SLOTS[cfg.kv](cfg, step, j):<4}" for j, block in enumerate(row)]
            lines.append(f"  step {step}: " + " ".join(cells[:12]) + (" ..." if len(cells) > 12 else ""))
        elif step == 3:
            lines.append("  ...")
    full, bare = cfg.n_params(), cfg.n_params(embeddings=False)
    lines += ["", f"parameters  {full:,} unique ({bare:,} without token and position tables), vocabulary {cfg.vocab_size:,}",
              f"executed    {cfg.executed_blocks()} blocks from {cfg.n_prelude + cfg.n_core + cfg.n_coda} sets of weights"]
    flops = [f"depth {d}: {cfg.flops_per_token(S, depth=d) / 1e6:,.1f}" for d in sorted({0, 1, R}) if cfg.any_depth or d == R]
    lines.append(f"MFLOP/token {'   '.join(flops)}   (forward, context {S}, exact)")
    caches = [c for c in FOLDS if c == "full" or cfg.compressible and R > 1]
    sizes = [f"{c}: {cfg.kv_bytes(S, 1, torch.bfloat16, c) / 2**20:,.1f}" for c in caches]
    lines += [f"cache MiB   {'   '.join(sizes)}   (one row of {S} tokens, bfloat16)", "", "one forward, 2 rows of 8 tokens"]
    with torch.device("meta"):
        model, ids_BT = GPT(cfg).eval(), torch.zeros(2, min(8, S), dtype=torch.long)
        shapes = []

        def hook(name):
            return lambda module, args, out: shapes.append((name, tuple(out.shape)))

        model.embed.register_forward_hook(hook("embed"))
        for name in ("prelude", "recursion.core", "coda"):
            for i, block in enumerate(model.get_submodule(name)):
                block.register_forward_hook(hook(f"{name}.{i}"))
        shapes.append(("logits_BTV", tuple(model(ids_BT).logits.shape)))
    runs = []                                       # equal neighbours on one line: name ... name (shape)
    for name, shape in [("ids_BT", tuple(ids_BT.shape))] + shapes:
        if runs and runs[-1][2] == shape:
            runs[-1][1], runs[-1][3] = name, runs[-1][3] + 1
        else:
            runs.append([name, name, shape, 1])
    lines += [f"  {first if n == 1 else f'{first} ... {last} ({n} calls)':<48}{shape}" for first, last, shape, n in runs]
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
