"""GPT-2 Medium, 0+24x1+0: the dense model beside grt_medium, with the same recipe  [GRT, dense rows].

On GPT-2 tokens: python prepare.py my_text/ --tokenizer=gpt2, then --dataset=my_text. The offline default set is bytes.
"""
n_embd = 1024                           # GPT-2 Medium's width
n_head = 16                             # heads of 64
n_core = 24                             # blocks, each with its own weights
n_recur = 1                             # no loop
bias = False                            # as in the paper's comparison; GPT-2's release has biases (--bias=True)
block_size = 1024                       # the papers' context
batch_size = 12                         # rows that fit one 80 GB GPU; the two lines below keep the product
gradient_accumulation_steps = 40        # 12 x 1024 x 40 = 491,520 tokens per step  [GRT: 8 GPUs x 60 x 1024]
max_iters = 20000                       # 9.8 billion tokens  [GRT]
learning_rate = 6e-4                    # cosine to 6e-5 (min_lr follows: a tenth)  [GRT]
warmup_iters = 2000                     # [GRT]
weight_decay = 0.1                      # matrices and tables only  [GRT]
grad_clip = 1.0                         # [GRT]
dropout = 0.0                           # one epoch at most: nothing to over-fit
