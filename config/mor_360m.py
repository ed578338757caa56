"""MoR-3 at SmolLM-360M's shape, 1+10x3+1: a router before each step chooses who takes it, of those who took the last  [MoR, isoFLOP].

Meant for one 80 GB GPU for two or three days.
Data: python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=31e9   (62 GB on disk)
GPT-2's vocabulary has 50,257 tokens and SmolLM's 49,152: table and head grow by 2.3%, and a loss per token is one of other tokens, to be
compared with the other configs here and not with the paper's.

The paper's other rows are flags of this file; give each an --out_dir. At equal training FLOPs, steps as released:
    MoR-2                                       --n_core=15 --n_recur=2 --max_iters=12619
    MoR-4, 34 blocks                            --n_core=8 --n_recur=4 --max_iters=14216
    MoR-3, K and V of step 0 shared             --kv=share --max_iters=14672
    MoR-3, token-choice                         --router=token
At equal tokens, those of Vanilla:
    MoR-2                                       --n_core=15 --n_recur=2 --max_iters=9438
    MoR-3                                       --max_iters=9438
    MoR-4, 34 blocks                            --n_core=8 --n_recur=4 --max_iters=9438
Other choices (its ablations follow a cosine: add --schedule=cosine, and --max_iters=4768 for ten billion tokens):
    K alone shared                              --kv=share_k
    V alone shared                              --kv=share_v
    router with a hidden layer of 2 D           --router_kind=mlp
    router with a hidden layer of 4 D           --router_kind=mlp --router_width=3840
    score by tanh                               --router_score=tanh
    score = logit                               --router_score=none
    no score: h + core(h)                       --router_score=add
    alpha 1 in place of 0.1                     --router_alpha=1
    no loss for the router                      --router_loss=0
    that loss as the paper prints it            --router_loss=0.001
    z-loss                                      --router_z_loss=1e-3
    auxiliary router, ten times the rate        --aux_router=True --aux_router_lr_scale=10
    capacities fall at first (length: ours)     --capacity_warmup_iters=1000
    tokens chosen by lot                        --router_choice=random
    token-choice: score by sigmoid              --router=token --router_score=sigmoid
    token-choice: hidden layer of 2 D           --router=token --router_kind=mlp
    token-choice: hidden layer of 4 D           --router=token --router_kind=mlp --router_width=3840
    token-choice: z-loss of the paper's caption --router=token --router_z_loss=1e-3
    token-choice: no z-loss                     --router=token --router_z_loss=0
    token-choice: weaker balancing loss         --router=token --router_loss=0.01
    token-choice: balanced by a bias, no loss   --router=token --router_balance=bias
"""
block = "llama"                         # RMSNorm, RoPE, SwiGLU, no biases, as in SmolLM
n_embd = 960                            # SmolLM-360M's width
n_head = 15                             # heads of 64
n_kv_head = 5                           # three query heads share their keys and values
n_ffn = 2560                            # 8/3 of the width
n_prelude = 1                           # the first block: its own weights, run once
n_core = 10                             # blocks that the steps share
n_recur = 3                             # 1+10x3+1 executes 32 blocks and owns 12
n_coda = 1                              # the last block: its own weights, run once
sharing = "middle_cycle"                # all of them in order, three times: 0..9, 0..9, 0..9
update = "replace"                      # h += score * core(h) for the chosen, its whole output; the others keep h  [MoR eq. 2.1]
router = "expert"                       # a step's router takes its top 3/3, 2/3, 1/3 of all tokens, from those of the last step  [MoR]
router_kind = "linear"                  # one vector per step; with expert: 0.1 sigmoid(logit), a loss of its own at 0.016  [MoR]
kv = "own"                              # a step attends to those who are in it, and keeps their K and V  [MoR, recursion-wise]
block_size = 2048                       # the paper's context  [MoR]
dataset = "fineweb-edu"                 # documents joined by end-of-text, packed  [MoR]
batch_size = 16                         # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 64        # 16 x 64 x 2048 = 2,097,152 tokens per step  [MoR: 1024 rows]
max_iters = 14161                       # 29.7 billion tokens, 16.5e18 FLOPs forward  [MoR, released]
schedule = "wsd"                        # warm-up, constant, then linear to 0 over the last fifth  [MoR]
learning_rate = 3e-3                    # [MoR]
warmup_iters = 86                       # [MoR, released runs]
weight_decay = 0.1                      # matrices and tables, not norms  [MoR]
grad_clip = 1.0                         # [MoR]
dropout = 0.0                           # [MoR]
eval_tokens = 2**20                     # 512 windows: rows of the published table differ by hundredths of a nat
