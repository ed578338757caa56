"""Ouro at GRT Small's layout, 1+1x10+1: every step is asked for the next token, and a gate says where to stop  [GRT, isoFLOP].

The Medium and Large models and those of equal parameters are flags of the dense configs: PUBLISHED.md has each command.
On GPT-2 tokens: python prepare.py my_text/ --tokenizer=gpt2, then --dataset=my_text. The offline default set is bytes.
"""
n_embd = 768                            # GPT-2 Small's width
n_head = 12                             # heads of 64
n_prelude = 1                           # blocks before the loop
n_core = 1                              # blocks in one step of the loop
n_recur = 10                            # steps at full depth: 1+1x10+1 executes 12 blocks
n_coda = 1                              # blocks after the loop
update = "replace"                      # h = core(h): no anchor, no gate on the state, no noise
loss = "every"                          # each step's state goes through coda and head: ten heads a token, expected over the exit gate  [Ouro]
exit_entropy = 0.1                      # keeps that gate from settling on one step; Ouro's later phase has .05  [Ouro]
depth_sampling = "fixed"                # always ten steps in training  [Ouro]
block_size = 1024                       # the papers' context
batch_size = 12                         # rows that fit one 80 GB GPU; the two lines below keep the product
gradient_accumulation_steps = 40        # 12 x 1024 x 40 = 491,520 tokens per step  [GRT: 8 GPUs x 60 x 1024]
max_iters = 20000                       # 9.8 billion tokens  [GRT]
learning_rate = 6e-4                    # cosine to 6e-5 (min_lr follows: a tenth)  [GRT]
warmup_iters = 2000                     # [GRT]
weight_decay = 0.1                      # matrices and tables only  [GRT]
grad_clip = 1.0                         # [GRT]
dropout = 0.0                           # one epoch at most: nothing to over-fit
