"""LoRA: adapters of rank 32 on all matrices of the layers; the rest of the model stays as it is.
Ten times the learning rate of all weights, since B starts at zero.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/lora.py

policy/ holds the merged model; with --config.lora.export=adapter it is a folder that peft loads.
"""


def apply(c):
    c.lora.rank, c.lora.alpha = 32, 32.0
    c.optim.lr *= 10
