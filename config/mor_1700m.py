"""MoR-3 at SmolLM-1.7B's shape, 1+8x3+1: a router before each step chooses who takes it, of those who took the last  [MoR, isoFLOP].

26 blocks are executed where vanilla has 24: the 22 between first and last do not divide by 3 and are rounded up.
Meant for one 80 GB GPU for two or three days.
Data: python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=7e9   (14 GB on disk)
GPT-2's vocabulary has 50,257 tokens and SmolLM's 49,152: table and head grow by 2.3%, and a loss per token is one of other tokens, to be
compared with the other configs here and not with the paper's.

At equal training FLOPs, as flags; give each an --out_dir. Token-choice, shared K and V and the ablations: the flags in config/mor_360m.py.
    MoR-2, 24 blocks                            --n_core=11 --n_recur=2 --max_iters=3009
"""
block = "llama"                         # RMSNorm, RoPE, SwiGLU, no biases, as in SmolLM
n_embd = 2048                           # SmolLM-1.7B's width
n_head = 32                             # heads of 64
n_kv_head = 32                          # every query head has its own keys and values
n_ffn = 8192                            # four times the width
n_prelude = 1                           # the first block: its own weights, run once
n_core = 8                              # blocks that the steps share
n_recur = 3                             # 1+8x3+1 executes 26 blocks and owns 10
n_coda = 1                              # the last block: its own weights, run once
sharing = "middle_cycle"                # all of them in order, three times: 0..7, 0..7, 0..7
update = "replace"                      # h += score * core(h) for the chosen, its whole output; the others keep h  [MoR eq. 2.1]
router = "expert"                       # a step's router takes its top 3/3, 2/3, 1/3 of all tokens, from those of the last step  [MoR]
router_kind = "linear"                  # one vector per step; with expert: 0.1 sigmoid(logit), a loss of its own at 0.016  [MoR]
kv = "own"                              # a step attends to those who are in it, and keeps their K and V  [MoR, recursion-wise]
block_size = 2048                       # the paper's context  [MoR]
dataset = "fineweb-edu"                 # documents joined by end-of-text, packed  [MoR]
batch_size = 4                          # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 256       # 4 x 256 x 2048 = 2,097,152 tokens per step  [MoR: 1024 rows]
max_iters = 3101                        # 6.5 billion tokens, 16.5e18 FLOPs forward  [MoR, by its formula]
schedule = "wsd"                        # warm-up, constant, then linear to 0 over the last fifth  [MoR]
learning_rate = 3e-3                    # [MoR]
warmup_iters = 86                       # that of the released 360M runs  [MoR]
weight_decay = 0.1                      # matrices and tables, not norms  [MoR]
grad_clip = 1.0                         # [MoR]
dropout = 0.0                           # [MoR]
eval_tokens = 2**20                     # 512 windows: rows of the published table differ by hundredths of a nat
