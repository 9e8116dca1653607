"""The files of a model's folder that are not weights."""

from pathlib import Path

SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the model's configuration and of its tokenizer."""


def copy_all_but_weights(source: Path, folder: Path) -> None:
    """Copy the model's configuration and tokenizer to another folder, without the index of its files of weights."""
    for file in source.iterdir():
        if file.suffix in SUFFIXES and not file.name.endswith(".index.json"):
            (folder / file.name).write_bytes(file.read_bytes())
