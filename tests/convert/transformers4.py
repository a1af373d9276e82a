"""A program that runs under transformers 4: the logits of the models in some folders, for the ids
that lie in them.

Each folder has ids.pt, and gets logits.pt, or refusal.txt if its model is not loaded.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def main(folders: list[str]) -> None:
    """Write the FP32 logits of the model in each folder."""
    assert transformers.__version__.startswith("4."), transformers.__version__
    transformers.logging.set_verbosity_error()
    for folder in map(Path, folders):
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                attn_implementation="eager",
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
            model, info = loaded
            lacking = [
                name
                for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
                for name in info[what]
            ]
            assert not lacking, lacking
            with torch.no_grad():
                logits = model.eval()(torch.load(folder / "ids.pt")).logits
        except Exception as refusal:
            (folder / "refusal.txt").write_text(f"{type(refusal).__name__}: {refusal}")
            continue
        torch.save(logits, folder / "logits.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
