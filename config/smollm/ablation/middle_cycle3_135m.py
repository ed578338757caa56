"""Middle cycle at SmolLM-135M's shape, 1+9x3+1: nine blocks, all in order, three times, between two of their own  [MoR, sharing at 10B tokens].

29 blocks are executed where vanilla has 30: the rest does not divide by 3 and is dropped.
Meant for one 80 GB GPU for half a day.
Data: python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=11e9   (22 GB on disk)
GPT-2's vocabulary has 50,257 tokens and SmolLM's 49,152: table and head grow by 2.3%, and a loss per token is one of other tokens, to be
compared with the other configs here and not with the paper's.
"""
block = "llama"                         # RMSNorm, RoPE, SwiGLU, no biases, as in SmolLM
n_embd = 576                            # SmolLM-135M's width
n_head = 9                              # heads of 64
n_kv_head = 3                           # three query heads share their keys and values
n_ffn = 1536                            # 8/3 of the width
n_prelude = 1                           # the first block: its own weights, run once
n_core = 9                              # blocks that the steps share
n_recur = 3                             # 1+9x3+1 executes 29 blocks and owns 11
n_coda = 1                              # the last block: its own weights, run once
sharing = "middle_cycle"                # all of them in order, three times: 0..8, 0..8, 0..8
update = "replace"                      # h = core(h): no anchor, no gate; every token takes every step
block_size = 2048                       # the paper's context  [MoR]
dataset = "fineweb-edu"                 # documents joined by end-of-text, packed  [MoR]
batch_size = 16                         # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 64        # 16 x 64 x 2048 = 2,097,152 tokens per step  [MoR: 1024 rows]
max_iters = 4768                        # 10.00 billion tokens  [MoR: 10B]
learning_rate = 3e-3                    # cosine to a tenth of it (min_lr follows)  [MoR: all but the isoFLOP runs]
warmup_iters = 57                       # that of the released 360M runs; not published for these  [ours]
weight_decay = 0.1                      # matrices and tables, not norms  [MoR]
grad_clip = 1.0                         # [MoR]
dropout = 0.0                           # [MoR]
eval_tokens = 2**20                     # 512 windows: rows of the published table differ by hundredths of a nat
