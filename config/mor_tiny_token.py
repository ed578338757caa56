"""Mixture-of-Recursions in minutes on a laptop CPU, token-choice, 1+1x3+1: executes at most 5 blocks and owns 3."""
n_prelude = 1               # the router reads its output, once, and gives every token its depth
n_core = 1                  # one block is the whole loop
n_recur = 3                 # depths 1, 2, 3
n_coda = 1                  # the last block sees every token
block = "llama"             # as grt_tiny
n_embd = 128                # as grt_tiny
n_head = 4                  # heads of 32
block_size = 256            # bytes: about eight lines of Python
router = "token"            # softmax over depths; a balancing loss at 0.1 keeps them about equally full  [MoR]
kv = "own"                  # a step attends to those who are in it; --kv=share: to what step 0 made
batch_size = 8              # 2,048 tokens per step, as grt_tiny
max_iters = 1500            # 3.1M of the data set's 11M tokens
learning_rate = 2e-3        # as grt_tiny
warmup_iters = 100          # as grt_tiny
eval_interval = 500         # three looks, three checkpoints
eval_tokens = 32768         # 128 windows
log_interval = 50           # a line every ten seconds
