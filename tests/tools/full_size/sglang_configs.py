"""What SGLang reads from folders with a config.json, as one line of JSON. `python sglang_configs.py FOLDER...`

A program, because SGLang decides once in a process, as it is imported, what it supports on this device.
"""

import json
import sys
from pathlib import Path

from harness.runtime.cpu_standins import activate


def main(folders: list[str]) -> None:
    """Print what SGLang's ModelConfig reads from each folder: architecture, quantization, the language model's
    numbers."""
    activate()
    from sglang.srt.configs.model_config import ModelConfig

    read = {}
    for folder in folders:
        config = ModelConfig(folder)
        published = json.loads((Path(folder) / "config.json").read_text())
        text = config.hf_config.text_config if "text_config" in published else config.hf_config
        read[Path(folder).name] = {
            "architecture": config.hf_config.architectures[0],
            "quantization": config.quantization,
            "fields": {
                field: getattr(text, field, None)
                for field, value in published.get("text_config", published).items()
                if isinstance(value, int)
            },
        }
    print(json.dumps(read))


if __name__ == "__main__":
    main(sys.argv[1:])
