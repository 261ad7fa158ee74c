"""How far outputs are apart: numbers, integers, texts, and lists of finds in any order."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import planted_faults  # noqa: F401  (registers its switches)
from applying import judged as judged_recipe
from torch import Tensor, nn

from redline.bench.recipe.difference import Difference, answer_of, difference
from redline.bench.recipe.numerics import Reference


def compared(found: list[Any], reference: list[Any]) -> Difference:
    return difference([answer_of(each) for each in found], [answer_of(each) for each in reference])


class TestNumbers:
    def test_the_error_is_over_what_depends_on_the_input(self) -> None:
        reference = [torch.tensor([[101.0, 99.0]]), torch.tensor([[99.0, 101.0]])]
        found = compared([each + 1.0 for each in reference], reference)
        assert found.rel_l2 == pytest.approx(1.0), "of a hundred it is one; of what moves it is all"
        assert found.top1_agreement == 1.0
        assert found.equal_share is None
        swapped = compared(reference[::-1], reference)
        assert swapped.rel_l2 == pytest.approx(2.0)
        assert swapped.cosine == pytest.approx(-1.0)
        assert swapped.top1_agreement == 0.0

    def test_ragged_rows_are_compared_one_by_one(self) -> None:
        rows = [torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0]])]
        for layout in (torch.jagged, torch.strided):
            reference = [torch.nested.nested_tensor(rows, layout=layout)]
            changed = [torch.nested.nested_tensor([2 * row for row in rows], layout=layout)]
            assert compared(reference, reference).rel_l2 == 0
            assert compared(changed, reference).rel_l2 > 1

    def test_not_a_number_is_the_worst_of_all(self) -> None:
        reference = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
        found = compared([torch.tensor([[1.0, torch.nan]]), reference[1]], reference)
        assert not found.finite
        assert math.isnan(found.rel_l2)
        assert found.cosine is not None
        assert math.isnan(found.cosine)
        told = Reference(number_format="fp16", floor=1e-3).verdict(found)
        assert (told.rel_l2, told.cosine, told.passed) == (None, None, False)

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_complex_quantized_and_sparse_numbers_are_numbers(self) -> None:
        for make in (
            lambda values: torch.complex(values, -values),
            lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            lambda values: values.to_sparse(),
        ):
            reference = [make(torch.tensor([[1.0, 0.0]])), make(torch.tensor([[0.0, 1.0]]))]
            assert compared(reference, reference).rel_l2 == 0.0
            assert compared(reference[::-1], reference).rel_l2 > 1

    @pytest.mark.parametrize("fixed", [torch.tensor([[10.0, 20.0]]), torch.tensor([7])], ids=["numbers", "integers"])
    def test_a_part_that_never_moves_is_compared_by_its_size(self, fixed: Tensor) -> None:
        """Anchors, masks and position tables beside the answer: they carry no signal, but may still come out wrong."""
        reference = [(row, fixed) for row in torch.eye(2)[:, None]]
        same = compared(reference, reference)
        assert (same.degenerate, same.rel_l2) == (False, 0.0)
        assert compared([(logits, 2 * fixed) for logits, _ in reference], reference).rel_l2 == pytest.approx(1.0)
        assert compared([fixed, fixed], [fixed, fixed]).degenerate, "by itself it is no signal"


class TestIntegers:
    def test_are_compared_exactly_over_what_another_input_changes(self) -> None:
        reference = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 7, 8]])]
        same = compared(reference, reference)
        assert (same.rel_l2, same.equal_share, same.by_equality, same.degenerate) == (0.0, 1.0, True, False)
        one_off = [torch.tensor([[1, 2, 3, 5]]), reference[1]]
        found = compared(one_off, reference)
        assert found.equal_share == 0.75
        assert found.rel_l2 == pytest.approx(0.5), "a quarter is unequal, a half depends on the input"
        ignoring = compared([reference[0], reference[0]], reference)
        assert ignoring.rel_l2 == pytest.approx(1.0)
        assert not Reference(number_format="fp16", floor=0.0).verdict(ignoring).passed

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.tensor([True, False, True]), torch.tensor([True, True, False])),
            ([1, 2, 3], [1, 2, 4]),
            ("a cat", "a dog"),
            ({"ids": [5, 6], "text": "x"}, {"ids": [5, 7], "text": "x"}),
        ],
    )
    def test_booleans_plain_numbers_and_texts_too(self, one: Any, other: Any) -> None:
        assert compared([one, other], [one, other]).equal_share == 1.0
        wrong = compared([other, one], [one, other])
        assert wrong.by_equality
        assert wrong.rel_l2 == pytest.approx(1.0)

    def test_what_ends_elsewhere_is_unequal_from_there_on(self) -> None:
        reference = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]])]
        shorter = [torch.tensor([[1, 2]]), reference[1]]
        assert compared(shorter, reference).equal_share == 0.5
        assert compared([torch.tensor([1, 2, 3, 4]), reference[1]], reference).equal_share == 0.0

    def test_beside_scores_the_scores_decide(self) -> None:
        """Two classes that are nearly equal: which comes first hangs on the last bit, and either answer is right."""
        scores = [torch.tensor([[1.0, 1.0001, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])]
        reference = [(each, each.argmax(1)) for each in scores]
        rounded = [torch.tensor([[1.0002, 1.0001, 0.0]]), scores[1]]
        found = compared([(each, each.argmax(1)) for each in rounded], reference)
        assert found.equal_share == 0.0
        assert not found.by_equality
        assert found.rel_l2 < 1e-3

    def test_grossly_wrong_integers_are_wrong_whatever_the_scores_say(self) -> None:
        scores = [torch.randn(2, 50), torch.randn(2, 50)]
        reference = [(each, each.argsort(1)) for each in scores]
        shifted = [(each, each.argsort(1).roll(1, 1)) for each in scores]
        assert compared(shifted, reference).rel_l2 > 0.8


class TestLists:
    """What detectors answer: as many finds as there are, the surest first."""

    @staticmethod
    def finds(seed: int, count: int = 40) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        corners = 100 * torch.rand(count, 2, generator=generator)
        return {
            "boxes": torch.cat([corners, corners + 10 + 20 * torch.rand(count, 2, generator=generator)], 1),
            "labels": torch.randint(1, 5, (count,), generator=generator),
            "scores": torch.rand(count, generator=generator).sort(descending=True).values,
        }

    def test_finds_are_compared_in_any_order_by_what_is_missing_and_by_what_is_off(self) -> None:
        reference, order = [[self.finds(0)], [self.finds(1)]], torch.randperm(40)

        def with_all(change: Any) -> Difference:
            return compared([[change(image) for image in images] for images in reference], reference)

        shuffled = with_all(lambda image: {name: part[order] for name, part in image.items()})
        assert shuffled.rel_l2 == pytest.approx(0.0, abs=1e-6)
        assert 0 < with_all(lambda image: {name: part[:-1] for name, part in image.items()}).rel_l2 < 0.4
        assert compared(reference[::-1], reference).rel_l2 >= 1.0, "those of another image"
        assert with_all(lambda image: {**image, "boxes": image["boxes"] + 300}).rel_l2 > 1.0
        nothing = [[{name: part[:0] for name, part in self.finds(0).items()}]] * 2
        assert compared(nothing, nothing).degenerate, "nothing found is no signal"


class Greedy(nn.Module):
    """Generates tokens one by one, as `generate` does: integers in, integers out."""

    def __init__(self, steps: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 64)
        self.steps = steps

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(self.steps):
            hidden, _ = self.mix(self.embedding(tokens))
            tokens = torch.cat([tokens, self.head(hidden[:, -1:]).argmax(-1)], dim=1)
        return tokens


class TestGenerating:
    @pytest.mark.parametrize("recipe", ["fp16", "bf16"])
    def test_a_model_that_generates_can_be_checked(self, recipe: str) -> None:
        torch.manual_seed(0)
        numerics = judged_recipe(recipe, Greedy(), torch.randint(0, 64, (4, 8)))
        assert numerics.by_equality
        assert not numerics.degenerate
        assert numerics.passed, str(numerics.reason)
        assert numerics.equal_share is not None
        assert numerics.equal_share > 0.5
        assert "of the integers are equal" in str(numerics.reason)

    def test_one_that_ignores_its_input_is_caught(self) -> None:
        torch.manual_seed(0)
        numerics = judged_recipe("fault-ignores-input", Greedy(), torch.randint(0, 64, (4, 8)))
        assert not numerics.passed
        assert not numerics.degenerate
