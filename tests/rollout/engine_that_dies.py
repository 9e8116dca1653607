"""engine_that_dies.py FOLDER: one rank with a real engine, whose scheduler then raises at a tensor of a wrong shape.

With --forked its processes are forked. With --garbage SGLang's tokenizer manager, in this process, gets a message that
it cannot read.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(folder: Path) -> None:
    from harness.config.schema import Config, Parallel
    from harness.rollout.early_start import start_early
    from harness.runtime.fork_server import ForkServer
    from harness.task.tiny_models import save_tiny_model

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    config = Config(parallel=Parallel(tp=1))
    if "--forked" in sys.argv:
        ForkServer.hand_over(start_early(config, "cpu", os.environ))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from harness.rollout.verl_engine import VerlEngine

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    save_tiny_model("qwen3", folder / "model", 0, texts=["hello"])
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "tp", "pp"))
    engine = VerlEngine(mesh["tp"], model_path=str(folder / "model"), dtype="float32", random_seed=0)
    assert engine.starts.forked == (2 if "--forked" in sys.argv else 0), engine.starts
    print(f"log {engine.log}", flush=True)
    engine.generate(input_ids=[[5, 6]], sampling_params={"max_new_tokens": 2})
    if "--pass" in sys.argv:
        return
    if "--garbage" in sys.argv:
        import zmq

        socket = zmq.Context().socket(zmq.PUSH)
        socket.connect(engine.call_engine(lambda own: own.port_args.tokenizer_ipc_name))
        socket.send(b"garbage")
        engine.generate(input_ids=[[5, 6]], sampling_params={"max_new_tokens": 2})
    engine.update_weights_from_tensor([("model.norm.weight", torch.zeros(7))])
    print("the scheduler took it", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
