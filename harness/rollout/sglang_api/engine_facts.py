"""What resolve() wants to know of an sglang, read from its source."""

import ast
import re

from harness.config.facts import EngineArgument, SGLangFacts
from harness.rollout.sglang_api.probe import SGLangApi, engine_argument_annotations
from harness.rollout.sglang_api.source import SourceTree

CHOICES = "srt/arg_groups/choices.py"
ABSORBED_MLA = ("srt/plugins/__init__.py", "srt/models/deepseek_common/attention_backend_handler.py")
"""Files without which the stand-ins cannot register the absorbed method of MLA for the CPU: plugins, and the
registry."""

LLAMA = "srt/models/llama.py"
EAGLE_WORKER = "srt/speculative/eagle_worker_v2.py"
VERIFY = "srt/speculative/eagle_utils.py"
SCHEDULERS_UPDATES = "srt/managers/scheduler_components/weight_updater.py"


def engine_facts(api: SGLangApi) -> SGLangFacts:
    """Return the facts of this sglang that decide whether a config can work."""
    return SGLangFacts(
        version=api.version,
        arguments={name: _argument(api, each) for name, each in engine_argument_annotations(api.tree).items()},
        serves_mla_on_cpu=all(map(api.tree.has, ABSORBED_MLA)),
        loads_block_scales_of_llama=_llama_loads_block_scales(api.tree),
        returns_routing=api.routed_experts and "enable_return_routed_experts" in api.engine_arguments,
        why_no_drafts_on_cpu=_why_no_drafts_on_cpu(api.tree),
        updates_drafts_by_group="load_weights_from_distributed" in api.tree.text(SCHEDULERS_UPDATES),
        returns_routing_on_cpu=api.tree.find_class("BaseHostCache", "srt/state_capturer/base.py") is not None,
    )


def _why_no_drafts_on_cpu(tree: SourceTree) -> str:
    """Return what the EAGLE worker lacks for rollouts on a CPU, or "" if harness_sglang_draft can stand in for the
    rest.
    """
    if "_is_cpu" not in tree.text(EAGLE_WORKER):
        return "its draft workers wait for CUDA streams"
    if "def _verify_uses_greedy" not in tree.text(VERIFY):
        return "on a CPU it takes the likeliest token whatever the temperature, so responses would not be sampled"
    return ""


def _llama_loads_block_scales(tree: SourceTree) -> bool:
    """Return whether Llama's load_weights takes weight_scale_inv by its own name, at least for block-FP8
    (sglang#30234).
    """
    text = tree.text(LLAMA)
    return '(".weight_scale_inv", ".weight_scale")' not in text or "weight_block_size" in text


def _argument(api: SGLangApi, annotation: ast.expr) -> EngineArgument:
    """Read an annotation: T, or since 0.5.20 A[T, Arg(choices=...)]."""
    kind, details = annotation, list[ast.expr]()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *details = annotation.slice.elts
    words = re.findall(r"\w+", ast.unparse(kind))
    is_optional = "Optional" in words
    kinds = [word for word in words if word not in ("typing", "Optional", "Union")] + ["None"] * is_optional
    return EngineArgument(kinds=tuple(kinds), choices=_choices(api, details))


def _choices(api: SGLangApi, details: list[ast.expr]) -> tuple[str, ...]:
    """Return the choices of Arg(choices=...): a list, or the name of one."""
    given = [
        key.value for each in details if isinstance(each, ast.Call) for key in each.keywords if key.arg == "choices"
    ]
    lists = [api.tree.assigned(CHOICES).get(ast.unparse(each), each) for each in given]
    constants = [node for each in lists for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return tuple(node.value for node in constants if isinstance(node.value, str))
