"""Trains one network on ranks of unequal speed. Start it with:  tatami run -n 4 examples/ten_lines.py"""

from functools import partial

import torch
from torch import nn

import tatami
from tatami.datasets import load

train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 200), nn.Sigmoid(), nn.Linear(200, 10))
model = tatami.tile(network, comm, batch_size=256, speeds="measure")
trainer = tatami.Trainer(
    model, optimizer=partial(torch.optim.Adam, lr=0.01), loss=nn.CrossEntropyLoss(), retile=tatami.Retiler()
)
trainer.fit((train_data.x, train_data.y), batch_size=256, epochs=20)
result = trainer.evaluate((test_data.x, test_data.y), batch_size=512, metrics=["accuracy"])
trainer.save("model.safetensors", force=True)  # without force an existing file stays, and the weights are written next to it
if comm.rank == 0:
    print(f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}")
