from typing import Any

import pytest
import torch

from harness.weights.loader import EngineLoader
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy
from harness.weights.verification.comparison import changed_since, describe_tensor
from harness.weights.worker.kept_trace import fingerprint_everything
from tests.weights.toy_model import SHAPES, Toy, layout_of, live_of, sent, sync_to, view_of


def test_what_changed_in_the_engine_is_named_with_its_checkpoint_tensors(alone: None) -> None:
    sync = sync_to(Toy(), live_of(sent(1)), layout_of(SHAPES))
    sync.loader.trace()
    before = sync.engine.ask(fingerprint_everything)
    assert changed_since(before, sync.loader) == []
    sync.model.qkv.data[0, 0] += 1
    sync.model.scale += 1
    sync.model.register_buffer("alias_made_later", torch.ones(1))
    assert changed_since(before, sync.loader) == ["qkv (q, k, v)", "scale"]


ATTENTION = [f"l.0.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
EXPERTS = [f"l.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(3) for part in ("gate", "up")]


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("l.0.self_attn.o_proj.weight", "l.0.self_attn.o_proj.weight"),
        ("l.0.self_attn.fused_qkv_a.weight", f"l.0.self_attn.fused_qkv_a.weight ({ATTENTION[0]}, {ATTENTION[1]})"),
        ("l.0.mlp.experts.w13_weight", f"l.0.mlp.experts.w13_weight ({', '.join(EXPERTS[:4])}, 2 more)"),
        ("l.0.self_attn.w_kc", f"l.0.self_attn.w_kc ({ATTENTION[2]})"),
        ("rotary.cos_sin_cache", "rotary.cos_sin_cache"),
    ],
)
def test_an_engine_tensor_is_described_by_what_fills_it(name: str, described: str) -> None:
    """Half of the experts is on each rank."""

    def copies(filled: dict[str, list[str]]) -> list[list[LoaderCopy]]:
        dtype = torch.float32
        return [[LoaderCopy(view_of(name, (1,)), into, dtype) for into, names in filled.items() for name in names]]

    first = {"l.0.self_attn.fused_qkv_a.weight": ATTENTION[:2], "l.0.mlp.experts.w13_weight": EXPERTS[:3]}
    loader: Any = EngineLoader(None, ())  # type: ignore[arg-type]
    loader.coverage = (
        LoadCoverage(rank=0, copies=copies(first)),
        LoadCoverage(rank=1, copies=copies({"l.0.mlp.experts.w13_weight": EXPERTS[3:]})),
    )
    layout = [view_of(each, (1,)) for each in (*ATTENTION, *EXPERTS)]
    assert describe_tensor(name, layout, loader) == described
