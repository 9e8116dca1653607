import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.weights.verification import perturb as module
from harness.weights.verification.perturb import VIEWS, perturb
from tests.cluster.gloo import on_ranks

DTYPES = st.sampled_from(sorted(VIEWS, key=str))


def tensor_of(dtype: torch.dtype, patterns: list[int]) -> torch.Tensor:
    """Every bit pattern is drawn, infinities and denormals too."""
    integer, _ = VIEWS[dtype]
    bits = 8 * integer.itemsize
    signed = [p % 2**bits - 2**bits * (p % 2**bits >= 2 ** (bits - 1)) for p in patterns]
    return torch.tensor(signed, dtype=integer).view(dtype)


PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200)


@given(DTYPES, PATTERNS, st.integers(0, 2**40))
def test_every_element_changes_within_bounds_and_twice_is_never(
    dtype: torch.dtype, patterns: list[int], seed: int
) -> None:
    tensor = tensor_of(dtype, patterns)
    integer, _ = VIEWS[dtype]
    before, old = tensor.view(integer).clone(), tensor.double()
    perturb({"w": tensor}, seed)
    assert (tensor.view(integer) != before).all()
    new = tensor.double()
    finite = old.isfinite()
    assert torch.equal(finite, new.isfinite())
    normal = finite & (old.abs() >= torch.finfo(dtype).tiny)
    relative = ((new - old) / old).abs()[normal]
    assert (relative > 2**-3).all() and (relative <= 2**-1).all()
    assert (old.sign()[normal] == new.sign()[normal]).all()
    perturb({"w": tensor}, seed)
    assert torch.equal(tensor.view(integer), before)


@given(DTYPES, PATTERNS)
def test_the_change_outlives_bfloat16_and_fp8(dtype: torch.dtype, patterns: list[int]) -> None:
    tensor = tensor_of(dtype, patterns)
    tensor = tensor[(tensor.double().abs() > 1e-4) & tensor.isfinite() & (tensor.double().abs() < 1e30)]
    before = tensor.bfloat16().clone()
    perturb({"w": tensor}, 0)
    assert (tensor.bfloat16() != before).all()
    mantissas = before.float().frexp().mantissa  # in FP8's range, as scaled weights are
    perturb({"w": (changed := mantissas.clone())}, 0)
    old, new = (each.to(torch.float8_e4m3fn).float() for each in (mantissas, changed))
    assert (old != new).all()


@settings(max_examples=20)
@example(272, 0)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_same_seed_and_name_change_alike_and_others_do_not(seed: int, other: int) -> None:
    def changed(seed: int, name: str) -> torch.Tensor:
        tensor = torch.ones(1000)
        perturb({name: tensor}, seed)
        return tensor

    assert torch.equal(changed(seed, "a"), changed(seed, "a"))
    assert not torch.equal(changed(seed, "a"), changed(seed, "b"))
    if seed != other:
        assert not torch.equal(changed(seed, "a"), changed(other, "a"))
    share = (changed(seed, "a") == 1 + 2**-1).double().mean()
    assert 0.3 < share < 0.7


def test_chunks_are_as_one_and_other_types_stay_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces, steps = torch.ones(64, 33), torch.ones(64, 33), torch.arange(4)
    perturb({"w": whole}, 7)
    monkeypatch.setattr(module, "CHUNK", 100)
    perturb({"w": pieces, "steps": steps, "none": torch.empty(0)}, 7)
    assert torch.equal(whole, pieces) and steps.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"^w must be float32, bfloat16 or float16 .* got torch\.float64$"):
        perturb({"w": torch.ones(2, dtype=torch.float64)}, 0)


def _sharded(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.linspace(-2, 2, 30).view(5, 6)
    rows, copies, plain = (
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Replicate()]),
        whole.clone(),
    )
    live = {"rows": torch.nn.Parameter(rows), "copies": copies, "plain": plain}
    perturb(live, 1)
    changed = rows.full_tensor().clone(), copies.to_local().clone(), plain.clone()
    perturb(live, 1)
    undone = all(torch.equal(each, whole) for each in (rows.full_tensor(), copies.to_local(), plain))
    return *changed, undone


def test_each_shard_changes_and_copies_stay_copies(tmp_path: Path) -> None:
    (rows, copies, plain, undone), other = on_ranks(_sharded, 2, tmp_path)
    whole = torch.linspace(-2, 2, 30).view(5, 6)
    assert undone and other[3]
    assert (rows != whole).all() and torch.equal(rows, other[0])
    assert torch.equal(copies, other[1]) and torch.equal(plain, other[2])
    # The two shards do not change alike: 3 rows on rank 0, 2 on rank 1.
    ratio = (rows / whole - 1).abs()
    assert not all(math.isclose(a, b, rel_tol=0.3) for a, b in zip(ratio[0], ratio[3], strict=True))


def test_no_two_seeds_change_a_tensor_alike() -> None:
    changes = set()
    for seed in range(1000):
        perturb({"a": (tensor := torch.ones(100))}, seed)
        changes.add(tuple(tensor.tolist()))
    assert len(changes) == 1000
