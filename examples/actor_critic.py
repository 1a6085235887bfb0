"""Actor and critic, each with its own optimizer, learn to walk to a goal: reinforcement learning in a hand-written loop.
Start it with:  tatami run -n 3 examples/actor_critic.py"""

import torch
from torch import nn

import tatami

WALKS, STEPS, UPDATES = 64, 12, 120
"""WALKS counts those of all ranks; each walk begins at a random place on a line, and is rewarded for being near 0."""


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, outputs))


comm = tatami.init()
torch.manual_seed(0)  # the same walks on every rank
actor = tatami.tile(perceptron(2), comm, batch_size=WALKS, speeds="equal", reduction="mean")
critic = tatami.tile(perceptron(1), comm, batch_size=WALKS, speeds="equal", reduction="mean", quiet=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=0.02)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)

for update in range(UPDATES):
    place, chance = 2 * torch.rand(WALKS, 1) - 1, torch.rand(STEPS, WALKS, 1)
    actor_optimizer.zero_grad()
    critic_optimizer.zero_grad()
    place, chance = actor.local(place), actor.local(chance.transpose(0, 1))
    rewards, chosen, values = [], [], []
    for step in range(STEPS):  # the networks are called many times; gradients are summed once
        actor.local_span(WALKS)
        critic.local_span(WALKS)
        odds = actor(place).log_softmax(dim=1)
        values.append(critic(place))
        goes_right = chance[:, step] < odds[:, 1:].exp()
        chosen.append(torch.where(goes_right, odds[:, 1:], odds[:, :1]))
        place = (place + torch.where(goes_right, 0.1, -0.1)).clamp(-1, 1)
        rewards.append(-place.abs())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    better = returns - torch.stack(values)
    loss = -(better.detach() * torch.stack(chosen)).mean() + better.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    actor_optimizer.step()
    critic_optimizer.step()
    reward = actor.global_loss(torch.stack(rewards).mean())
    if update % 40 == 39 and comm.rank == 0:
        print(f"update {update + 1}: reward {reward:.3f} a step")
