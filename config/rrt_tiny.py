"""A relaxed recursive transformer in minutes on a laptop CPU, 1+1x4+1: one block four times, plus small matrices of each step's own."""
n_prelude = 1               # the first of gpt_tiny's six layers when it is converted (prepare.py weights)
n_core = 1                  # stands for its four layers in the middle
n_recur = 4                 # 1 + 1 x 4 + 1 = as many blocks as gpt_tiny executes
n_coda = 1                  # its last layer
lora_rank = 8               # RRT's default: a B A of this rank for every step and linear of the core
update = "replace"          # h = core(h): no anchor, no gate, no noise
depth_sampling = "fixed"    # each step has matrices of its own, which no other depth would train evenly
block = "llama"             # as gpt_tiny
n_embd = 128                # as gpt_tiny
n_head = 4                  # heads of 32
block_size = 256            # bytes: about eight lines of Python
batch_size = 8              # 2,048 tokens per step, as gpt_tiny
max_iters = 1500            # as gpt_tiny, from scratch; a converted model needs fewer
learning_rate = 2e-3        # as gpt_tiny, from scratch; a converted model does better at 6e-4 (200 steps: 1.354 nats, at 2e-3 1.383)
warmup_iters = 100          # as gpt_tiny
eval_interval = 500         # three looks, three checkpoints
eval_tokens = 32768         # 128 windows
log_interval = 50           # a line every ten seconds
