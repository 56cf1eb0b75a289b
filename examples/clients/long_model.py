"""Makes a model for coding agents, whose prompts are longer than SmolLM2's context, and which need a chat template that
shows tools. It has one layer of an example, so that a CPU reads such a prompt in seconds. What it answers is nonsense;
what is tried is the protocol.

    .venv/bin/python examples/clients/long_model.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

CONTEXT = 49152
TEMPLATE = (
    '{% if tools %}<|im_start|>system\nCall functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.copytree(Path(__file__).parents[1] / "models" / "qwen2-python", folder, dirs_exist_ok=True)
    config = {"max_position_embeddings": CONTEXT, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tokenizer = {"chat_template": TEMPLATE, "model_max_length": CONTEXT}
    for path, changes in ((folder / "config.json", config), (folder / "tokenizer_config.json", tokenizer)):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    kept = {name: value for name, value in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, weights, {"format": "pt"})


if __name__ == "__main__":
    main()
