from __future__ import annotations

import pytest
import torch

from redline.bench.workload.inputs import input_shapes, leading_size, redraw, resize_leading


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


def test_resizing_touches_what_shares_the_leading_size() -> None:
    images, masks, ids = torch.randn(2, 3, 4, 4), torch.ones(2, 5, dtype=torch.bool), torch.tensor([[3], [8]])
    other, scalar = torch.randn(7, 2), torch.tensor(1.0)
    args, kwargs = resize_leading(((images, other, 3), {"mask": masks, "ids": ids, "scale": scalar}), 5, seed=0)
    assert args[0].shape == (5, 3, 4, 4)
    assert args[1] is other
    assert args[2] == 3
    assert kwargs["mask"].shape == (5, 5)
    assert kwargs["ids"].flatten().tolist() == [3, 8, 3, 8, 3], "integers repeat: they may be lengths or positions"
    assert kwargs["scale"] is scalar
    assert torch.equal(args[0][:2], images), "the rows there were stay"
    assert len({row.sum().item() for row in args[0]}) == 5, "no two items alike"


def test_resizing_downwards_takes_the_first_rows() -> None:
    images = torch.randn(8, 3)
    (resized,), _ = resize_leading(((images,), {}), 2, seed=0)
    assert torch.equal(resized, images[:2])


def test_the_leading_size_is_that_of_the_first_tensor_with_one() -> None:
    assert leading_size(((torch.tensor(1.0), [torch.zeros(4, 2)]), {})) == 4
    assert leading_size(((3,), {"x": torch.zeros(6)})) == 6
    assert leading_size(((3,), {})) is None


def test_shapes_print_with_names_where_there_are_several() -> None:
    assert input_shapes(((torch.zeros(1, 3, 8, 8),), {})) == ("1×3×8×8 float32",)
    shapes = input_shapes(((), {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "scale": torch.tensor(1.0)}))
    assert shapes == ("input_ids 2×5 int64", "scale scalar float32")
