"""A draft model (engine.args.speculative_algorithm): what is sent, and what older releases cannot do."""

from dataclasses import replace

import pytest

from harness.config.draft_rules import draft_of, sends_mtp_layer
from harness.config.facts import Device, EngineArgument, Facts, SGLangFacts
from harness.config.layers import ConfigError
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.command_line import parse

CHAIN = (
    " --engine.args.speculative_num_steps 1 --engine.args.speculative_eagle_topk 1"
    " --engine.args.speculative_num_draft_tokens 2"
)
EAGLE = "--engine.args.speculative_algorithm EAGLE"
WITH_LAYER = {"num_nextn_predict_layers": 1}
NAMES = "algorithm num_steps eagle_topk num_draft_tokens draft_model_path"
NEW = SGLangFacts(
    version="1.2",
    arguments={f"speculative_{name}": EngineArgument(kinds=("other",)) for name in NAMES.split()}
    | {"enable_dp_attention": EngineArgument(kinds=("bool",))},
)


def asked(words: str) -> Config:
    return parse(words.split()).config


@pytest.mark.parametrize("name", ["EAGLE", "nextn"])
@pytest.mark.parametrize("transport", ["auto", "bucket", "pull", "disk"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_layer_of_the_checkpoint_is_sent_and_verified(name: str, transport: str, device: Device) -> None:
    words = f"--engine.args.speculative_algorithm {name}{CHAIN} --weights.transport {transport}"
    resolved = resolve(asked(words), Facts(device=device, model=WITH_LAYER, sglang=NEW)).config
    assert resolved.weights.verify


def test_an_update_group_that_leaves_the_draft_behind_is_refused_with_release_and_issue() -> None:
    words = f"{EAGLE} --parallel.colocate false"
    old = replace(NEW, updates_drafts_by_group=False)
    with pytest.raises(ConfigError, match=r"sglang 1\.2 never updates the draft model.*sglang#27718"):
        resolve(asked(words), Facts(device="cuda", model=WITH_LAYER, sglang=old))
    assert resolve(asked(words), Facts(device="cuda", model=WITH_LAYER, sglang=NEW)).config.weights.transport


@pytest.mark.parametrize("words", [f"{EAGLE}{CHAIN}", "--engine.args.speculative_algorithm NGRAM"])
def test_what_a_cpu_cannot_serve_is_no_mistake_of_the_user(words: str) -> None:
    old = replace(NEW, why_no_drafts_on_cpu="its draft workers wait for CUDA streams")
    with pytest.raises(UnsupportedEnvironment, match="CPU mode cannot serve it"):
        resolve(asked(words), Facts(device="cpu", model=WITH_LAYER, sglang=old))


def test_only_algorithms_with_a_second_model_have_a_draft() -> None:
    assert [draft_of({"speculative_algorithm": name}) for name in ("NGRAM", None, "uno")] == ["", "", ""]
    assert draft_of({"speculative_algorithm": "eagle3"}) == "EAGLE3"
    assert sends_mtp_layer({"speculative_algorithm": "nextn"})
    assert not sends_mtp_layer({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "folder"})
