"""What no checker of SGLang sees: tensors that a loader derives and keeps as plain attributes, such as w_kc and w_vc of
DeepSeek's attention. A server computes with them, so its log-probs are compared with those of transformers' model.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.config.model_rules import EXPERTS
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.verify.server import Answered, Server, generate
from harness.trainer.losses import log_probs_from_logits
from harness.weights.log_probs import FACTOR, FLOOR, JUMPS

LARGEST_BYTES = 2 << 30
"""Of a model in float32: larger ones are not loaded, so that this stays a tool for any machine."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 24, 16
SEED = 45


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What the log-probs say about tensors that no checker sees."""

    sentence: str = ""
    is_wrong: bool = False


def look(server: Server, key: str, folder: Path, weights: Path, stored: Mapping[str, Stored]) -> Derived:
    """Compare log-probs, or say why that cannot be done.

    folder: with config.json. weights: with the safetensors. The server answers a few prompts, which its prefix cache
    keeps as any others. In decoding it computes with what it derived, in prefill perhaps not, so both are compared.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    nbytes = sum(math.prod(each.shape or ()) for each in stored.values()) * torch.float32.itemsize
    if fields.get("quantization_config"):
        return Derived(sentence="not covered, as the weights are quantized and log-probs show gross failures only")
    if nbytes > LARGEST_BYTES:
        return Derived(
            sentence=f"not covered, as transformers' model would take {nbytes / 1e9:.1f} GB here"
            f" (up to {LARGEST_BYTES / 1e9:.1f} are loaded)"
        )
    try:
        answers = generate(server.url, key, _prompts(fields), NEW_TOKENS)
        with working("computing the log-probs of transformers' model"):
            return _compare(answers, folder, weights, _dtype(server, fields), _has_experts(fields))
    except UnsupportedEnvironment as error:
        return Derived(sentence=f"not covered: {error}")


def _compare(
    answers: Sequence[Answered], folder: Path, weights: Path, dtype: torch.dtype, has_experts: bool
) -> Derived:
    wide = _log_probs(folder, weights, torch.float32, answers)
    own = wide if dtype == torch.float32 else _log_probs(folder, weights, dtype, answers)
    said = torch.tensor([each for answer in answers for each in answer.log_probs])
    apart, rounding = (float((each.double() - own.double()).abs().mean()) for each in (said, wide))
    allowed = max(FLOOR["float32"], FACTOR * rounding, JUMPS if has_experts and rounding else 0.0)
    is_wrong = not apart <= allowed  # a NaN is larger than anything
    relation = "more than" if is_wrong else "within"
    return Derived(
        sentence=f"log-probs of {len(said)} tokens are {apart:.1e} nats from transformers' in the mean, {relation} the"
        f" {allowed:.1e} that rounding explains",
        is_wrong=is_wrong,
    )


@torch.no_grad()
def _log_probs(folder: Path, weights: Path, dtype: torch.dtype, answers: Sequence[Answered]) -> torch.Tensor:
    """Return float [tokens]: transformers' log-probs of each answer's tokens but the first."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            weights,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            generation_config=GenerationConfig(),  # what a sender gave has none
        )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedEnvironment(f"transformers cannot load it: {type(error).__name__}: {error}") from error
    found = []
    for answer in answers:
        tokens = torch.tensor([answer.tokens])
        logits = model(input_ids=tokens).logits
        found.append(log_probs_from_logits(logits[:, :-1].float(), tokens[:, 1:])[0])
    return torch.cat(found)


def _prompts(fields: Mapping[str, Any]) -> list[list[int]]:
    vocabulary = (fields.get("text_config") or fields).get("vocab_size") or 1000
    draw = random.Random(SEED)
    return [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def _dtype(server: Server, fields: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which the server computes."""
    asked = server.arguments.get("dtype")
    name = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16" if asked in (None, "auto") else asked
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _has_experts(fields: Mapping[str, Any]) -> bool:
    return any((fields.get("text_config") or fields).get(name) for name in EXPERTS.split())
