"""A GAN with two tiled networks and two optimizers learns a ring of points; D(G(z)) runs through both. Start it with:
tatami run -n 3 examples/gan.py"""

import math

import torch
from torch import nn
from torch.nn.functional import softplus

import tatami

BATCH, STEPS, NOISE = 128, 250, 4


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


comm = tatami.init()
torch.manual_seed(0)  # the same samples and noise on every rank
plain = perceptron(NOISE, 2)
generator = tatami.tile(plain, comm, batch_size=BATCH, speeds="equal", reduction="mean")
critic = tatami.tile(perceptron(2, 1), comm, batch_size=BATCH, speeds="equal", reduction="mean", quiet=True)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))

for _ in range(STEPS):
    angle = 2 * math.pi * torch.rand(BATCH)
    real = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(BATCH, 2)
    noise = torch.randn(BATCH, NOISE)

    critic_optimizer.zero_grad()
    fake = generator(generator.local(noise)).detach()
    loss = softplus(-critic(critic.local(real))).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    critic.local_span(BATCH)  # the next batch has as many samples
    loss = softplus(critic(fake)).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # added to the gradients above
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    critic.local_span(BATCH)
    loss = softplus(-critic(generator(generator.local(noise)))).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # through both networks, each with its own layout
    generator_optimizer.step()

network = generator.whole()
if network is not None:
    with torch.no_grad():
        radius = network(torch.randn(2000, NOISE)).norm(dim=1)
    print(f"mean distance of the points from the center: {radius.mean():.2f} (should be 1.00), deviation {radius.std():.2f}")
