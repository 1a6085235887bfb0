"""A hand-written PyTorch loop with two more lines. Start it with:  tatami run -n 4 examples/own_loop.py"""

import torch
from torch import nn

import tatami
from tatami.datasets import load
from tatami.train import Retiling, save_model

data = load("digits", targets="classes")
comm = tatami.init()
network = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Dropout(0.1), nn.Linear(200, 10))
# "mean": how the loss below reduces the samples
model = tatami.tile(network, comm, batch_size=len(data.x), speeds="measure", reduction="mean")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_function = nn.CrossEntropyLoss()
retiling = Retiling(model, optimizer, retiler=tatami.Retiler())  # for machines whose speeds change; optional

for step in range(100):
    x, y = model.local(data.x, data.y)  # the global batch in, this rank's samples out
    optimizer.zero_grad()
    loss = loss_function(model(x), y)
    loss.backward()  # every .grad now holds the gradient over the global batch
    model.clip_grad_norm_(5.0)
    optimizer.step()
    check = retiling.step()
    if check is not None and check.moved is not None and comm.rank == 0:
        print(check.decision)
    if step % 20 == 19:
        whole = model.global_loss(loss)  # over all samples, the same on all ranks; loss is over this rank's samples
        if comm.rank == 0:
            print(f"step {step + 1}: loss {whole:.4f}")

save_model(model, "model.safetensors", force=True)  # the whole weights: all ranks call it, rank 0 writes
