import subprocess
import sys

from harness.task.architectures import ARCHITECTURES, is_tiny


def test_is_tiny():
    assert all(is_tiny(name) for name in ARCHITECTURES)
    assert not any(is_tiny(name) for name in ("", "qwen", "Qwen/Qwen3-0.6B", "./qwen2"))


def test_names_need_neither_torch_nor_transformers():
    code = (
        "import sys, harness.task.architectures, harness.task.tiny_models, harness.task.data\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
