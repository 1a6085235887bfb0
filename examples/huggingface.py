"""Trains Hugging Face's GPT-2 on ranks of unequal speed. It needs their library (pip install transformers); start it with:
tatami run -n 3 examples/huggingface.py"""

import pydoc_data.topics
import sys

import torch

import tatami

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("huggingface.py needs transformers: pip install transformers")

TOKENS, BATCH, STEPS = 32, 16, 60
TEXT = "".join(pydoc_data.topics.topics.values())  # the language reference, which every Python has
LETTERS = sorted(set(TEXT))

comm = tatami.init()
torch.manual_seed(0)
numbers = {letter: number for number, letter in enumerate(LETTERS)}
text = torch.tensor([numbers[letter] for letter in TEXT])
starts = torch.randint(len(text) - TOKENS, (STEPS, BATCH))  # the same on every rank, like the weights
windows = [torch.stack([text[start : start + TOKENS] for start in chosen]) for chosen in starts]

# Pretrained weights work as well: GPT2LMHeadModel.from_pretrained(...). Training needs no cache of keys and values.
config = GPT2Config(vocab_size=len(LETTERS), n_positions=TOKENS, n_embd=48, n_layer=2, n_head=6, use_cache=False)
network = GPT2LMHeadModel(config)
sample = {"input_ids": windows[0], "labels": windows[0]}
model = tatami.tile(network, comm, batch_size=BATCH, sample=sample, speeds="measure", reduction="mean")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step, window in enumerate(windows):
    mine = model.local(window)  # the global batch in, this rank's samples out
    optimizer.zero_grad()
    loss = model(input_ids=mine, labels=mine).loss  # the network's own loss, the mean over this rank's samples
    loss.backward()  # every .grad now holds the gradient over the global batch
    optimizer.step()
    if step % 20 == 19:
        whole = model.global_loss(loss)  # over all samples, the same on all ranks; loss is over this rank's samples, if any
        if comm.rank == 0:
            print(f"step {step + 1}: loss {whole:.2f}")
