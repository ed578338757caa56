"""Cycle at the 730M shape, 0+10x3+0: 30 blocks executed from 10, beside middle_cycle3_730m, which executes 26 from as many  [MoR, sharing].

Published are 30 layers and equal unique parameters; that they are a cycle of ten is what follows from the two  [ours].
Meant for one 80 GB GPU for two or three days.
Data: python prepare.py fineweb-edu --tokenizer=gpt2 --max_tokens=11e9   (22 GB on disk)
GPT-2's vocabulary has 50,257 tokens and SmolLM's 49,152: table and head grow by 2.3%, and a loss per token is one of other tokens, to be
compared with the other configs here and not with the paper's.
"""
block = "llama"                         # RMSNorm, RoPE, SwiGLU, no biases, as in SmolLM
n_embd = 1536                           # the width between SmolLM-360M and 1.7B  [MoR]
n_head = 24                             # heads of 64
n_kv_head = 8                           # three query heads share their keys and values
n_ffn = 4096                            # 8/3 of the width
n_core = 10                             # blocks that the steps share
n_recur = 3                             # 0+10x3+0 executes 30 blocks and owns 10
sharing = "cycle"                       # all of them in order, three times: 0..9, 0..9, 0..9
update = "replace"                      # h = core(h): no anchor, no gate; every token takes every step
block_size = 2048                       # the paper's context  [MoR]
dataset = "fineweb-edu"                 # documents joined by end-of-text, packed  [MoR]
batch_size = 8                          # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 128       # 8 x 128 x 2048 = 2,097,152 tokens per step  [MoR: 1024 rows]
max_iters = 4768                        # 10.00 billion tokens, as in the sharing ablation  [ours: not published for these two]
learning_rate = 3e-3                    # cosine to a tenth of it (min_lr follows)  [MoR: all but the isoFLOP runs]
warmup_iters = 57                       # that of the released 360M runs; not published for these  [ours]
weight_decay = 0.1                      # matrices and tables, not norms  [MoR]
grad_clip = 1.0                         # [MoR]
dropout = 0.0                           # [MoR]
eval_tokens = 2**20                     # 512 windows: rows of the published table differ by hundredths of a nat
