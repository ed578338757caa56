"""Vanilla at SmolLM-1.7B's shape, 0+24x1+0: the dense model beside recursive2 and 3, with the same recipe  [MoR, isoFLOP].

There is no recursive4_1700m: none was published, and the 22 blocks between first and last do not divide by 4.
Meant for one 80 GB GPU for two or three days.
Data: python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=6e9   (12 GB on disk)
GPT-2's vocabulary has 50,257 tokens and SmolLM's 49,152: table and head grow by 2.3%, and a loss per token is one of other tokens, to be
compared with the other configs here and not with the paper's.
"""
block = "llama"                         # RMSNorm, RoPE, SwiGLU, no biases, as in SmolLM
n_embd = 2048                           # SmolLM-1.7B's width
n_head = 32                             # heads of 64
n_kv_head = 32                          # every query head has its own keys and values
n_ffn = 8192                            # four times the width
n_core = 24                             # blocks, each with its own weights
n_recur = 1                             # no loop
block_size = 2048                       # the paper's context  [MoR]
dataset = "fineweb-edu"                 # documents joined by end-of-text, packed  [MoR]
batch_size = 4                          # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 256       # 4 x 256 x 2048 = 2,097,152 tokens per step  [MoR: 1024 rows]
max_iters = 2299                        # 4.8 billion tokens, 16.5e18 FLOPs forward  [MoR, by its formula]
schedule = "wsd"                        # warm-up, constant, then linear to 0 over the last fifth  [MoR]
learning_rate = 3e-3                    # [MoR]
warmup_iters = 57                       # that of the released 360M runs  [MoR]
weight_decay = 0.1                      # matrices and tables, not norms  [MoR]
grad_clip = 1.0                         # [MoR]
dropout = 0.0                           # [MoR]
eval_tokens = 2**20                     # 512 windows: rows of the published table differ by hundredths of a nat
