"""The model again, slowly: one sequence, one token at a time, plain loops and dicts. What model.py computes, this says.

    sequence = Sequence(cfg, model.state_dict())
    logits = [sequence.token(id) for id in prompt]          # one vector (vocab_size,) per token
    sequence.compress("mean")                               # from here on one K/V per core block (decoding only)
    logits += [sequence.token(id) for id in more]

Nothing is shared with model.py: weights are read by name, and torch serves for vectors alone. A token at position p
goes through all blocks before the next one comes in, so what it may attend to is simply what is in `memory` by then.
"""
import math

import torch


class Sequence:
    """One row of text. cfg: a GPTConfig. weights: a state dict. state_noise(step, position) is the vector eps_x added to
    what a step reads, gate_noise(step, position) the number eps_g added to the gate's logit, first_state(position) the vector
    that state_init="random" begins with: the draw is given, not made here. exit: kl or cdf, with its threshold."""

    def __init__(self, cfg, weights, depth=None, state_noise=None, gate_noise=None, first_state=None, exit=None, exit_threshold=None):
        self.cfg, self.weights = cfg, weights
        self.depth = cfg.n_recur if depth is None else depth
        self.state_noise = state_noise or (lambda step, position: 0.0)
        self.gate_noise = gate_noise or (lambda step, position: 0.0)
        self.first_state, self.exit, self.exit_threshold = first_state, exit, exit_threshold
        self.memory = {}            # place -> list of (k, v), one per token seen; k and v are lists of head vectors
        self.how = "full"           # the decode cache
        self.n_seen = 0
        self.all_taken = []         # steps that each token has taken
        self.at = None              # (step, j) inside the core

    # ---- one token from the bottom to the top

    def token(self, id):
        cfg, position = self.cfg, self.n_seen
        h = self.weights["embed.weight"][id]
        if cfg.block == "gpt2":
            h = h + self.weights["positions.table.weight"][position]
        for i in range(cfg.n_prelude):
            h = self.block(f"prelude.{i}", ("prelude", i), h, position)
        e = h                                                                    # the anchor
        if cfg.state_init == "random":
            h = self.first_state(position)
        entries = {}                                                             # this token's (k, v) by step and block
        self.taken = 0                                                           # steps that this token has taken
        self.logits, self.lambdas = [], []                                       # after each of them, where they are asked for
        for step in range(self.depth):
            if not self.goes_on(step, h, e, position):
                break
            x = self.read(h + self.state_noise(step, position), e)
            for j in range(cfg.n_core):
                x = self.core_block(step, j, x, position, entries)
            h = self.take_up(step, h, x, e, self.write(h, x, e, self.gate_noise(step, position)))
            if cfg.loop_norm:
                h = self.norm("recursion.norm", h)
            self.taken += 1
            if self.exit and self.leaves(self.features(h, position, step)):
                break
        if self.how != "full":
            for j in range(cfg.n_core):
                self.memory[j].append(fold([entries[step, j] for step in range(self.taken)], self.how))
        if self.exit:
            self.stay_behind()
        self.n_seen += 1
        self.all_taken.append(self.taken)
        return self.logits[-1] if self.logits else self.head(self.features(h, position, 0))

    def features(self, h, position, step):
        """What the head reads of a state. With early exit the coda runs after every step, each time in a place of its own."""
        for i in range(self.cfg.n_coda):
            h = self.block(f"coda.{i}", (f"coda after {step}", i), h, position)
        return h if self.cfg.loop_norm and not self.cfg.n_coda else self.norm("norm", h)

    def head(self, x):
        return self.weights["embed.weight"] @ x                                  # tied

    def core_block(self, step, j, x, position, entries):
        name, self.at = f"recursion.core.{self.which_block(step, j)}", (step, j)
        if self.how == "full":
            x = self.block(name, (step, j), x, position)
        else:    # Compressed: this step sees one entry per past token, and the token's own K and V of this very step.
            self.memory["now"] = list(self.memory[j])
            x = self.block(name, "now", x, position)
            entries[step, j] = self.memory["now"][-1]
        self.at = None
        return x

    def compress(self, how):
        """The prompt is in, exactly. From now on keep one entry per past token and core block in place of one per step."""
        self.how = how
        for j in range(self.cfg.n_core):
            steps = [self.memory.pop((step, j)) for step in range(self.depth)]
            self.memory[j] = [fold(entries[:taken], how) for *entries, taken in zip(*steps, self.all_taken)]

    # ---- the choices about the loop

    def which_block(self, step, j):
        """MoR's table: layers are counted through, and layer l uses block l mod b (cycle) or l // N (sequence)."""
        layer, b, N = step * self.cfg.n_core + j, self.cfg.n_core, self.cfg.n_recur
        return layer // N if "sequence" in (self.cfg.sharing or "cycle") else layer % b

    def read(self, h, e):
        if self.cfg.update == "replace":
            return h
        return self.linear("recursion.update.from_state", h) + self.linear("recursion.update.from_anchor", e)

    def write(self, h, y, e, noise):
        if self.cfg.update != "gate":
            return y
        name = "recursion.update.gate"
        both = torch.cat([self.norm(f"{name}.state_norm", h), self.norm(f"{name}.anchor_norm", e)])
        z = self.linear(f"{name}.down", silu(self.linear(f"{name}.up", self.norm(f"{name}.joint_norm", both))))
        g = torch.sigmoid(z / self.cfg.gate_temperature + noise)
        return g * h + (1 - g) * y

    # ---- routers, outside training: a token decides for itself, once it is there

    def goes_on(self, step, h, e, position):
        """Whether this token takes the next step; once out it stays out."""
        cfg = self.cfg
        if cfg.router == "expert":
            shares = cfg.capacity or [(cfg.n_recur - r) / cfg.n_recur for r in range(cfg.n_recur)]
            decides = self.logit = self.router(f"recursion.router.units.{step}", h)[0]
            if shares[step] >= 1:
                return True
            if cfg.aux_router:
                decides = self.router(f"recursion.router.aux_units.{step}", h)[0]
            if cfg.router_choice == "random":
                x = math.sin(position * 12.9898 + step * 78.233) * 43758.5453
                decides = torch.tensor(shares[step] / (shares[step - 1] if step else 1.0) - (x - math.floor(x)))
            return torch.sigmoid(decides) >= (cfg.threshold if cfg.router_choice == "score" else 0.5)
        if cfg.router == "token":
            if step == 0:
                logits = self.router("recursion.router.unit", e)
                p = logits.softmax(0) if cfg.router_score in (None, "softmax") else torch.sigmoid(logits)
                best = int((p + self.weights.get("recursion.router.bias_R", 0.0)).argmax())
                self.chosen, self.p = best + 1, p[best] * (1.0 if cfg.router_alpha is None else cfg.router_alpha)
            return step < self.chosen
        return True

    def take_up(self, step, h, y, e, written):
        """The state after a step: y is the core's output, written what the update alone would leave."""
        cfg = self.cfg
        if cfg.router == "expert":
            score = {None: torch.sigmoid, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda z: z, "add": lambda z: 1.0}[cfg.router_score](self.logit)
            alpha = cfg.router_alpha if cfg.router_alpha is not None else 1.0 if cfg.update == "gate" or cfg.router_score == "add" else 0.1
            return h + alpha * score * (written - h) if cfg.update == "gate" else h + alpha * score * y
        if cfg.router == "token":
            return e + self.p * y if step + 1 == min(self.chosen, self.depth) else y
        return written

    def router(self, name, h):
        x = self.linear(f"{name}.layers.0", h)
        return x if self.cfg.router_kind == "linear" else self.linear(f"{name}.layers.1", x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))

    # ---- early exit, outside training: after every step a token asks itself whether it may leave

    def leaves(self, x):
        """x: the features after a step. Notes what is predicted from them."""
        self.logits.append(self.head(x))
        if self.exit == "cdf":
            self.lambdas.append(torch.sigmoid(self.weights["exit_gate.weight"][0] @ x + self.weights["exit_gate.bias"][0]))
            stay = math.prod(1 - float(chance) for chance in self.lambdas)
            return 1 - stay >= self.exit_threshold
        if len(self.logits) == 1:
            return False                                                         # there is nothing to compare with
        before, now = (logits.log_softmax(0) for logits in self.logits[-2:])
        return (now.exp() * (now - before)).sum() < self.exit_threshold

    def stay_behind(self):
        """Later tokens see this one at the steps that it did not take: as it was at its last (routed: in the coda alone)."""
        for step in range(self.taken, self.depth):
            for i in range(self.cfg.n_coda):
                self.memory.setdefault((f"coda after {step}", i), []).append(self.memory[f"coda after {self.taken - 1}", i][-1])
            if self.how == "full" and self.cfg.router == "none" and self.cfg.kv != "share":
                for j in range(self.cfg.n_core):
                    self.memory.setdefault((step, j), []).append(self.memory[self.taken - 1, j][-1])

    # ---- the parts of a transformer

    def block(self, name, place, x, position):
        after = self.norm if self.cfg.sandwich_norm else lambda name, x: x       # a norm of each residual sum, too
        x = after(f"{name}.attention_after", x + self.attention(f"{name}.attention", place, self.norm(f"{name}.attention_norm", x), position))
        return after(f"{name}.mlp_after", x + self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", x)))

    def attention(self, name, place, x, position):
        H, G = self.cfg.n_head, self.cfg.n_kv_head or self.cfg.n_head
        K = self.cfg.n_embd // H
        q, k, v = (self.linear(f"{name}.{part}", x).split(K) for part in ("query", "key", "value"))
        if self.cfg.block == "llama":
            q, k = ([rotate(head, position, self.cfg.rope_theta) for head in heads] for heads in (q, k))
        shares = self.cfg.kv == "share" and isinstance(place[0], int) and place[0] > 0
        memory = self.memory.setdefault((0, place[1]) if shares else place, [])
        if self.cfg.kv in ("share_k", "share_v") and isinstance(place[0], int) and place[0] > 0:
            first_k, first_v = self.memory[0, place[1]][-1]                      # what this token made at step 0
            k, v = (first_k, v) if self.cfg.kv == "share_k" else (k, first_v)
        if not shares:                                                           # kv=share: made at step 0, read at every step
            memory.append((k, v))
        y = []
        for head in range(H):
            shared = head // (H // G)                                            # which K/V head this query head reads
            scores = torch.stack([q[head] @ k[shared] for k, v in memory]) / math.sqrt(K)
            weights = scores.softmax(0)
            y.append(sum(weight * v[shared] for weight, (k, v) in zip(weights, memory)))
        return self.linear(f"{name}.output", torch.cat(y))

    def mlp(self, name, x):
        if self.cfg.block == "gpt2":
            up = self.linear(f"{name}.up", x)
            return self.linear(f"{name}.down", up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))          # GELU
        return self.linear(f"{name}.down", silu(self.linear(f"{name}.gate", x)) * self.linear(f"{name}.up", x))

    def norm(self, name, x):
        if self.cfg.block == "gpt2":
            x = x - x.mean()
        x = x / torch.sqrt((x * x).mean() + self.cfg.norm_eps) * self.weights[f"{name}.weight"]
        return x + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, name, x):
        y = self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)
        return y + self.low_rank(name.split(".")[-1], x) if self.at and self.cfg.lora_rank else y

    def low_rank(self, part, x):
        """B A x of this step, core position and linear. Query, key and value read one A and have their own rows of one B."""
        step, j = self.at
        name = "qkv" if part in ("query", "key", "value") else part
        A, B = (self.weights[f"recursion.lora.{which}.{j}.{name}"][step] for which in ("down", "up"))
        y, D = B @ (A @ x), self.cfg.n_embd
        kv = (len(y) - D) // 2
        return {"query": y[:D], "key": y[D: D + kv], "value": y[D + kv:]}[part] if name == "qkv" else y


def exit_chances(lambdas):
    """p_t: leave after step t, having stayed before. The last step takes whoever is left."""
    chances, left = [], 1.0
    for chance in lambdas[:-1]:
        chances.append(left * chance)
        left = left * (1 - chance)
    return chances + [left]


def expected_loss(lambdas, cross_entropies, beta):
    """loss="every" of one token: sum_t p_t CE_t - beta H(p)."""
    chances = exit_chances(lambdas)
    entropy = -sum(p * math.log(p) for p in chances if p > 0)
    return sum(p * ce for p, ce in zip(chances, cross_entropies)) - beta * entropy


def silu(x):
    return x * torch.sigmoid(x)


def rotate(head, position, theta):
    """RoPE: the pair (i, i + half) turns by position x theta^(-i / half)."""
    half = len(head) // 2
    turned = list(head)
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = head[i], head[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(turned)


def fold(entries, how):
    """One (k, v) in place of those of steps 1..R: the first, the last or their mean."""
    if how == "mean":
        n_heads, R = len(entries[0][0]), len(entries)
        return tuple([sum(entry[kv][head] for entry in entries) / R for head in range(n_heads)] for kv in (0, 1))
    return {"first": entries[0], "last": entries[-1]}[how]
