"""GRT Small, 1+10x10+1: as many sets of weights as GPT-2 Small, 12, run as 102 blocks  [GRT, isoPARAM].

On GPT-2 tokens: python prepare.py my_text/ --tokenizer=gpt2, then --dataset=my_text. The offline default set is bytes.
Residual outputs start smaller by sqrt(2 x executed blocks), which is known for the paper's isoFLOP models and a guess for this one.
"""
n_embd = 768                            # GPT-2 Small's width
n_head = 12                             # heads of 64
n_prelude = 1                           # blocks before the loop: their output is the anchor
n_core = 10                             # blocks in one step of the loop
n_recur = 10                            # steps at full depth: 1+10x10+1 executes 102 blocks
n_coda = 1                              # blocks after the loop
update = "gate"                         # h = g h + (1 - g) core(W [h ; e])
gate_bias = 4.0                         # g = .982 at the start: the loop opens slowly over a long run  [GRT]
state_noise = 0.1                       # fresh noise makes equal weights act like different layers  [GRT]
gate_noise = 0.1                        # one draw per token  [GRT]
depth_sampling = "uniform"              # a random depth per micro-batch: the model works at all of them  [GRT]
min_depth = 1                           # the paper's; its released configs have 2
block_size = 1024                       # the papers' context
batch_size = 12                         # rows that fit one 80 GB GPU; the next line keeps the product
gradient_accumulation_steps = 40        # 12 x 1024 x 40 = 491,520 tokens per step  [GRT: 8 GPUs x 60 x 1024]
max_iters = 20000                       # 9.8 billion tokens  [GRT]
learning_rate = 6e-4                    # cosine to 6e-5 (min_lr follows: a tenth)  [GRT]
warmup_iters = 2000                     # [GRT]
weight_decay = 0.1                      # matrices and tables only  [GRT]
grad_clip = 1.0                         # [GRT]
dropout = 0.0                           # one epoch at most: nothing to over-fit
