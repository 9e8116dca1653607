from harness.rollout.engine_settings import engine_defaults


def test_piecewise_capture_is_off_on_every_device() -> None:
    """0.5.13 captures on CPU too where nothing forbids it, and dies."""
    assert all(engine_defaults(device)["disable_piecewise_cuda_graph"] for device in ("cpu", "cuda"))


def test_on_a_gpu_the_preset_sglang_leaves_backends_and_graphs_to_it() -> None:
    own, reproducible = engine_defaults("cuda", "sglang"), engine_defaults("cuda")
    assert {"attention_backend", "sampling_backend", "disable_cuda_graph"} <= set(reproducible) - set(own)
    assert not any("graph" in name or "backend" in name for name in own)
    assert own["enable_memory_saver"] and own["mem_fraction_static"] == reproducible["mem_fraction_static"]
    assert own.items() <= reproducible.items()


def test_on_a_cpu_both_presets_are_the_same() -> None:
    assert engine_defaults("cpu", "sglang") == engine_defaults("cpu")
