"""What scripts/engines puts beside SGLang on a CPU: its operators against torch's own, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.needs("torch")

SCRIPTS = Path(__file__).parents[2] / "scripts" / "engines"


@pytest.fixture(scope="module")
def kernels():
    before, finders = list(sys.path), list(sys.meta_path)
    sys.path.insert(0, str(SCRIPTS))
    try:
        import sgl_kernel  # type: ignore[import-not-found]  # it lies in scripts/engines

        yield sgl_kernel
    finally:
        sys.path[:], sys.meta_path[:] = before, finders


def test_what_is_not_there_imports_and_fails_when_called(kernels):
    from sgl_kernel import fused_experts_cpu  # type: ignore[import-not-found]  # in scripts/engines
    from sgl_kernel.scalar_type import scalar_types  # type: ignore[import-not-found]  # in scripts/engines

    for absent in (fused_experts_cpu, scalar_types.int8, kernels.anything.at_all):
        with pytest.raises(NotImplementedError, match="stand-in"):
            absent(1)
    with pytest.raises(AttributeError):
        _ = kernels.__no_such_thing__


@pytest.mark.parametrize(("lengths", "new"), [((5, 3), (5, 3)), ((7, 4), (2, 4)), ((1,), (1,))])
@pytest.mark.parametrize("window", [0, 3])
def test_attention_over_slots_is_torchs(kernels, lengths, new, window):
    torch.manual_seed(0)
    heads, kv, d, slots = 4, 2, 8, 40
    table = torch.randperm(slots)[:20].reshape(2, 10).to(torch.int32)
    keys, values = torch.randn(slots, kv, d), torch.randn(slots, kv, d)
    q, out = torch.randn(sum(new), heads, d), torch.zeros(sum(new), heads, d)
    starts = torch.tensor([0, *new[:-1]])
    requests = torch.arange(len(lengths))
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, out, keys, values, 1.0, 1.0, table, requests, torch.tensor(lengths), torch.tensor(new), starts,
        max(new), d**-0.5, 0.0, False, window, None, None, None, True,
    )  # fmt: skip
    for r, (length, n) in enumerate(zip(lengths, new, strict=True)):
        held = table[r, :length].long()
        rows = slice(int(starts[r]), int(starts[r]) + n)
        at = torch.arange(length - n, length)[:, None] - torch.arange(length)
        mask = (at >= 0) & ((at < window) if window else True)
        k, v = (x[held].repeat_interleave(2, 1).movedim(0, 1) for x in (keys, values))
        want = functional.scaled_dot_product_attention(q[rows].movedim(0, 1), k, v, attn_mask=mask)
        assert torch.allclose(out[rows], want.movedim(0, 1), atol=1e-5)
        if n != 1:
            continue
        again = torch.zeros(1, heads, d)
        slot = held[-1:]
        torch.ops.sgl_kernel.decode_attention_cpu(
            q[rows], keys, values, 1.0, 1.0, again, keys[slot], values[slot], slot, None, table, requests[r : r + 1],
            torch.tensor([length]), d**-0.5, 0.0, False, window, None, None,
        )  # fmt: skip
        assert torch.allclose(again, out[rows], atol=1e-5)


def test_attention_that_is_not_there_is_refused(kernels):
    x = torch.zeros(1, 1, 1)
    with pytest.raises(NotImplementedError):
        torch.ops.sgl_kernel.decode_attention_cpu(
            x, x, x, 0.5, 1.0, x, None, None, None, None, None, torch.zeros(0), torch.zeros(0), 1.0, 0.0, False, 0,
            None, None,
        )  # fmt: skip


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_chain_is_accepted_as_far_as_the_target_says(kernels, accepted):
    n, target = 3, torch.tensor([[7, 8, 9], [4, 5, 6]])
    drafted = target[:, : n - 1].clone()
    drafted[:, accepted:] = 0
    candidates = torch.cat([torch.tensor([[1], [2]]), drafted], dim=1)
    shape = (2, n)
    index, following, sibling = (torch.full(shape, -1) for _ in range(3))
    positions, mask = torch.zeros(2 * n, dtype=torch.int64), torch.zeros(2 * n * n, dtype=torch.bool)
    kernels.build_tree_kernel_efficient_cpu(
        None, None, torch.tensor([10, 20]), mask, positions, index, following, sibling, 1, 2, n, 1
    )
    assert positions.tolist() == [10, 11, 12, 20, 21, 22]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert mask.reshape(2, n, n)[1].equal(torch.ones(n, n, dtype=torch.bool).tril())
    predicts, chosen, count = torch.zeros(2 * n, dtype=torch.int32), torch.full(shape, -1), torch.zeros(2)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=chosen, accept_token_num=count, candidates=candidates, retrive_index=index,
        retrive_next_token=following, retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    assert count.tolist() == [accepted] * 2
    for r in range(2):
        numbers = chosen[r][chosen[r] >= 0]
        assert numbers.tolist() == [r * n + i for i in range(accepted + 1)]
        assert predicts[numbers].tolist() == target[r, : accepted + 1].tolist()
    bonus, slots = torch.zeros(2), torch.zeros(2 * (accepted + 1), dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.arange(2 * n), count.long() + 1, bonus, n)
    assert bonus.tolist() == [accepted, n + accepted]
    kernels.fill_accept_out_cache_loc_cpu(chosen, torch.arange(100, 100 + 2 * n), slots)
    assert slots.tolist() == [100 + i for i in range(accepted + 1)] + [100 + n + i for i in range(accepted + 1)]
    with pytest.raises(NotImplementedError):
        kernels.build_tree_kernel_efficient_cpu(None, None, torch.zeros(1), mask, positions, index, following, sibling,
                                                2, 2, n, 1)  # fmt: skip


def test_slots_of_the_cache_are_copied_and_moved(kernels):
    table = torch.arange(20).reshape(2, 10)
    out = torch.zeros(5, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(
        torch.tensor([1, 0]), table, torch.tensor([2, 5]), torch.tensor([4, 8]), out, 10
    )
    assert out.tolist() == [12, 13, 5, 6, 7]
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([1, 0]), table, torch.tensor([0, 0]), torch.tensor([2, 3]), torch.tensor([90, 91, 92, 93, 94]), 10
    )
    assert table[1, :3].tolist() == [90, 91, 12]
    assert table[0, :4].tolist() == [92, 93, 94, 3]
    out = torch.zeros(4, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(torch.tensor([0, 1]), table, torch.tensor([4, 6]), out, 10, 1, 2)
    assert out.tolist() == [4, 5, 16, 17]
    rows = kernels.build_draft_decode_metadata_cpu(table, torch.tensor([1]), torch.tensor([3]), 2, 2, 10)
    assert rows[:, :5].tolist() == [[90, 91, 12, 13, 14], [90, 91, 12, 15, 16]]
    buffer = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr()]), torch.tensor([12]), torch.tensor([0, 1]), torch.tensor([1, 3])
    )
    assert buffer.tolist() == [[3, 4, 5], [9, 10, 11], [6, 7, 8], [9, 10, 11]]


def test_torchvision_is_declared_once(tmp_path):
    init = tmp_path / "__init__.py"
    init.write_text("x = 1\n")
    for _ in range(2):
        subprocess.run([sys.executable, str(SCRIPTS / "declare_torchvision.py"), str(init)], check=True)
    assert init.read_text().count("# declared by") == 1
    assert init.read_text().endswith("x = 1\n")


@pytest.mark.parametrize("script", ["setup_vllm_cpu.sh", "setup_sglang_cpu.sh"])
def test_a_script_without_its_argument_says_how_it_is_called(script):
    run = subprocess.run([str(SCRIPTS / script)], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "usage" in run.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_environments_have_what_the_configuration_of_pytest_asks_for(engine):
    """``timeout`` is an option of pytest-timeout, and pytest refuses options that it does not know."""
    options = tomllib.loads((SCRIPTS.parents[1] / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "timeout" in options
    assert "pytest-timeout" in (SCRIPTS / f"{engine}_cpu.txt").read_text("utf-8").splitlines()
    assert "\npytest-timeout==" in (SCRIPTS / f"{engine}_cpu.lock.txt").read_text("utf-8")
