"""Dense, 0+4x1+0, d=256, vocabulary 8192, for bench.py: a training step beside that of transformers, the loss included."""
vocab_size = 8192           # a vocabulary large enough that head and loss take their share
n_embd = 256                # small enough for a CPU, large enough that matrices dominate
n_head = 4                  # heads of 64, as in the large models
block_size = 256            # the tiny configs' context
n_core = 4                  # 4 blocks, each with its own weights
batch_size = 8              # 8 x 256 tokens a step
