"""Predictions in which layers stand for others, those in which each is traced itself, and those of pipeline stages."""

import tempfile

from harness.task.tiny_models import save_tiny_model
from harness.tools.engine_class.checkpoint_headers import read_headers
from harness.tools.engine_class.traced_ranks import EngineShape
from harness.tools.verify.rank_predictions import layout_of, predict
from harness.tools.verify.server import TARGET
from tests.tools.full_size.asked import imported

LAYERS = 5


def compare_predictions(model: str, tp: int, ep: int) -> int:
    """Return how many ranks were predicted in two ways."""
    with tempfile.TemporaryDirectory() as scratch:
        saved = save_tiny_model(model, scratch, seed=1, overrides={"num_hidden_layers": LAYERS}, texts=["1 + 1 = 2"])
        folder = imported(str(saved))
        arguments = {"tp_size": tp, "ep_size": ep, "dtype": "float32"}
        shape = EngineShape(folder=folder, arguments=arguments, tp=tp, pp=1, on_gpu=False, processes=2)
        layout, wanted = layout_of(read_headers(folder)), [(TARGET, rank) for rank in range(tp)]
        short, whole = (predict(shape, layout, wanted, traced) for traced in ((), range(LAYERS)))
        for key, prediction in whole.items():
            assert not prediction.like
            assert short[key].nbytes == prediction.nbytes
            assert len(short[key].like) > len(short[key].packed)
            for name in prediction.nbytes:
                assert short[key].held(name) == prediction.held(name), name
            assert short[key].unfilled == prediction.unfilled
        arguments = {"pp_size": 2, "dtype": "float32"}
        piped = EngineShape(folder=folder, arguments=arguments, tp=1, pp=2, on_gpu=False, processes=2)
        first, last = predict(piped, layout, [(TARGET, stage) for stage in range(2)]).values()
        assert not first.nbytes.keys() & last.nbytes.keys()
        assert first.nbytes.keys() | last.nbytes.keys() == whole[TARGET, 0].nbytes.keys()
        return len(whole)
