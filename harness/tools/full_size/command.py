"""What launch/full_size.py does: both sides of a weight sync at the model's true size, and one verdict."""

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from harness.config.layers import ConfigError
from harness.runtime import cpu_standins
from harness.runtime.events import Work, working
from harness.runtime.files import replace_file
from harness.runtime.fork_server import collecting_nothing
from harness.tools.full_size.exported_names import Export, read_export
from harness.tools.full_size.model_and_options import Options, Question, read_question

SUFFIX = {"--json": ".json", "--page": ".html"}


def run(name: str, options: Options, words: Sequence[str] = ()) -> int:
    """Print the verdict and return the exit code. words: keys of a run's config.

    Raise ConfigError, UnsupportedEnvironment.
    """
    for option, file in (("--json", options.json), ("--page", options.page)):
        if file:
            check_written(option, Path(file))
    if options.against:
        from harness.tools.full_size import compare

        if options.page:
            raise ConfigError("--page shows one answer; leave out --against, or write its table by --json.")
        return compare.against(name, options, words)
    with working("reading the model's config") as work, tempfile.TemporaryDirectory() as scratch:
        question = read_question(name, options, words, Path(scratch))
        return _answer(work, name, options, question, read_export(options.names) if options.names else None)


def check_written(option: str, file: Path) -> None:
    """Raise ConfigError unless a file of that name can be written. It is written last, after minutes of work."""
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a folder; give a file in it, such as {file / 'found'}{SUFFIX[option]}.")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file} must be a file in a folder that is there.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {file} cannot be written by this user; give another file.")


def _answer(work: Work, name: str, options: Options, question: Question, export: Export | None) -> int:
    started = time.monotonic()
    print("importing SGLang's class of this model, and transformers'", flush=True)
    with working("importing torch, transformers and SGLang", importing=True), collecting_nothing():
        prepare_import(question.folder, question.has_draft)
        from harness.tools.engine_class import meta_model
        from harness.tools.full_size.model_verdict import find_answer

        meta_model.import_all(question.folder)
    work.what = "comparing what is sent with what the engine takes"
    answer = find_answer(name, options, question, export, started, imported=time.monotonic())
    if options.json:
        Path(options.json).write_text(json.dumps(answer.table(), indent=1))
    if options.page:
        from harness.tools.full_size.page import page_of

        replace_file(Path(options.page), page_of(answer))
    for line in answer.closing_lines():
        print(line)
    print(f"VERDICT: {answer.verdict()}")
    return answer.code


def prepare_import(folder: Path, draft: bool = False) -> None:
    """Set the environment in which torch and SGLang are imported. draft: SGLang's classes of draft models are needed
    too.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what SGLang asks of a GPU is answered for one that is not there
    cpu_standins.activate()
    from harness.tools.engine_class import meta_model

    meta_model.prepare_import(folder, draft=draft)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # SGLang logs every kernel that a CPU lacks; a real failure is an exception
