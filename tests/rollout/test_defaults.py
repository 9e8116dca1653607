from harness.rollout.defaults import engine_defaults


def test_piecewise_capture_is_off_on_every_device() -> None:
    """0.5.13 captures on CPU too where nothing forbids it, and dies."""
    assert all(engine_defaults(device)["disable_piecewise_cuda_graph"] for device in ("cpu", "cuda"))


def test_on_a_gpu_sglangs_own_defaults_leave_backends_and_graphs_to_it() -> None:
    own, harness = engine_defaults("cuda", "sglang"), engine_defaults("cuda")
    assert {"attention_backend", "sampling_backend", "disable_cuda_graph"} <= set(harness) - set(own)
    assert not any("graph" in name or "backend" in name for name in own)
    assert own["enable_memory_saver"] and own["mem_fraction_static"] == harness["mem_fraction_static"]
    assert own.items() <= harness.items()


def test_cpu_mode_has_one_set_of_defaults() -> None:
    assert engine_defaults("cpu", "sglang") == engine_defaults("cpu")
