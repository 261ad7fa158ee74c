from __future__ import annotations

import pytest
import torch

from redline.bench.workload.inputs import changed_slightly, input_shapes, redraw, same_values


def one(tensor: torch.Tensor, seed: int = 0, vocabulary: dict[str, int] | None = None) -> torch.Tensor:
    (drawn,), _ = redraw(((tensor,), {}), seed, vocabulary or {})
    return drawn


def test_drawing_again_keeps_what_is_known_of_the_values() -> None:
    original = 5 + 2 * torch.randn(64, 3, 8, 8)
    drawn = one(original)
    assert drawn.shape == original.shape
    assert not torch.equal(drawn, original)
    assert drawn.mean().item() == pytest.approx(5, abs=0.5)
    assert drawn.std().item() == pytest.approx(2, rel=0.2)


def test_a_seed_means_the_same_numbers() -> None:
    original = torch.randn(4, 5)
    assert torch.equal(one(original, 3), one(original, 3))
    assert not torch.equal(one(original, 3), one(original, 4))


def test_a_constant_becomes_standard_normal_because_inputs_are_never_zeros() -> None:
    drawn = one(torch.zeros(1000))
    assert drawn.std().item() == pytest.approx(1, rel=0.1)


def test_values_stay_on_their_side_of_zero() -> None:
    probabilities = torch.rand(1000)
    drawn = one(probabilities)
    assert drawn.min() >= probabilities.min()
    assert drawn.max() <= probabilities.max()


def test_quarters_of_an_image_differ() -> None:
    image = one(torch.randn(1, 1, 64, 64))
    quarters = torch.stack([half.mean() for row in image.chunk(2, 2) for half in row.chunk(2, 3)])
    assert quarters.std() > 0.1, "pure noise averages to the same everywhere"


def test_what_is_not_to_be_drawn_stays() -> None:
    kept = [
        torch.tensor([True, False]),
        torch.tensor([1, 1, 0, 1]),  # an attention mask
        torch.tensor(0.5),  # a scalar setting
        torch.tensor([0.0, float("-inf")]),  # an additive mask
        torch.empty(0, 3),
        torch.eye(3).to_sparse(),
    ]
    for tensor in kept:
        assert one(tensor) is tensor or torch.equal(one(tensor), tensor)


def test_integers_stay_in_the_range_seen_or_declared() -> None:
    tokens = torch.tensor([[7, 9, 12]])
    drawn = torch.cat([one(tokens, seed) for seed in range(30)])
    assert drawn.min() == 7
    assert drawn.max() == 12
    declared = torch.cat([one(tokens, seed, {"0": 100}) for seed in range(30)])
    assert declared.max() > 12
    assert declared.max() < 100


def test_layout_dtype_and_grad_are_kept() -> None:
    original = torch.randn(2, 3, 4, 4).half().to(memory_format=torch.channels_last).requires_grad_()
    drawn = one(original)
    assert drawn.dtype is torch.float16
    assert drawn.is_contiguous(memory_format=torch.channels_last)
    assert drawn.requires_grad
    assert one(torch.randn(3, dtype=torch.complex64)).is_complex()


def slightly(tensor: torch.Tensor) -> torch.Tensor:
    (changed,), _ = changed_slightly(((tensor,), {}), 0)
    return changed


def test_a_little_noise_leaves_what_an_input_means() -> None:
    boxes = torch.tensor([[0.0, 0.0, 8.0, 9.0], [2.0, 3.0, 4.0, 9.0]])
    changed = slightly(boxes)
    assert not torch.equal(changed, boxes)
    assert torch.equal(changed == 0, boxes == 0), "zeros stay zeros"
    assert changed.max() <= 9, "within the range that was given"
    assert (changed - boxes).norm() < 0.5 * boxes.norm()
    values = -torch.rand(100)
    assert bool((slightly(values) <= 0).all()), "signs stay"


def test_noise_touches_floating_tensors_alone() -> None:
    for tensor in (
        torch.arange(6),
        torch.tensor([True, False]),
        torch.tensor(0.5),
        torch.tensor([0.0, float("-inf")]),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ):
        assert slightly(tensor) is tensor
    assert not torch.equal(slightly(torch.ones(4)), torch.ones(4)), "constants move too"
    assert slightly(torch.randn(4, dtype=torch.complex64)).is_complex()


def test_values_are_compared_part_by_part() -> None:
    one = ((torch.ones(2), [torch.arange(3)]), {"x": torch.zeros(1)})
    same = ((torch.ones(2), [torch.arange(3)]), {"x": torch.zeros(1)})
    other = ((torch.ones(2), [torch.arange(3) + 1]), {"x": torch.zeros(1)})
    assert same_values(one, same)
    assert not same_values(one, other)


def test_shapes_print_with_names_where_there_are_several() -> None:
    assert input_shapes(((torch.zeros(1, 3, 8, 8),), {})) == ("1×3×8×8 float32",)
    shapes = input_shapes(((), {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "scale": torch.tensor(1.0)}))
    assert shapes == ("input_ids 2×5 int64", "scale scalar float32")
