"""The table of precisions: what a run's weights are kept, sent and computed in."""

from typing import get_args

from harness.config.precision import QUANTIZED, RolloutPrecision
from harness.config.schema import Model
from harness.weights.log_probs import FLOOR, LARGEST_BASELINE
from harness.weights.quantizers import QUANTIZERS, quantizer_of


def test_every_precision_that_the_config_offers_has_facts_and_code() -> None:
    assert QUANTIZED.keys() == QUANTIZERS.keys() == set(get_args(RolloutPrecision)) - {"same"}
    for name in get_args(RolloutPrecision):
        precision = Model(dtype="bfloat16", rollout_precision=name).precision
        assert precision.of_engine == ("bfloat16" if name == "same" else name)
        assert (quantizer_of(precision) is not None) == precision.is_quantized == (name != "same")
        assert FLOOR[precision.of_engine] < LARGEST_BASELINE[precision.of_engine]


def test_the_trainer_may_keep_its_weights_in_another_dtype_than_it_computes_in() -> None:
    precision = Model(dtype="bfloat16", master_dtype="float32").precision
    assert (precision.stored, precision.computed, precision.is_quantized) == ("float32", "bfloat16", False)
